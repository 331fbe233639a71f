"""One step of an optimizer, for a peer that has the state before it: the difference of the new state from a prediction.

The new average is kept as residuals against its share of the old one, by byte planes. The arrays that follow from it
and the old state (see `update_rules`) are kept as residuals that are nearly all zero. So a step of AdamW takes 3 of 12
bytes per parameter, bit for bit. The old state must be that of the step just before: across two steps, plain planes are
as small. Peers have that state of one another, and a store has not, so this is no codec of chunks.

A frame:

    byte, byte           version, rule
    byte, byte           1 if denormals are taken for zeros; number of arrays
    byte * arrays        bytes of a word: 4 for float32, 2 for bfloat16
    uint32               number of elements
    float32 * scalars    see `UpdateRule`
    planes               of the first array its bytes, highest first; of each other array one of residuals, signed,
                         which are -128 if they are larger, one of the places (uint32) of those, and one of their
                         words

Little endian; planes as `plane_frames` has them. Frames come from a peer: no number in them is believed that does not
fit the arrays they are to fill.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlib.codecs.bit_residuals import EXCEPTION, Bytes, Floats, Scratch, Words, floats_of, flushes_denormals
from ckptlib.codecs.pairs import Pairer
from ckptlib.codecs.plane_frames import FrameReader, Parts, coded, paired, stored
from ckptlib.codecs.update_rules import RULES, Scalars, UpdateRule
from ckptlib.errors import FormatError

MAX_ELEMENTS = 1 << 18
"""The most elements in a frame. Encoding and decoding take some 16 bytes of memory for each."""

BLOCK = 1 << 15
"""Elements that are processed at a time, so that they stay in a core's own cache. For AdamW, blocks of 8, 16, 32 and 64
Ki ran at 0.95, 1.13, 1.23 and 1.18 GB/s of state (encoding, one core of a 2-core machine)."""

SAMPLE = 4096
"""Elements that are encoded to see whether a rule fits."""

MAX_SHARE = 0.6
"""Share of the raw bytes. A larger frame is not worth the work: the rule does not fit."""

_VERSION = 2
_HEAD = struct.Struct("<BBBB")
_COUNT = struct.Struct("<I")

_NOISE_BITS = 6.6
"""Bits per byte. Planes with more are kept as they are: zstd takes 2 ns per byte, links of 0.1 GB/s take 10."""


class OptimizerStep:
    """Encodes and decodes steps, in memory that it reuses. For one thread."""

    def __init__(self) -> None:
        self._scratch = Scratch(BLOCK)
        self._room = [np.empty(BLOCK, np.float32) for _ in range(6)]
        """Memory for bfloat16 arrays as floats: three old ones, and three new ones."""
        self._planes = np.empty(6 * MAX_ELEMENTS, np.uint8)
        self._pairer = Pairer(MAX_ELEMENTS)

    def try_sample(self, rule: UpdateRule, by: Scalars, old: Sequence[Words], new: Sequence[Words]) -> float | None:
        """Returns the bytes of a sample's frame per byte of the sample; None if the rule does not fit, or if the sample
        does not come back bit for bit."""
        sampled = _sample(len(old[0]))
        old, new = [array[sampled] for array in old], [array[sampled] for array in new]
        frame = self.encode(rule, by, old, new)
        if frame is None:
            return None
        there = [np.empty_like(array) for array in new]
        self.decode(frame, old, there)
        exact = all(np.array_equal(array, other) for array, other in zip(new, there, strict=True))
        return len(frame) / sum(array.nbytes for array in new) if exact else None

    def encode(self, rule: UpdateRule, by: Scalars, old: Sequence[Words], new: Sequence[Words]) -> bytes | None:
        """Returns the frame that makes `new` of `old`, or None if the rule does not fit.

        The arrays are the rule's, of up to MAX_ELEMENTS elements; each has the same type of word in `old` and `new`.
        """
        count, scratch = len(new[0]), self._scratch
        assert 0 < count <= MAX_ELEMENTS
        assert len(new) == len(old) == rule.num_arrays
        planes = _Planes.within(self._planes, new[0].itemsize, count, len(new))
        places: list[list[npt.NDArray[np.int64]]] = [[] for _ in new]
        with np.errstate(all="ignore"):
            for start in range(0, count, BLOCK):
                block = slice(start, min(start + BLOCK, count))
                before, after = self._floats(old, 0, block), self._floats(new, 3, block)
                for i, words in enumerate(new):
                    predicted = rule.predict(i, before, after, by, self._floats_to_spend(block))
                    if i == 0:
                        planes.cut(scratch.residual(words[block], predicted), block)
                    elif scratch.narrow(words[block], predicted, planes.narrow[i][block]):
                        places[i].append(np.flatnonzero(planes.narrow[i][block] == EXCEPTION) + start)
        frame: Parts = [
            _HEAD.pack(_VERSION, rule.number, flushes_denormals(), len(new)),
            bytes(array.itemsize for array in new),
            _COUNT.pack(count),
            np.array(by, "<f4").tobytes(),
            *paired(planes.wide[0], self._pairer),
        ]
        for plane in planes.wide[1:]:
            frame += coded(plane) if _entropy(plane) < _NOISE_BITS else stored(plane)
        for i, words in enumerate(new[1:], 1):
            where = np.concatenate([np.empty(0, np.int64), *places[i]])
            frame += paired(planes.narrow[i], self._pairer)
            frame += [*stored(where.astype("<u4").view(np.uint8)), *stored(words[where].view(np.uint8))]
        joined = b"".join(frame)
        return joined if len(joined) <= MAX_SHARE * sum(array.nbytes for array in new) else None

    def decode(self, frame: bytes | memoryview, old: Sequence[Words], out: Sequence[Words]) -> None:
        """Fills `out`, arrays like those of `old`. Raises FormatError, and then leaves anything in them."""
        count, scratch, reader = len(out[0]), self._scratch, FrameReader(memoryview(frame))
        rule, by = _read_head(reader, out)
        planes = _Planes.within(self._planes, out[0].itemsize, count, len(out))
        reader.plane_into(planes.wide[0], self._pairer, "the highest bytes")
        planes.replace_lower([reader.plane(plane.nbytes, "lower bytes") for plane in planes.wide[1:]])
        exceptions = [(np.empty(0, np.uint32), out[0][:0])]
        for i, words in enumerate(out[1:], 1):
            reader.plane_into(planes.narrow[i], self._pairer, "residuals")
            exceptions.append(_read_exceptions(reader, planes.narrow[i], words.dtype))
        reader.end()
        with np.errstate(all="ignore"):
            for start in range(0, count, BLOCK):
                block = slice(start, min(start + BLOCK, count))
                before, after = self._floats(old, 0, block), list[Floats]()
                for i, words in enumerate(out):
                    predicted = rule.predict(i, before, after, by, self._floats_to_spend(block))
                    if i == 0:
                        residual = scratch.room(words[block])
                        planes.join(residual, block)
                        scratch.restore(residual, predicted, words[block])
                    else:
                        scratch.restore_narrow(planes.narrow[i][block], predicted, words[block])
                    where, true = exceptions[i]
                    first, last = np.searchsorted(where, (block.start, block.stop))
                    words[where[first:last]] = true[first:last]
                    after.append(floats_of(words[block], self._room[3 + i]))

    def _floats(self, arrays: Sequence[Words], first: int, block: slice) -> list[Floats]:
        return [floats_of(words[block], self._room[first + i]) for i, words in enumerate(arrays)]

    def _floats_to_spend(self, block: slice) -> list[Floats]:
        return [room[: block.stop - block.start] for room in self._scratch.floats]


class _Planes:
    """The residuals as planes of bytes."""

    def __init__(self, wide: list[Bytes], narrow: list[Bytes]) -> None:
        self.wide = wide
        """Planes of the first array: its highest bytes, the next ones, and in float32 the two lowest."""
        self.narrow = narrow
        """One byte per element of each other array; empty for the first."""
        self._low = wide[2].view("<u2") if len(wide) == 3 else None

    @staticmethod
    def sizes(itemsize: int, count: int) -> list[int]:
        """Returns the bytes of each plane of the first array."""
        return [count, count, 2 * count] if itemsize == 4 else [count, count]

    @classmethod
    def within(cls, memory: Bytes, itemsize: int, count: int, num_arrays: int) -> _Planes:
        """Returns planes to be filled, in memory that is reused."""
        wide, at = [], 0
        for nbytes in cls.sizes(itemsize, count):
            wide.append(memory[at : at + nbytes])
            at += nbytes
        rows = memory[at : at + (num_arrays - 1) * count].reshape(num_arrays - 1, count)
        return cls(wide, [wide[0][:0], *rows])

    def replace_lower(self, planes: list[Bytes]) -> None:
        """Replaces the lower planes of the first array by these, wherever they are."""
        self.wide[1:] = planes
        self._low = planes[1].view("<u2") if len(planes) > 1 else None

    def cut(self, residual: Words, block: slice) -> None:
        """Stores these residuals, and overwrites them."""
        top, second = self.wide[:2]
        if self._low is not None:
            np.copyto(self._low[block], residual, casting="unsafe")
            np.right_shift(residual, 16, out=residual)
        np.copyto(second[block], residual, casting="unsafe")
        np.right_shift(residual, 8, out=residual)
        np.copyto(top[block], residual, casting="unsafe")

    def join(self, residual: Words, block: slice) -> None:
        """Fills `residual` with what `cut` stored."""
        top, second = self.wide[:2]
        np.copyto(residual, top[block])
        np.left_shift(residual, 8, out=residual)
        np.bitwise_or(residual, second[block], out=residual)
        if self._low is not None:
            np.left_shift(residual, 16, out=residual)
            np.bitwise_or(residual, self._low[block], out=residual)


def _read_head(reader: FrameReader, out: Sequence[Words]) -> tuple[UpdateRule, Scalars]:
    """Reads the head of a frame. Raises FormatError if it is for other arrays, or treats denormals otherwise."""
    version, number, flushes, num_arrays = _HEAD.unpack(reader.take(_HEAD.size, "its head"))
    rule = RULES.get(number)
    if version != _VERSION or rule is None:
        raise FormatError(f"a step of an optimizer: version {version}, rule {number}; have all ranks run one ckptlib")
    if bool(flushes) != flushes_denormals():
        raise FormatError(
            "a step of an optimizer: made where denormals are {}, read where they are not; call "
            "torch.set_flush_denormal on all ranks alike".format("taken for zeros" if flushes else "kept")
        )
    itemsizes = [*reader.take(num_arrays, "bytes of words")]
    (count,) = _COUNT.unpack(reader.take(_COUNT.size, "the number of elements"))
    expected = [array.itemsize for array in out]
    if itemsizes != expected or len(expected) != rule.num_arrays or count != len(out[0]):
        raise FormatError(
            f"a step of an optimizer: {count:,} elements in arrays of {itemsizes} bytes each, expected "
            f"{len(out[0]):,} in arrays of {expected}"
        )
    return rule, [*np.frombuffer(reader.take(4 * rule.num_scalars, "scalars"), "<f4").astype(np.float32)]


def _read_exceptions(
    reader: FrameReader, narrow: Bytes, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]:
    """Returns the positions of exceptions, ascending, and their words."""
    expected = np.flatnonzero(narrow == EXCEPTION)
    where = reader.plane(4 * len(expected), "places of exceptions").view("<u4")
    if not np.array_equal(where, expected):
        raise FormatError("a step of an optimizer: exceptions are not where the residuals say")
    return where, reader.plane(dtype.itemsize * len(expected), "exceptions").view(dtype)


def _sample(count: int) -> slice | npt.NDArray[np.int64]:
    """Selects SAMPLE elements: runs at even distances."""
    if count <= SAMPLE:
        return slice(None)
    num, length = 16, SAMPLE // 16
    starts = np.arange(num) * ((count - length) // (num - 1))
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _entropy(plane: Bytes) -> float:
    """Returns the bits per byte, estimated by a sample."""
    counts = np.bincount(plane[:: max(1, len(plane) // SAMPLE)], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
