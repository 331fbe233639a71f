"""Values that each saved rank had of its own, when another number of ranks loads them.

Such values cannot be divided anew: a rank takes those of its own number, or rank 0's if there were none. This module
warns of that, and does not know what the values mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from ckptlib.format.layout import OwnPerRank
from ckptlib.format.values import Json
from ckptlib.loading.reader import Reader
from ckptlib.loading.targets import Targets
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together_at_length
from ckptlib.reading.source import StepSource
from ckptlib.state.optimizers import is_group_path
from ckptlib.state.rng import is_random
from ckptlib.words import listed

log = logging.getLogger(__name__)

MOST = 8
"""The most names in a warning."""


def warn_of_own_values(group: Group, source: StepSource, reader: Reader, loaded: Targets) -> None:
    """Warns on rank 0 of own values that were loaded, except random generators, which warn themselves. Collective."""
    saved, now = source.world_size, group.size
    if saved == now:
        return
    differing = _differing(group, source, reader, loaded)
    if group.rank != 0:
        return
    names = _own_tensors(reader, loaded) | differing
    by = f"{saved} ranks" if saved > 1 else "one rank, or imported"  # an imported step does not tell a number
    if names:
        new = f"ranks {saved} and up have rank 0's"
        over = f"what ranks {now} and up had is loaded nowhere" if saved > now else new
        log.warning(
            "step %d was saved by %s, and each rank had its own in %s. Here are %d: each has what the one of its "
            "number had, and %s",
            *(source.save.step, by, listed(sorted(names), MOST), now, over),
        )
    if loaded.alone:
        log.warning(
            "step %d was saved by %s, and %s tells how many batches a single rank had had. Here are %d: unless as many "
            "as before divide the data, items of this epoch are left out or come twice. ckptlib.data.resumable counts "
            "the items of all ranks",
            *(source.save.step, by, listed(sorted(loaded.alone), MOST), now),
        )


def _own_tensors(reader: Reader, loaded: Targets) -> set[str]:
    layout = reader.layouts[reader.part(reader.own_rank).table.layout]
    own = {entry.name for entry in layout.tensors if isinstance(entry.holding, OwnPerRank)}
    return {want.name for want in loaded.wants if want.name in own and not is_random(want.name)}


def _differing(group: Group, source: StepSource, reader: Reader, loaded: Targets) -> set[str]:
    """Returns the names of plain values that were loaded and that differed between saved ranks: those whose values are
    here, and if ranks became fewer the last one, since hosts and stages divide ranks into blocks. Collective."""
    mine = {
        name: value
        for name, value in reader.part(reader.own_rank).values.items()
        if name in loaded.taken and not is_group_path(name)  # options go with parameters, not with ranks
    }
    first: dict[str, Json] = mine
    if group.size > 1:
        first = json.loads(group.broadcast(json.dumps(mine).encode() if group.rank == 0 else None))
    found = _unlike(mine, first)
    if first and source.world_size > group.size:
        found |= _unlike(first, _last_values(group, source, reader))
    if group.size == 1:
        return found
    return set[str]().union(*map(json.loads, group.gather(json.dumps(sorted(found)).encode())))


def _last_values(group: Group, source: StepSource, reader: Reader) -> Mapping[str, Json]:
    """Returns the values of the last saved rank, on rank 0; none if they cannot be read, since nothing else may depend
    on that, or would be sent between hosts. Collective."""
    last, is_asked = source.world_size - 1, group.rank == 0
    near = source.near({last})
    if near is not None and 0 not in near:
        return {}
    try:
        source.bring({last} if is_asked else ())
        what = f"reading the values of rank {last}"
        return together_at_length(group, what, lambda: reader.part(last).values if is_asked else {})
    except Exception as error:  # a store of the user's may raise a class of its own
        log.debug("step %d: the values of rank %d cannot be compared: %s", source.save.step, last, error)
        return {}


def _unlike(values: Mapping[str, Json], others: Mapping[str, Json]) -> set[str]:
    return {name for name, value in values.items() if name in others and others[name] != value}
