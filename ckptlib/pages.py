"""The page: what slots are mapped by, packs are cut at, and direct I/O moves. No torch, no I/O."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Part of the formats, whatever the machine's own page is. As the alignment of address, offset and length, direct I/O
takes it on every disk; some would do with 512."""


def round_up(nbytes: int) -> int:
    """To whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
