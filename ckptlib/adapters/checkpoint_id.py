"""Parses a checkpoint_id of torch.distributed.checkpoint into a root and a step in it. Pure."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_NUMBERED = re.compile(r"(step|global_?step|iter|iteration|epoch|checkpoint|ckpt)?[-_=.]?([0-9]{1,18})", re.IGNORECASE)


class Place(NamedTuple):
    """The place of a checkpoint."""

    url: str
    """URL of the root."""
    step: int | None
    """None if the root has one checkpoint at a time, which each save replaces."""


def place_of(checkpoint_id: str | os.PathLike[str] | None) -> Place:
    """Parses `runs/7/step-12` as step 12 of the root `runs/7/step`, `runs/7/12` as that of `runs/7`, `runs/last` as a
    root.

    A number counts if it stands alone, or behind step, global_step, iter, iteration, epoch, checkpoint or ckpt; `run7`
    is a name. Raises ValueError if there is no id.
    """
    if checkpoint_id is None or not os.fspath(checkpoint_id):
        raise ValueError("checkpoint_id is needed: a path or a URL, such as 'runs/7/step-100'")
    path = os.fspath(checkpoint_id)
    scheme, _, rest = path.rpartition("://")
    parent, _, name = rest.rstrip("/").rpartition("/")
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None or (scheme and not parent):  # a bucket's name is no step
        return Place(path, None)
    word, step = numbered[1] or "", int(numbered[2])
    above = parent or ("/" if rest.startswith("/") else "")
    root = "/".join(filter(None, (above.rstrip("/"), word))) or "."
    if above.startswith("/") and not root.startswith("/"):
        root = "/" + root
    return Place(f"{scheme}://{root}" if scheme else root, step)
