"""What a job tells of itself: to `on_event=`, to callbacks of saves, and to whoever watches a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.inside import fence_of, forget_last_save, has_said, num_saves, settle, stager_of
from helpers.one_job import WAIT_S, Job, faulty, step_once, steps, wait_settled
from helpers.stage import held, pending_of, replace_pending
from helpers.verdicts import assert_cases_pass
from helpers.writers import until
from launch import fork_one
from workers.torn import OpensGate

import ckptlib
from ckptlib.errors import SaveFailed, TornSnapshot, WaitTimeout
from ckptlib.events import Begun, Committed, Event, Failed, Held, IntervalChanged, Restored, Staged, Stopping, Torn
from ckptlib.writer.channel import Message
from ckptlib.writer.client import Writer


def train(ckpt: ckptlib.Checkpointer, job: Job, first: int, last: int) -> None:
    for step in range(first, last + 1):
        job.body()
        step_once(ckpt, step)


def test_a_save_is_told_from_begin_to_commit(job: Job) -> None:
    told: list[Event] = []
    threads: set[threading.Thread] = set()

    def on_event(event: Event) -> None:
        threads.add(threading.current_thread())
        told.append(event)

    with job.checkpointer(every=2, on_event=on_event) as ckpt:
        assert ckpt.restore().step == 0
        train(ckpt, job, 1, 2)
        train(ckpt, job, 3, 5)
    with job.checkpointer(on_event=on_event) as ckpt:
        assert ckpt.restore().step == 4
    kinds = [(type(event), event.step) for event in told]
    assert [kind for kind in kinds if kind[0] is not Held] == [
        *((kind, step) for step in (2, 4) for kind in (Begun, Staged, Committed)),
        (Restored, 4),
    ]
    assert (Held, 2) in kinds
    assert threads == {threading.main_thread()}
    info = next(ckptlib.checkpoints(job.root))
    begun, staged, committed = (e for e in told if e.step == 2 and not isinstance(e, Held))
    assert isinstance(begun, Begun)
    assert isinstance(staged, Staged)
    assert isinstance(committed, Committed)
    assert (begun.tier, begun.nbytes) == ("store", staged.nbytes)
    assert begun.nbytes >= sum(t.nbytes for t in job.model.state_dict().values())
    assert 0 < begun.stall_s < WAIT_S
    assert committed.nbytes == info.nbytes
    assert committed.seconds is not None and 0 < committed.seconds < WAIT_S  # noqa: PT018
    restored = told[-1]
    assert isinstance(restored, Restored)
    assert (restored.tier, restored.skipped) == ("store", 0)
    assert restored.nbytes > 0


def test_the_wait_at_the_fence_is_told(job: Job) -> None:
    told: list[Event] = []
    with job.checkpointer(every=2, on_event=told.append) as ckpt:
        for step in (1, 2, 3):
            job.body()
            step_once(ckpt, step)
        job.body()
        with held(stager_of(ckpt)) as gate:
            ckpt.after_step(4)
            fence = fence_of(ckpt)
            replace_pending(fence, [OpensGate(gate, fenced) for fenced in pending_of(fence)])
            job.body()
    waits = {event.step: event.fence_s for event in told if isinstance(event, Staged)}
    assert waits[2] == 0.0
    assert waits[4] > 0.0


def test_one_that_raises_or_takes_its_time_harms_no_save(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def on_event(event: Event) -> None:
        time.sleep(0.02)
        raise RuntimeError(f"cannot log {event}")

    with job.checkpointer(every=2, on_event=on_event) as ckpt:
        train(ckpt, job, 1, 6)
    assert steps(job.root) == [2, 4, 6]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "on_event= raised; saves go on, and it is called again; said once"
    ]
    assert "cannot log Begun(step=2" in caplog.text


def test_a_save_that_fails_is_told_with_its_error(job: Job) -> None:
    told: list[Event] = []
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "error", "nth": 0}])
    with ckptlib.Checkpointer(url, job.state, every=2, arena=job.root.parent, on_event=told.append) as ckpt:
        for step in range(1, 5):
            job.body()
            ckpt.after_step(step)
            wait_settled(ckpt)
    outcomes = [event for event in told if isinstance(event, (Failed, Committed))]
    assert [(type(event), event.step) for event in outcomes] == [(Failed, 2), (Committed, 4)]
    failed = outcomes[0]
    assert isinstance(failed, Failed)
    assert failed.tier == "store"
    assert isinstance(failed.error, SaveFailed)


def test_what_failed_before_an_exception_is_told(job: Job) -> None:
    """Who leaves the `with` block by an exception still learns why."""
    told: list[Event] = []
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "error", "nth": 0}])

    def run() -> None:
        with ckptlib.Checkpointer(url, job.state, every=2, arena=job.root.parent, on_event=told.append) as ckpt:
            ckpt.after_step(1)
            ckpt.after_step(2)
            settle(ckpt, WAIT_S, persisted=True)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert [event.step for event in told if isinstance(event, Failed)] == [2]


def test_a_torn_snapshot_is_told_and_so_is_the_next(job: Job) -> None:
    told: list[Event] = []
    big = torch.zeros(1 << 18)
    optimizer = torch.optim.SGD([big.requires_grad_()], lr=0.1)

    def body() -> None:
        big.grad = torch.ones_like(big)
        optimizer.step()

    state = {"weights": big, "optim": optimizer}
    with ckptlib.Checkpointer(job.root, state, every=4, arena=job.root.parent, on_event=told.append) as ckpt:
        for step in (1, 2, 3):
            body()
            ckpt.after_step(step)
        body()
        with held(stager_of(ckpt)):
            ckpt.after_step(4)
            with torch.no_grad():
                big.fill_(7.0)  # past the fence
        with contextlib.suppress(SaveFailed, TornSnapshot):
            ckpt.pending.wait_committed(WAIT_S)
        for step in (5, 6):
            ckpt.after_step(step)
            body()
    torn = [event for event in told if isinstance(event, Torn)]
    assert [event.step for event in torn] == [4]
    assert isinstance(torn[0].error, TornSnapshot)
    assert [event.step for event in told if isinstance(event, Committed)] == [6]


def test_a_job_that_is_told_to_stop(job: Job) -> None:
    told: list[Event] = []

    def run() -> None:
        with job.checkpointer(on_event=told.append) as ckpt:
            for step in ckpt.loop(0, 100):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ckptlib.Preempted):
        run()
    last = steps(job.root)[-1]
    assert [event.step for event in told if isinstance(event, Stopping)] == [last]
    assert told[-1] == Committed(last, told[-1].nbytes, told[-1].seconds)  # type: ignore[attr-defined]


def test_an_interval_is_told_with_its_reason(job: Job) -> None:
    told: list[Event] = []
    with job.checkpointer(every=ckptlib.Overhead(0.9), on_event=told.append) as ckpt:
        for step in (1, 2, 3):
            job.body()
            ckpt.after_step(step)
        interval = ckpt.interval
    first = next(event for event in told if isinstance(event, IntervalChanged))
    assert (first.step, first.interval, first.before) == (1, interval, None)
    assert first.why


def test_nobody_listens_to_a_job_that_says_nothing(job: Job) -> None:
    with job.checkpointer(every=2) as ckpt:
        train(ckpt, job, 1, 2)
        assert num_saves(ckpt) == 1
        assert not ckpt._session.listener._queue


# -- Callbacks


def test_words_of_futures(job: Job) -> None:
    url = faulty(job, [{"op": "commit", "key": "^packs/.*0002-", "action": "error"}])
    called: list[tuple[ckptlib.Pending, threading.Thread]] = []

    def note(pending: ckptlib.Pending) -> None:
        called.append((pending, threading.current_thread()))

    with ckptlib.Checkpointer(url, job.state, every=100, arena=job.root.parent) as ckpt:
        with held(stager_of(ckpt)):
            first = ckpt.save(1)
            first.add_done_callback(note)
            assert not first.done()
            assert called == []
        assert first.result(WAIT_S) == 1
        assert first.done()
        assert called == [(first, threading.main_thread())]
        first.add_done_callback(note)
        assert called == 2 * [(first, threading.main_thread())], "at once, where it is known"

        job.body()
        second = ckpt.save(2)
        second.add_done_callback(lambda pending: 1 / 0)
        second.add_done_callback(note)
        with pytest.raises(SaveFailed):
            second.result(WAIT_S)
        assert second.done()
        assert [pending for pending, _ in called] == [first, first, second]
        assert ckpt.save(3).result() == 3


def test_a_callback_of_a_save_that_nobody_waits_for(tmp_path: Path) -> None:
    """A script that ends is told at its end."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import ckptlib, torch\n"
        f"pending = ckptlib.save_async({str(tmp_path / 'root')!r}, {{'x': torch.ones(3)}}, 1)\n"
        "pending.add_done_callback(lambda pending: print(pending.step, pending.committed, pending.error))\n"
    )
    assert fork_one(script, log=log, timeout_s=120) == 0, log.read_text()
    assert log.read_text() == "1 True None\n"


def test_what_is_committed_as_a_close_that_times_out_waits_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    first = {"op": "put", "key": "^steps/", "action": "hold"}
    second = {"op": "commit", "key": "^packs/0*2-", "action": "hold"}
    ckpt = ckptlib.Checkpointer(faulty(job, [first, second]), job.state, every=1000, on_event=told.append)
    for step in (1, 2):
        job.body()
        ckpt.save(step)
    forget_last_save(ckpt)
    close = Writer.close

    def close_behind_the_commit(writer: Writer, timeout_s: float, waited_s: float) -> list[Message]:
        faulty(job, [second])
        until(lambda: has_said(ckpt, "committed"))
        return close(writer, timeout_s, waited_s)

    monkeypatch.setattr(Writer, "close", close_behind_the_commit)
    with pytest.raises(WaitTimeout):
        ckpt.close(timedelta(seconds=0.2))
    assert [event.step for event in told if isinstance(event, Committed)] == [1]
    faulty(job, [])


def test_ranks_are_told_what_they_know(tmp_path: Path) -> None:
    assert_cases_pass("told.py", 2, tmp_path, 8)


# -- A terminal

JOB = """
import logging, sys, torch, ckptlib
{setup}
state = {{"x": torch.ones(3)}}
with ckptlib.Checkpointer({root!r}, state, every=2) as ckpt:
    for step in ckpt.loop(ckpt.restore().step, 2):
        pass
"""


def run_on_a_terminal(root: Path, setup: str = "") -> str:
    """What a job writes to a terminal."""
    primary, secondary = pty.openpty()
    status = fork_one(script_of(root, setup), log=os.ttyname(secondary), timeout_s=120)
    os.close(secondary)
    text = b""
    with contextlib.suppress(OSError), os.fdopen(primary, "rb", buffering=0) as terminal:  # EIO at its end
        while data := terminal.read(1 << 16):
            text += data
    assert status == 0, text
    return text.decode().replace("\r\n", "\n")


def script_of(root: Path, setup: str = "") -> Path:
    script = root.with_suffix(".py")
    script.write_text(JOB.format(root=str(root), setup=setup))
    return script


def test_a_terminal_shows_commits_and_what_was_restored(tmp_path: Path) -> None:
    fresh, committed, *more = run_on_a_terminal(tmp_path / "root").splitlines()
    assert fresh == f"ckptlib: restore: nothing to restore in file://{tmp_path}/root: a fresh run"
    assert committed.startswith("ckptlib: step 2 is committed: ")
    assert more == []


def test_logging_that_is_set_up_decides_for_itself(tmp_path: Path) -> None:
    assert run_on_a_terminal(tmp_path / "a", "logging.basicConfig()") == ""
    logged = run_on_a_terminal(tmp_path / "b", "logging.basicConfig(level=logging.INFO)")
    assert logged.count("step 2 is committed") == 1


def test_the_log_of_a_job_gets_no_more_than_before(tmp_path: Path) -> None:
    log = tmp_path / "log"
    status = fork_one(script_of(tmp_path / "root"), log=log, timeout_s=120)
    assert (status, log.read_text()) == (0, "")
