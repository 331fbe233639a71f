"""The bytes, requests and dollars that a run's checkpoints take in a store. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptlib.stores.io_limits import EVEN_PARTS, LARGE_PART_NBYTES, PART_NBYTES
from ckptlib.stores.parts import part_nbytes

MOST_PARTS = 10_000
DOLLARS_PER_PUT = 0.005 / 1000
"""The price of S3 Standard in us-east-1, as of November 2026; a LIST costs the same, a DELETE nothing."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What a run's checkpoints take in a store over some time."""

    num_saves: int
    num_kept: int
    nbytes_written: float
    nbytes_kept: float


def storage(
    nbytes: float, interval_s: float, period_s: float, keep: int, nbytes_changed: float | None = None
) -> Storage:
    """Returns what checkpoints take over `period_s`. `nbytes`: bytes of one. `keep`: how many stay. `nbytes_changed`:
    bytes that a save after the first writes; None: all."""
    num_saves = int(period_s // interval_s)
    kept = min(keep, num_saves)
    changed = nbytes if nbytes_changed is None else nbytes_changed
    first = min(num_saves, 1)
    return Storage(
        num_saves=num_saves,
        num_kept=kept,
        nbytes_written=first * nbytes + (num_saves - first) * changed,
        nbytes_kept=min(kept, 1) * nbytes + max(kept - 1, 0) * changed,
    )


def num_puts(nbytes: int) -> int:
    """Returns how many requests put one object to S3: one, or one for each part and two to begin and complete it."""
    if nbytes < PART_NBYTES:
        return 1
    return -(-nbytes // part_nbytes(nbytes, PART_NBYTES, LARGE_PART_NBYTES, EVEN_PARTS, MOST_PARTS - 1)) + 2


def num_requests(nbytes: float, num_ranks: int) -> int:
    """Returns the most requests that one checkpoint takes: each rank's pack, part and listings, and rank 0's commit."""
    return num_ranks * (num_puts(int(nbytes / num_ranks)) + 2) + 12
