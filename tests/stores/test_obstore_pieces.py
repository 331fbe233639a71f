"""What is kept of the pieces of an object."""

from __future__ import annotations

import mmap
import weakref

import pytest
from typing_extensions import Buffer

from ckptlib.stores import InPlace, obstore_pieces
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


@pytest.mark.parametrize("kind", [iter, InPlace])
def test_what_is_taken_beforehand_is_sent_however_large(monkeypatch, kind: type) -> None:
    """As the header of a pack of some 200,000 tensors is."""
    monkeypatch.setattr(obstore_pieces, "KEPT_NBYTES", 10)
    views = (memoryview(piece) for piece in (b"12", b"34", b"5678"))
    pieces = Pieces(b"h" * 11, InPlace(8, views) if kind is InPlace else views)
    pieces.take(3)
    assert sent(pieces) == b"h" * 11 + b"12345678"


def test_views_in_place_are_kept_however_many(monkeypatch) -> None:
    monkeypatch.setattr(obstore_pieces, "KEPT_NBYTES", 10)
    memory = memoryview(bytes(range(200)) * 1000)
    views = (memory[start : start + 100] for start in range(0, len(memory), 100))
    pieces = Pieces(b"", InPlace(len(memory), views))
    assert sent(pieces) == sent(pieces) == memory
    assert all(view.obj is memory.obj for view in pieces)
    assert pieces.can_repeat


@pytest.mark.parametrize("kind", [Memory, memoryview, InPlace])
def test_memory_that_nobody_else_holds_is_let_go(monkeypatch, kind: type) -> None:
    """As bytes, as views of them, which a drain and a copy give, and as copies among views in place."""
    monkeypatch.setattr(obstore_pieces, "KEPT_NBYTES", 10)
    made: list[weakref.ref[Memory]] = []

    def made_now(n: int) -> Buffer:
        memory = Memory([n] * 4)
        made.append(weakref.ref(memory))
        return memoryview(memory) if kind is memoryview else memory

    each = (made_now(n) for n in range(50))
    pieces = Pieces(b"", InPlace(200, each) if kind is InPlace else each)
    most = 0
    for view in pieces:
        most = max(most, sum(ref() is not None for ref in made))
        del view
    assert most <= 5
    assert not pieces.can_repeat
    assert not pieces.is_whole


def test_maps_of_which_a_view_is_given_are_let_go() -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    def mapped() -> memoryview:
        memory = mmap.mmap(-1, 4 << 20)
        made.append(weakref.ref(memory))
        return memoryview(memory)

    most = 0
    for view in Pieces(b"h" * 4096, (mapped() for _ in range(100))):
        most = max(most, sum(ref() is not None for ref in made))
        del view
    assert (len(made), most <= 48 >> 2) == (100, True)
