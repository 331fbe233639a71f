"""Reads a step into numpy arrays of bytes; the caller knows their dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from ckptlib.errors import NoRoom
from ckptlib.format import dtypes
from ckptlib.pages import PAGE_BYTES
from ckptlib.reading.reader import StepReader
from ckptlib.reading.requests import ByteCopy, Landing, Target

_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("V16"),
}
"""numpy dtypes by size; elements are copied bit for bit."""


class Raw(NamedTuple):
    """A row-major array of elements of a dtype that numpy may not have."""

    array: np.ndarray
    """Elements of the same size."""
    dtype: str
    """torch's name of the dtype."""

    @property
    def data(self) -> memoryview:
        """Bytes of the array."""
        return self.array.reshape(-1).view(np.uint8).data


ALIGN_FROM_BYTES = 1 << 20
"""Arrays of this size or more begin on a page: numpy's own begin 16 bytes behind one, and the kernel copies slower
to there."""


def empty(name: str, dtype: str, shape: Sequence[int]) -> Raw:
    """Returns memory for a box of a tensor. Raises NoRoom."""
    try:
        return Raw(_empty(tuple(shape), raw_dtype(dtype)), dtype)
    except (MemoryError, ValueError) as error:  # ValueError: a size beyond 64 bits
        raise NoRoom(f"{name}: no memory for {dtype}{list(shape)}: {error}; read it in slices") from error


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < ALIGN_FROM_BYTES:
        return np.empty(shape, dtype)
    room = np.empty(nbytes + PAGE_BYTES, np.uint8)
    skipped = -room.ctypes.data % PAGE_BYTES
    return room[skipped : skipped + nbytes].view(dtype).reshape(shape)


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Returns a numpy dtype with elements of the same size."""
    return _RAW[dtypes.itemsize(dtype)]


class ArrayTarget(Target):
    """An array to be filled."""

    __slots__ = ()

    def __init__(self, raw: Raw) -> None:
        array = raw.array
        super().__init__(array, raw.dtype, array.size, array.flags.c_contiguous, array.ctypes.data)

    @override
    def flat(self) -> object:
        assert isinstance(self.memory, np.ndarray)
        return self.memory.reshape(-1)


class ArrayLanding(Landing):
    """Copies stretches of chunks into arrays."""

    @override
    def put(self, copy: ByteCopy, data: memoryview) -> None:
        assert isinstance(copy.target, np.ndarray)
        stretch = np.frombuffer(data, raw_dtype(copy.dtype)).reshape(copy.shape)
        copy.target[copy.outside] = stretch[copy.inside]


class ArrayReader(StepReader[Raw]):
    """Reads one step for one rank, into arrays."""

    @override
    def target(self, memory: Raw) -> Target:
        return ArrayTarget(memory)

    @override
    def landing(self, memory: Iterable[Raw]) -> Landing:
        return ArrayLanding()
