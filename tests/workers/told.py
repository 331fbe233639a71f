"""Two ranks: what each is told of the saves of both."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from helpers.inside import forget_last_save, is_asking, lose_notices, num_failures, num_wanted, poll, writer_of
from workers.rank_cases import PATIENCE_S, checkpointer, committed, rank, run_cases

import ckptlib
from ckptlib.errors import SaveFailed
from ckptlib.events import Begun, Committed, Event, Failed, Staged
from ckptlib.testing import write_plan

POLL_S = 0.01
"""Two ranks that spin leave writers on two cores next to nothing."""


def test_rank_0_is_told_of_the_commit(directory: Path) -> None:
    told: list[Event] = []
    state = {"x": torch.ones(1000)}
    with checkpointer(directory, state, on_event=told.append if rank() == 0 else None) as ckpt:
        pending = ckpt.save(1)
        pending.wait_committed(PATIENCE_S)
        ckpt.after_step(2)
        ckpt.after_step(3)
        ckpt.save(3)
    kinds = [(type(event), event.step) for event in told if isinstance(event, (Begun, Staged, Committed))]
    expected = [(kind, step) for step in (1, 3) for kind in (Begun, Staged, Committed)]
    assert kinds == (expected if rank() == 0 else [])


def test_another_rank_is_called_back_though_nobody_waits(directory: Path) -> None:
    called: list[tuple[int, bool]] = []
    with checkpointer(directory, {"x": torch.ones(1000)}, every=1000) as ckpt:
        pending = ckpt.save(1)
        pending.add_done_callback(lambda pending: called.append((pending.step, pending.committed)))
        while not called:
            poll(ckpt)  # as after_step does
            ckpt._session.listener.deliver()
            time.sleep(POLL_S)
        assert pending.done()
        assert pending.result() == 1
    assert called == [(1, True)]


def test_nobody_asks_for_what_stays_on_local_disks_before_it_is_drained(directory: Path) -> None:
    called: list[tuple[int, bool]] = []
    options = {"every": 1, "local": directory / f"disk-{rank()}", "drain": ckptlib.Steps(1000)}
    with checkpointer(directory / "root", {"x": torch.ones(1000)}, **options) as ckpt:
        step = 0
        while step < 5 or ckpt.pending.step != step:
            step += 1
            ckpt.after_step(step)
            if ckpt.pending is not None and ckpt.pending.step == step:
                ckpt.pending.add_done_callback(lambda pending: called.append((pending.step, pending.committed)))
                ckpt.pending.wait_local(PATIENCE_S)
        assert (num_wanted(ckpt), called) == (0, [])
        ckpt.save(step)
        while not called:
            poll(ckpt)
            ckpt._session.listener.deliver()
            time.sleep(POLL_S)
    assert called == [(step, True)]


def test_a_rank_that_has_asked_in_vain_is_told_that_its_own_drain_fails(directory: Path) -> None:
    told: list[Event] = []
    directory.mkdir(exist_ok=True)
    plan = directory / f"plan-{rank()}"
    options = {"every": 1000, "local": directory / f"disk-{rank()}", "on_event": told.append}
    url = f"fault+file://{directory}/root?plan={plan}"
    with checkpointer(url, {"x": torch.ones(1000)}, **options) as ckpt:
        if rank() == 1:
            write_plan(plan, [{"op": "scan", "key": "^generations/", "action": "hold"}])
        pending = ckpt.save(1)
        if rank() == 1:
            pending.wait_local(PATIENCE_S)
            for asks in (True, False):
                while is_asking(pending) != asks:
                    assert not pending.done()
                    time.sleep(POLL_S)
            write_plan(plan, [{"op": "put", "key": "^parts/.*-ok-", "action": "full"}])
            deadline = time.monotonic() + PATIENCE_S
            while not told[2:] and time.monotonic() < deadline:
                poll(ckpt)
                ckpt._session.listener.deliver()
                time.sleep(POLL_S)
            assert [type(event) for event in told] == [Begun, Staged, Failed]
        with pytest.raises(SaveFailed):
            pending.wait_committed(PATIENCE_S)
        forget_last_save(ckpt)


def test_a_rank_is_told_of_its_own_disk_behind_the_word_that_rank_0_has_given_up(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    plan = directory / f"plan-{rank()}"
    url = f"fault+file://{directory}/root?plan={plan}"
    with checkpointer(url, {"x": torch.ones(1000)}, every=1000, local=directory / f"disk-{rank()}") as ckpt:
        if rank() == 0:
            write_plan(plan, [{"op": "put", "key": "^parts/.*-ok-", "action": "full"}])
        else:
            os.kill(writer_of(ckpt).pid, signal.SIGSTOP)
        pending = ckpt.save(1)
        if rank() == 1:
            while not pending.done():
                time.sleep(POLL_S)
            os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        pending.wait_local(PATIENCE_S)
        with pytest.raises(SaveFailed):
            pending.wait_committed(PATIENCE_S)
        forget_last_save(ckpt)


def test_what_a_rank_has_asked_is_answered_though_its_own_share_is_done_meanwhile(directory: Path) -> None:
    """And no notice tells it."""
    directory.mkdir(exist_ok=True)
    plan = directory / f"plan-{rank()}"
    asking, sharing = ({"op": op, "key": key, "action": "hold"} for op, key in (("get", "^steps/"), ("put", "^parts/")))
    with checkpointer(f"fault+file://{directory}/root?plan={plan}", {"x": torch.ones(1000)}, every=1000) as ckpt:
        if rank() == 1:
            lose_notices(ckpt)
            write_plan(plan, [asking, sharing])
        pending = ckpt.save(1)
        if rank() == 1:
            while not is_asking(pending):
                assert not pending.done()
                time.sleep(POLL_S)
            write_plan(plan, [asking])
            pending.wait_released(PATIENCE_S)
            assert is_asking(pending)
            while committed(directory / "root") != [1]:
                time.sleep(POLL_S)
            write_plan(plan, [])
        pending.wait_committed(PATIENCE_S)


def test_failures_in_a_row_end_with_a_share_that_is_durable(directory: Path) -> None:
    """Though this rank has not asked whether the step is committed: else those of a whole run would add up."""
    directory.mkdir(exist_ok=True)
    plan = directory / f"plan-{rank()}"
    with checkpointer(f"fault+file://{directory}/root?plan={plan}", {"x": torch.ones(1000)}, every=1000) as ckpt:
        if rank() == 1:
            write_plan(plan, [{"op": "put", "key": "^parts/.*-ok-", "action": "full"}])
        with pytest.raises(SaveFailed):
            ckpt.save(1).wait_committed(PATIENCE_S)
        assert num_failures(ckpt) == 1
        write_plan(plan, [])
        pending = ckpt.save(2)
        if rank() == 1:
            pending.wait_released(PATIENCE_S)
            assert not pending.committed
        else:
            pending.wait_committed(PATIENCE_S)
        assert num_failures(ckpt) == 0


def test_another_rank_may_ask_whether_it_is_done(directory: Path) -> None:
    with checkpointer(directory, {"x": torch.ones(1000)}, every=1000) as ckpt:
        pending = ckpt.save(1)
        while not pending.done():
            time.sleep(POLL_S)
        assert pending.committed


if __name__ == "__main__":
    run_cases(
        [
            test_rank_0_is_told_of_the_commit,
            test_another_rank_is_called_back_though_nobody_waits,
            test_nobody_asks_for_what_stays_on_local_disks_before_it_is_drained,
            test_a_rank_that_has_asked_in_vain_is_told_that_its_own_drain_fails,
            test_a_rank_is_told_of_its_own_disk_behind_the_word_that_rank_0_has_given_up,
            test_what_a_rank_has_asked_is_answered_though_its_own_share_is_done_meanwhile,
            test_failures_in_a_row_end_with_a_share_that_is_durable,
            test_another_rank_may_ask_whether_it_is_done,
        ]
    )
