"""The buffer that a thread reads into."""

from __future__ import annotations

from ckptlib.reading.requests import thread_buffer as _buffer


def test_a_buffer_that_is_used_again_is_as_long_as_asked_for() -> None:
    """One that was just long enough, but for where it begins, gave fewer bytes: the chunk seemed to be damaged."""
    for more in range(200):
        assert len(_buffer("a test", (1 << 20) + more)) == (1 << 20) + more
