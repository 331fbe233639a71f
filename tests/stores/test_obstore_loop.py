"""What is given up has ended, and what has not begun does not begin: the thread in which obstore's requests run."""

from __future__ import annotations

import time

import pytest

from ckptlib.stores.obstore_loop import ClientLoop, GivenUp, Lent


def test_nothing_begins_behind_its_deadline() -> None:
    begun = []

    async def work() -> None:
        begun.append(True)

    loop = ClientLoop("test")
    try:
        running = loop.start(work(), time.monotonic() - 1)
        with pytest.raises(GivenUp):
            running.ended.result(30)  # not its `result`, which would end what had begun
        assert loop.run(work(), time.monotonic() + 30) is None
        assert begun == [True]
    finally:
        loop.close()


def test_what_was_given_back_is_not_lent_again() -> None:
    memory = bytearray(8)
    lent = Lent()
    with memoryview(memory) as piece:
        lent.lend(piece)
        lent.release()
        with pytest.raises(RuntimeError, match="given up"):
            lent.lend(piece)
    memory.append(0)  # which it could not be if somebody still held it
