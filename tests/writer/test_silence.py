"""When a writer counts as not running: after longer than any work may take, and not after a pause of the whole job."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading

import pytest
from helpers.writers import Bench, hear, heard, stop, until
from typing_extensions import override
from workers.crash_oracle import failed_parts, read_root

from ckptlib.errors import SaveFailed
from ckptlib.writer import client
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.silence import Silence
from ckptlib.writer.watchdog import slack_of

DEADLINE_S = 100.0
SLACK_S = slack_of(DEADLINE_S)
TOO_LONG_S = DEADLINE_S + 3.5 * SLACK_S


def working() -> Silence:
    """Since 0."""
    silence = Silence(DEADLINE_S)
    assert silence.lasts(works=True, heard=False, now=0.0) is None
    return silence


def test_it_is_too_long_after_the_deadline_of_a_save() -> None:
    silence = working()
    assert silence.lasts(True, False, DEADLINE_S + 2 * SLACK_S) is None, "its own watchdog may have yet to speak"
    assert silence.lasts(True, False, TOO_LONG_S) is None
    assert silence.lasts(True, False, TOO_LONG_S + 2 * SLACK_S) == TOO_LONG_S + 2 * SLACK_S


def test_a_word_ends_it_and_so_does_the_end_of_all_work() -> None:
    for word, works in ((True, True), (False, False)):
        silence = working()
        assert silence.lasts(works, word, TOO_LONG_S) is None
        assert silence.lasts(True, False, TOO_LONG_S + SLACK_S) is None
        assert silence.lasts(True, False, TOO_LONG_S + 2 * SLACK_S) is None


def test_after_a_pause_of_the_whole_job_the_writer_may_speak_first() -> None:
    silence = working()
    assert silence.lasts(True, False, 1e6) is None
    assert silence.lasts(True, True, 1e6 + SLACK_S / 2) is None
    assert silence.lasts(True, False, 1e6 + 3 * SLACK_S) is None


def short_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first writer alone: another may take its time."""
    limits = iter([0.1])
    monkeypatch.setattr(client, "Silence", lambda deadline_s: Silence(next(limits, deadline_s)))


def test_a_writer_that_is_stopped_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    short_at_first(monkeypatch)
    writer = bench.writer()
    stopped = writer.pid
    stop(stopped)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    failed = hear(writer, "failed")
    assert (failed["save"], failed["kind"]) == (str(save), "StoreTimeout")
    assert f"(pid {stopped}) has said nothing for" in failed["error"]
    assert "was stopped" in failed["error"]
    assert writer.pid != stopped
    until(lambda: failed_parts(bench.root) == [failed["error"]])  # the other ranks need not wait
    later, slot = bench.slot(2)
    writer.add_slot(slot.path)
    writer.persist(later, slot.path)
    while hear(writer, "committed")["save"] != str(later):
        pass
    assert [step.number for step in read_root(bench.root)] == [2]
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_orders_to_one_that_is_stopped_block_nobody_for_long(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With peers there is one for each step, and the socket takes a few hundred."""
    monkeypatch.setattr(client, "STALL_S", 0.1)
    writer = bench.writer()
    stopped = writer.pid
    stop(stopped)
    monkeypatch.setattr(client, "STALL_S", 100.0)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    for _ in range(5000):
        writer.held(save)
    hear(writer, "committed")
    assert writer.pid != stopped
    assert [step.number for step in read_root(bench.root)] == [1]


def test_what_arrives_slowly_arrives_whole() -> None:
    """Nothing of a message is lost or sent twice where the socket takes it in pieces."""
    ours, theirs = map(Channel, socket.socketpair())
    sent = {"op": "x" * (8 << 20)}
    sending = threading.Thread(target=ours.send, args=(sent,), daemon=True)
    sending.start()
    found: list[Message] = []
    until(lambda: bool(found.extend(theirs.receive(0.1)) or found))
    assert found == [sent]
    ours.close()
    theirs.close()


class _Deaf(socket.socket):
    """One that nothing can be received from."""

    @override
    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_an_end_that_hears_no_more_lets_the_other_know() -> None:
    """A writer takes it for its trainer's end, and answers no order from then on: the trainer would wait for it."""
    one, other = socket.socketpair()
    trainer, writer = Channel(one), Channel(_Deaf(fileno=other.detach()))
    trainer.send({"op": "persist"})
    assert writer.receive(5.0) == []
    assert writer.closed
    assert trainer.receive(5.0) == []
    assert trainer.closed
    trainer.close()
    writer.close()


def test_saves_fail_while_no_writer_can_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors, memory or room for its log. Training goes on, and so does saving when there are some."""
    writer = bench.writer()
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "committed")
    os.kill(writer.pid, signal.SIGKILL)

    def refuse(*given: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(client, "launch", refuse)
        lost = []
        for step in (2, 3):
            save, slot = bench.slot(step)
            writer.add_slot(slot.path)
            writer.persist(save, slot.path)
            lost.append(hear(writer, "failed"))
            assert lost[-1]["save"] == str(save)
            assert "no writer process can be started: [Errno 24] Too many open files" in lost[-1]["error"]
        assert writer.poll() == [], "it is not tried again before there is a reason to"
        with pytest.raises(SaveFailed, match="no writer process can be started"):
            bench.writer()
    with monkeypatch.context() as without:  # refused before there is a channel
        without.setattr(socket, "socketpair", refuse)
        with pytest.raises(SaveFailed, match="no writer process can be started"):
            bench.writer()
    save, slot = bench.slot(4)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    events = heard(writer, "committed")
    assert events[-1]["save"] == str(save)
    assert [step.number for step in read_root(bench.root)] == [1, 4]
    assert len(failed_parts(bench.root)) == 2
