"""Finds checkpoints of other libraries in a root that has none of ours: that run may not be meant to begin anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckptlib.errors import StoreError
from ckptlib.format import keys
from ckptlib.policy.patterns import covers
from ckptlib.stores import Store

log = logging.getLogger(__name__)

PATTERNS = {
    "torch.distributed.checkpoint": (".metadata", "*.distcp"),
    "safetensors": ("*.safetensors", "*.safetensors.index.json"),
    "torch.save or Lightning": ("*.pt", "*.pth", "*.ckpt", "*.bin"),
    "torchsnapshot": (".snapshot_metadata",),
}
"""Names by which checkpoints are known, without their directories."""

OWN = (keys.PACKS, keys.PARTS, keys.STEPS, keys.LAYOUTS, keys.GENERATIONS, keys.TRASH, keys.COPIES)
"""Directories of a root. They are left out: packs are safetensors files, too."""

MOST = 1000
"""Most names that are looked at: a page of a bucket's listing."""

NAMED = 5


def foreign(names: Iterable[str]) -> dict[str, str]:
    """Returns those files beside the root's own that are checkpoints by their names, with the library that each is
    probably of."""
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(OWN):
            continue
        last = name.rpartition("/")[2]
        for library, patterns in PATTERNS.items():
            if any(covers(pattern, last) for pattern in patterns):
                found.setdefault(name, library)
    return found


def warn_of_foreign(store: Store) -> None:
    """Warns of other libraries' checkpoints in a root without any, by one request. A hint: an error ends no run."""
    try:
        found = foreign(store.peek(MOST))
    except StoreError as error:
        log.warning("%s: what else is there could not be looked at: %s", store.url, error)
        return
    if not found:
        return
    named = ", ".join(f"{name} ({library})" for name, library in [*found.items()][:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    log.warning(
        "%s holds no checkpoint of ckptlib, so this is a fresh run; but there are files that look like checkpoints: "
        "%s%s. To go on from one of them: ckptlib import SRC URL",
        store.url,
        named,
        more,
    )
