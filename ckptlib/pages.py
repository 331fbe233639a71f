"""The page: the unit in which slots are mapped, packs are cut and direct I/O is done. No torch, no I/O."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Part of the formats, whatever the machine's own page is. Every disk accepts it as the alignment of address, offset
and length in direct I/O; some would accept 512."""


def round_up(nbytes: int) -> int:
    """Rounds up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
