"""What is kept of the pieces of an object."""

from __future__ import annotations

import weakref

from ckptlib.stores import obstore_pieces
from ckptlib.stores.obstore_pieces import Pieces


class Memory(bytearray):
    """Bytes whose end can be seen."""


def sent(pieces: Pieces) -> bytes:
    return b"".join(pieces)


def test_no_more_is_taken_than_is_asked_for() -> None:
    left = iter([b"12", b"", b"34", b"56", b"78"])
    pieces = Pieces(b"h", left)
    pieces.take(3)
    assert (pieces.nbytes, pieces.is_whole) == (5, False)
    assert sent(pieces) == b"h12345678"
    assert pieces.is_whole
    assert sent(pieces) == b"h12345678"


def test_what_is_there_already_is_whole() -> None:
    pieces = Pieces(b"", [b"12"] * 1000)
    pieces.take(3)
    assert pieces.is_whole
    assert sent(pieces) == sent(pieces) == b"12" * 1000


def test_views_are_kept_however_many() -> None:
    memory = memoryview(bytes(range(200)) * 1000)
    pieces = Pieces(b"", (memory[start : start + 100] for start in range(0, len(memory), 100)))
    assert sent(pieces) == sent(pieces) == memory
    assert pieces.can_repeat


def test_memory_that_nobody_else_holds_is_let_go(monkeypatch) -> None:
    monkeypatch.setattr(obstore_pieces, "KEPT_NBYTES", 10)
    made: list[weakref.ref[Memory]] = []

    def made_now(n: int) -> Memory:
        memory = Memory([n] * 4)
        made.append(weakref.ref(memory))
        return memory

    pieces = Pieces(b"", (made_now(n) for n in range(50)))
    most = 0
    for view in pieces:
        most = max(most, sum(ref() is not None for ref in made))
        del view
    assert most <= 5
    assert not pieces.can_repeat
    assert not pieces.is_whole
