"""The places of tensors: where they lie in memory, and as what.

A place changes when the same tensor gets other memory, becomes another view of it, is cut otherwise, or becomes an
instance of another class. Thousands of tensors are compared column by column, without a frame of Python for each; and
all at once, if torch can.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from ckptlib.state.guard import guard_of


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, as it lies in memory; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns the place of one tensor, as `places` does."""
    if not isinstance(tensor, DTensor):
        return place_of_plain(tensor)
    return tensor._spec, *place_of_plain(tensor._local_tensor)[1:]


def place_of_plain(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns the place of a tensor that is no DTensor."""
    return (
        *(None, tensor.data_ptr(), tensor.size(), tensor.stride()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.dtype),
    )


def places(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[object], ...]:
    """Returns the places of tensors, which compare equal as long as nothing of that has changed."""
    taken = _take_apart(tensors)
    local = taken.local
    return taken.kinds, taken.specs, list(map(_ADDRESS, local)), list(map(type, local)), *_views(local)


class Places:
    """The places of tensors at one time. The caller checks that the tensors are the same objects."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._before = places(tensors)
        self._kinds, self._specs, self._addresses, *_ = self._before
        self._guard = guard_of(_take_apart(tensors).local)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether these tensors, which are the same objects, lie where they lay, and are what they were."""
        taken = _take_apart(tensors)
        if (taken.kinds, taken.specs) != (self._kinds, self._specs):
            return False
        if self._guard is not None and self._guard.check(*taken.local):
            return list(map(_ADDRESS, taken.local)) == self._addresses
        return self._before == places(tensors)  # the guard says no to more than what counts here


class _Taken(NamedTuple):
    """Tensors, with the local ones that DTensors are made of taken out."""

    kinds: list[type]
    """The types of all tensors."""
    specs: list[object]
    """The specs of the DTensors."""
    local: list[torch.Tensor]
    """The local tensors of the DTensors, then the other tensors."""


def _take_apart(tensors: Sequence[torch.Tensor]) -> _Taken:
    kinds = list(map(type, tensors))
    is_placed = {kind: issubclass(kind, DTensor) for kind in {*kinds}}
    if not any(is_placed.values()):
        return _Taken(kinds, [], list(tensors))
    flags = list(map(is_placed.__getitem__, kinds))
    placed = list(compress(tensors, flags))
    others = compress(tensors, map(operator.not_, flags))
    return _Taken(kinds, list(map(_SPEC, placed)), [*map(_LOCAL, placed), *others])


_SPEC: Callable[[torch.Tensor], object] = operator.attrgetter("_spec")
_LOCAL: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def _views(local: Sequence[torch.Tensor]) -> tuple[list[object], ...]:
    """Returns, in columns, how each tensor views its memory; none is a DTensor."""
    dtypes: list[torch.dtype] = list(map(_DTYPE, local))
    columns = (list(map(column, local)) for column in _COLUMNS)
    if not any(dtype.is_complex for dtype in {*dtypes}):  # no others can be conjugated
        return cast(list[object], dtypes), *columns
    return cast(list[object], dtypes), list(map(torch.Tensor.is_conj, local)), *columns


_ADDRESS = torch.Tensor.data_ptr
_DTYPE: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")
_COLUMNS: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.is_neg,
)
"""All of them are functions of C."""
