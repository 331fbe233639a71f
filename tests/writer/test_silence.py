"""When a writer counts as not running: after longer than any work may take, and not after a pause of the whole job."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any
from urllib.parse import quote

import pytest
from helpers.writers import WAIT_S, Bench, alive, hear, heard, stop, until
from typing_extensions import override
from workers.crash_oracle import failed_parts, read_root

from ckptlib.errors import SaveFailed
from ckptlib.stores.testing import write_plan
from ckptlib.writer import child, client
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.client import Writer
from ckptlib.writer.launch import launch
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
    monkeypatch.setattr(child, "Silence", lambda deadline_s: Silence(next(limits, deadline_s)))


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
    assert failed["in_doubt"], "it may go on, and do it, before it is killed"
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
    monkeypatch.setattr(child, "STALL_S", 0.1)
    writer = bench.writer()
    stopped = writer.pid
    stop(stopped)
    monkeypatch.setattr(child, "STALL_S", 100.0)
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


def test_what_came_before_a_receive_was_interrupted_comes_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slot would count as read for ever, after Ctrl-C in a notebook."""
    one, other = socket.socketpair()
    with one, other:
        trainer, writer = Channel(one), Channel(other)
        for number in range(3):
            writer.send({"event": number})
        loads, parsed = json.loads, list[bytes]()

        def interrupted(line: bytes) -> Any:
            parsed.append(line)
            if len(parsed) == 2:
                raise KeyboardInterrupt
            return loads(line)

        monkeypatch.setattr(json, "loads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.receive(5.0)
        assert [told["event"] for told in trainer.receive(5.0)] == [0, 1, 2]


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
        without.setattr(child, "launch", refuse)
        lost = []
        for step in (2, 3):
            save, slot = bench.slot(step)
            writer.add_slot(slot.path)
            writer.persist(save, slot.path)
            lost.append(hear(writer, "failed"))
            assert lost[-1]["save"] == str(save)
            assert "no writer process can be started: [Errno 24] Too many open files" in lost[-1]["error"]
        assert writer.poll() == [], "it is not tried again at once, without a reason to"
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


class Refusals:
    """Of the kernel, to start a writer: so many from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "RESTART_S", 0.2)
        monkeypatch.setattr(child, "launch", self._launch)
        self.left = 0.0
        self._start = launch

    def _launch(self, *given: Any) -> subprocess.Popen[bytes]:
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._start(*given)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


def killed(writer: Writer) -> None:
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: not alive(writer.pid))


def uncommitted(bench: Bench) -> Writer:
    """One that died as it was to commit a step that is persisted; nothing is in the way of the next one."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "^steps/", "action": "hold"}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "released")
    killed(writer)
    write_plan(plan, [])
    return writer


@pytest.mark.parametrize("closes", [False, True])
def test_a_step_is_committed_though_a_writer_could_not_be_started(
    bench: Bench, refusals: Refusals, closes: bool
) -> None:
    """As for want of memory, for a while. Nobody orders anything any more: it is the last step, which is waited for."""
    writer = uncommitted(bench)
    refusals.left = 2
    events = writer.close(WAIT_S) if closes else heard(writer, "committed")
    assert "committed" in [event["event"] for event in events]
    assert "failed" not in [event["event"] for event in events]
    assert [step.number for step in read_root(bench.root)] == [1]


def test_it_is_told_once_that_none_can_be_started(
    bench: Bench, refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    writer = uncommitted(bench)
    refusals.left = 4
    hear(writer, "committed")
    assert refusals.left == 0
    assert caplog.text.count("no writer process can be started") == 1
    assert caplog.text.count("the writer process died") == 1


def test_who_waits_for_a_writer_that_is_not_there_sleeps(bench: Bench, refusals: Refusals) -> None:
    """It took a core, which the training of other ranks may have had."""
    writer = uncommitted(bench)
    refusals.left = math.inf
    assert writer.poll() == []
    began = time.monotonic()
    assert writer.poll(0.3) == []
    assert time.monotonic() - began >= 0.3


def test_other_ranks_are_told_of_a_failure_as_it_closes(bench: Bench, refusals: Refusals) -> None:
    """They would wait for this rank's part until the deadline of the save."""
    writer = bench.writer()
    hear(writer, "ready")
    killed(writer)
    refusals.left = 1
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    assert "no writer process can be started" in hear(writer, "failed")["error"]
    writer.close(WAIT_S)
    (told,) = failed_parts(bench.root)
    assert "no writer process can be started" in told


def test_closing_ends_where_none_can_be_started(
    bench: Bench, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there is a failure to tell: a job may close for half an hour."""
    monkeypatch.setattr(client, "UNTOLD_S", 0.5)
    writer = bench.writer()
    hear(writer, "ready")
    killed(writer)
    refusals.left = math.inf
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "failed")
    began = time.monotonic()
    assert [event["event"] for event in writer.close(10 * WAIT_S)] == ["failed"]
    assert time.monotonic() - began < WAIT_S


def test_a_question_that_none_can_answer_as_it_closes_is_no_failure(
    bench: Bench, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may have committed the save."""
    monkeypatch.setattr(client, "UNTOLD_S", 0.5)
    writer = bench.writer(rank=1, world_size=2)
    killed(writer)
    refusals.left = math.inf
    save, _ = bench.slot(1)
    writer.watch(save, 0.0)
    assert writer.close(WAIT_S) == [{"event": "undecided", "save": str(save)}]
