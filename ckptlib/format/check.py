"""Checks: one number per rank, which together tell whether the ranks hold equal data. Pure integers.

If one rank writes for several, every save proves that they hold the same. Each rank digests what it holds in common
with the same other ranks, so there is one digest for each set of holders. The holders of a set form a ring. Each adds a
number that follows from its digest and its own place, and subtracts the number of the next place. If all digests of a
set are equal, the numbers cancel. So the checks of all ranks add up to zero exactly if all sets agree, but for a chance
of 2**-80. That costs one sum, however many ranks and sets there are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash
from typing_extensions import override

from ckptlib.format.documents import Fields

MODULUS = 2**40 - 87
"""A prime. The numbers of a million ranks add up to less than 2**60, so the sum fits in 64 bits."""

_NUMBERS = 2**32
_TEXT = re.compile("[0-9a-f]{28}")


@dataclass(frozen=True, slots=True, order=True)
class Check:
    """One rank's check of one snapshot."""

    number: int
    """Number of the snapshot in its generation, modulo 2**32; the same on all ranks."""
    low: int = 0
    high: int = 0
    """Like `low`, below MODULUS. Both are 0 if the ranks compared everything before they took the snapshot."""

    @override
    def __str__(self) -> str:
        return f"{self.number:08x}{self.low:010x}{self.high:010x}"

    @classmethod
    def parse(cls, text: str) -> Check | None:
        """Parses what `str` returns; returns None for any other text."""
        if _TEXT.fullmatch(text) is None:
            return None
        number, low, high = (int(digits, 16) for digits in (text[:8], text[8:18], text[18:]))
        return cls(number, low, high) if max(low, high) < MODULUS else None


def decode_check(fields: Fields) -> Check | None:
    """Returns the check in a document, or None if it has none. Raises FormatError."""
    if "check" not in fields:
        return None
    found = Check.parse(fields.text("check"))
    if found is None:
        raise fields.fail(f"not a check: {fields.text('check')[:80]!r}")
    return found


def compared(number: int) -> Check:
    """Returns the check of a snapshot before which all ranks compared what they hold."""
    return Check(number % _NUMBERS)


def check_of(number: int, rank: int, digests: Mapping[tuple[int, ...], bytes]) -> Check:
    """Returns this rank's check. `digests` maps the ascending ranks of each set of holders to the digest of what
    exactly these ranks hold in common."""
    number %= _NUMBERS
    low = high = 0
    for ranks, digest in digests.items():
        place = ranks.index(rank)
        what = struct.pack(f"<I{len(ranks)}I", number, *ranks) + digest
        for at, sign in ((place, 1), ((place + 1) % len(ranks), -1)):
            mixed = xxhash.xxh3_128_intdigest(what, seed=at)
            low += sign * (mixed % 2**64 % MODULUS)
            high += sign * ((mixed >> 64) % MODULUS)
    return Check(number, low % MODULUS, high % MODULUS)


def add_up(low: int, high: int) -> bool:
    """Returns whether sums over all ranks tell that they agree."""
    return low % MODULUS == 0 and high % MODULUS == 0


def alike(checks: Iterable[Check | None]) -> bool:
    """Returns whether the checks, one per rank, tell that the ranks agree. None: of a rank that has said nothing.

    Parts that older versions of ckptlib wrote have no checks at all, which counts as agreement. If only some ranks have
    one, they do not agree.
    """
    found = list(checks)
    told = [check for check in found if check is not None]
    if len(told) < len(found):
        return not told
    return len({check.number for check in told}) <= 1 and add_up(sum(c.low for c in told), sum(c.high for c in told))
