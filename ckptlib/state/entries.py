"""The parameters of an optimizer and what it keeps for them, in columns.

Columns are compared without a frame of Python for each parameter. This module knows nothing of hyper-parameters or
names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import torch

from ckptlib.state.structure import same


@dataclass(frozen=True, slots=True)
class Entries:
    """The parameters and state of an optimizer at one time. Columns hold the objects themselves, so that no other can
    get the id of one."""

    kind: type
    """The optimizer's class."""
    sizes: list[int]
    """The number of parameters in each group."""
    params: list[torch.Tensor]
    """The parameters of all groups."""
    holders: list[object]
    """The parameters that have an entry, in the order of the state."""
    lengths: list[int]
    """The number of values in each entry."""
    keys: list[object]
    """The keys of all entries."""
    values: list[object]

    def shows(self, other: Entries) -> bool:
        """Returns whether nothing has changed. Keys are compared by value, everything else by identity."""
        return (
            self.kind is other.kind
            and self.sizes == other.sizes
            and self.lengths == other.lengths
            and same(self.params, other.params)
            and same(self.holders, other.holders)
            and same(self.values, other.values)
            and self.keys == other.keys
        )


def entries_of(optimizer: torch.optim.Optimizer) -> Entries | None:
    """Returns the entries as they are now; None if the state is made of anything but plain dicts with keys of text."""
    groups = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    if type(state) not in (dict, defaultdict) or not {*map(type, groups)} <= {list}:
        return None
    entries = list(state.values())
    if not {*map(type, entries)} <= {dict}:
        return None
    keys = list(chain.from_iterable(entries))
    if not {*map(type, keys)} <= {str}:
        return None
    return Entries(
        kind=type(optimizer),
        sizes=list(map(len, groups)),
        params=list(chain.from_iterable(groups)),
        holders=list(state),
        lengths=list(map(len, entries)),
        keys=keys,
        values=list(chain.from_iterable(map(dict.values, entries))),
    )
