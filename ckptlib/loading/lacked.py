"""Names that only the checkpoint or only the state has: on which ranks, and the warnings about them."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence

from ckptlib.loading.targets import Targets
from ckptlib.ranks.group import Group
from ckptlib.state.rng import is_random

log = logging.getLogger(__name__)


def lacked_anywhere(group: Group, wanted: Targets) -> tuple[list[str], list[str], list[str]]:
    """Returns saved names that no rank loads (ranks of a pipeline load different ones); names of some rank's state that
    the checkpoint lacks and may lack; and names of plain values that only some ranks have saved and none loads. Omits
    names of random state. Collective.
    """
    mine = {name for name in wanted.unexpected if not is_random(name)}
    excused, values = wanted.excused(wanted.missing), mine & wanted.plain
    if not group.any(bool(mine or excused)):
        return [], [], []
    # In a pipeline each of a thousand ranks lacks thousands of names, and the ranks of a stage lack the same.
    own_words = zlib.compress(json.dumps([sorted(mine), excused, sorted(values)]).encode(), 1)
    told = [json.loads(zlib.decompress(data)) for data in {*group.gather(own_words)}]
    lacked = set.intersection(*({*names} for names, _, _ in told))
    untouched, own = (set().union(*(names[i] for names in told)) for i in (1, 2))
    own -= lacked
    if own:
        taken = group.gather(json.dumps(sorted(own & wanted.taken)).encode())
        own -= set().union(*map(json.loads, {*taken}))
    return sorted(lacked), sorted(untouched), sorted(own)


def tell_excused(step: int, untouched: Sequence[str], unread: Sequence[str]) -> None:
    """Logs the names that a strict load neither refused nor loaded."""
    for names, what in (untouched, "not in the checkpoint, and left as it was"), (unread, "not in the state"):
        if names:
            more = f" and {len(names) - 40} more" if len(names) > 40 else ""
            log.warning("step %d: %s: %s%s", step, what, ", ".join(names[:40]), more)


def tell_nothing_fits(step: int, wanted: Targets) -> None:
    """Warns if a load that is not strict leaves all of this rank's state as it is: otherwise somebody would train, or
    evaluate, with the initial state."""
    lacked = [name for name in wanted.missing if not is_random(name)]
    if lacked and not wanted.values and all(is_random(want.name) for want in wanted.wants):
        log.warning(
            "step %d: the checkpoint has nothing of this state, all of which is left as it was: %s%s. See whether map= "
            "and only= name what `ckptlib show` lists",
            *(step, ", ".join(lacked[:8]), f" and {len(lacked) - 8} more" if len(lacked) > 8 else ""),
        )
