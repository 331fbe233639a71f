"""The parameters of an optimizer and what it keeps for them, in columns.

Columns are compared without a frame of Python for each parameter. Knows nothing of hyper-parameters, nor of names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import torch

from ckptlib.state.structure import same


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns hold the objects themselves, so that no other can have the id of one."""

    kind: type
    """Of the optimizer."""
    sizes: list[int]
    """Of each group: its parameters."""
    params: list[torch.Tensor]
    """Of all groups."""
    holders: list[object]
    """Those that have an entry, in the order of the state."""
    lengths: list[int]
    """Of each entry."""
    keys: list[object]
    """Of all entries."""
    values: list[object]

    def shows(self, other: Entries) -> bool:
        """Whether nothing has changed. Keys are compared by value, all else by identity."""
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
    """As they are now; None where the state is made of anything but dicts of their own with keys of text."""
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
