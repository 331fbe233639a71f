"""The Checkpointer: what a training loop may rely upon, in one process."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.inside import stager_of, writer_of
from helpers.one_job import WAIT_S, Job, catalog, damage, slots, step_once, steps, wait_settled
from helpers.stage import put_job

import ckptlib
from ckptlib.errors import AgreementFailed, CorruptData, StateMismatch

# -- loop and restore


def test_a_fresh_root(job: Job) -> None:
    with job.checkpointer() as ckpt:
        before = job.bits()
        report = ckpt.restore()
        assert (report.step, report.save, report.nbytes) == (0, None, 0)
        assert "fresh run" in str(report)
        assert job.bits() == before
    assert steps(job.root) == []
    assert slots(job.root.parent) == []


def test_the_loop_saves_when_due_and_at_the_end(job: Job) -> None:
    with job.checkpointer() as ckpt:
        seen = []
        for step in ckpt.loop(0, 10):
            seen.append(step)
            job.body()
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(WAIT_S)
        assert not ckpt.stopping
    assert seen == list(range(10))
    assert steps(job.root) == [4, 8, 10]
    assert slots(job.root.parent) == [], "a clean end leaves nothing in memory"


def test_a_loop_that_is_already_done(job: Job) -> None:
    with job.checkpointer() as ckpt:
        assert [*ckpt.loop(5, 5)] == []
    assert steps(job.root) == []


def test_the_last_save_is_what_the_loop_ended_with(job: Job) -> None:
    """Whatever is done to the weights behind the loop, where no fence is met any more."""
    with job.checkpointer(every=1000) as ckpt:
        for _ in ckpt.loop(0, 3):
            job.body()
            put_job(stager_of(ckpt), lambda: time.sleep(0.2))  # a slow copy
        expected = job.bits()
        with torch.no_grad():
            for p in job.model.parameters():
                p.zero_()
    ckptlib.load(job.root, job.state)
    assert job.bits() == expected


def test_resuming_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole")
    with whole.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 9):
            whole.body()
    first = Job(tmp_path / "cut")
    with first.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 5):
            first.body()
    second = Job(tmp_path / "cut", seed=77)
    with second.checkpointer() as ckpt:
        start = ckpt.restore().step
        for _ in ckpt.loop(start, 9):
            second.body()
    assert first.losses + second.losses == whole.losses
    assert second.bits() == whole.bits()
    assert steps(tmp_path / "cut")[-2:] == [8, 9]


def test_draws_between_restore_and_the_first_body_do_not_count(job: Job) -> None:
    with job.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 4):
            job.body()
        expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    with job.checkpointer() as ckpt:
        report = ckpt.restore()
        assert report.step == 4
        torch.rand(1000), random.random(), np.random.rand(7)  # a data loader's workers are seeded, say
        for _ in ckpt.loop(report.step, 5):
            assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_a_loop_of_another_shape_puts_the_generators_back_itself(job: Job) -> None:
    with job.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 4):
            job.body()
        expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    with job.checkpointer() as ckpt:
        assert ckpt.restore().step == 4
        torch.rand(1000), random.random(), np.random.rand(7)
        ckpt.restore_random()
        assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
        ckpt.restore_random()
        assert torch.rand(3).tolist() != expected[0], "once: draws since then count"
        ckpt.after_step(5)
        with pytest.raises(ValueError, match="before the first after_step"):
            ckpt.restore_random()


def test_generators_that_nobody_put_back_stay_as_training_left_them(job: Job) -> None:
    """A loop that comes late would take the draws of the steps before it back."""
    with job.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 4):
            job.body()
    with job.checkpointer() as ckpt:
        ckpt.restore()
        torch.manual_seed(5)
        ckpt.after_step(5)
        drawn = torch.rand(3).tolist()
        torch.manual_seed(5)
        for _ in ckpt.loop(5, 6):
            assert torch.rand(3).tolist() == drawn


def test_a_second_checkpointer_in_the_same_process(job: Job) -> None:
    for expected in (0, 2, 4):
        with job.checkpointer() as ckpt:
            assert ckpt.restore().step == expected
            for _ in ckpt.loop(expected, expected + 2):
                job.body()
    records = [record for _, record in sorted(catalog(job.root).generations.records([])[0].items())]
    assert [record.id.number for record in records] == [1, 2, 3]
    assert [r.resumed_from and r.resumed_from.step for r in records] == [None, 2, 4]


def test_restore_skips_what_is_damaged(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    expected = {}
    with job.checkpointer(every=3) as ckpt:
        for step in range(1, 10):
            job.body()
            expected[step] = job.bits()
            step_once(ckpt, step)
    assert steps(job.root) == [3, 6, 9]
    saves = catalog(job.root).visible()
    damage(job.root, f"packs/{saves[2]}/")
    with job.checkpointer() as ckpt:
        report = ckpt.restore()
    assert report.step == 6
    assert len(report.skipped) == 1
    assert str(saves[2]) in report.skipped[0]
    assert job.bits() == expected[6]
    assert "is damaged and is skipped" in caplog.text
    damage(job.root, saves[1].manifest_key)
    with job.checkpointer() as ckpt:
        assert ckpt.restore().step == 3
        assert job.bits() == expected[3]
    damage(job.root, f"parts/{saves[0]}/")
    with job.checkpointer() as ckpt, pytest.raises(CorruptData, match="every step is damaged"):
        ckpt.restore()


def test_a_state_that_does_not_fit_is_no_damage(job: Job) -> None:
    with job.checkpointer() as ckpt:
        step_once(ckpt, 4)
    other = {"model": torch.nn.Linear(3, 3)}
    with (
        ckptlib.Checkpointer(job.root, other, every=4, arena=job.root.parent) as ckpt,
        pytest.raises(StateMismatch, match="model/weight"),
    ):
        ckpt.restore()


# -- what a step says


def test_a_save_that_is_asked_for(job: Job) -> None:
    with job.checkpointer(every=100) as ckpt:
        ckpt.after_step(1)
        pending = ckpt.save(1, metrics={"loss": 0.5})
        assert ckpt.save(1) is pending, "it is saved already"
        before = job.bits()
        job.body()
        ckpt.after_step(2)
        pending.wait_committed(WAIT_S)
    assert steps(job.root) == [1]
    other = Job(job.root, seed=1)
    with other.checkpointer() as ckpt:
        assert ckpt.restore().step == 1
    assert other.bits() == before


def test_metrics_for_a_step_that_is_saved_already_are_told_to_be_lost(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with job.checkpointer(every=1) as ckpt:
        ckpt.after_step(1)
        assert ckpt.save(1) is ckpt.pending
        assert "is saved already" not in caplog.text
        assert ckpt.save(1, metrics={"loss": 0.5}) is ckpt.pending
    assert "step 1 is saved already, and the metrics that save() was given now are not with it" in caplog.text


def test_metrics_and_tags_are_kept(job: Job) -> None:
    metrics = {"loss": 0.1, "nan": math.nan, "tokens": 10**15, "note": "warm-up", "by head": [1.0, 2.5]}
    with job.checkpointer(tags={"git": "abc123", "name": "run seven"}) as ckpt:
        ckpt.after_step(4, metrics=metrics)
    (info,) = ckptlib.checkpoints(job.root)
    assert all(info.metrics[name] == metrics[name] for name in ("loss", "tokens", "note", "by head"))
    assert math.isnan(info.metrics["nan"]), "JSON has no word for it"
    (record,) = catalog(job.root).generations.records([])[0].values()
    assert record.tags == {"git": "abc123", "name": "run seven"}
    assert record.versions["torch"] == torch.__version__


def test_steps_are_counted_one_by_one(job: Job) -> None:
    with job.checkpointer() as ckpt:
        ckpt.after_step(1)
        with pytest.raises(AgreementFailed, match=r"after_step\(3\)"):
            ckpt.after_step(3)


def test_a_step_is_counted_when_it_is_done(job: Job) -> None:
    """after_step(step) in the place of after_step(step + 1) would save every state under the step before."""
    for done in (0, 4):
        with job.checkpointer() as ckpt:
            assert ckpt.restore().step == done
            with pytest.raises(ValueError, match=rf"after_step\({done}\).*call after_step\(step \+ 1\)"):
                ckpt.after_step(done)
            if done == 0:
                ckpt.save(4)


def test_a_closed_one_says_so(job: Job) -> None:
    with job.checkpointer(every=4) as ckpt:
        ckpt.after_step(4)
    for use in (lambda: ckpt.after_step(5), lambda: ckpt.save(6), ckpt.restore):
        with pytest.raises(ValueError, match="is closed"):
            use()
    with pytest.raises(ValueError, match="is closed"):
        next(ckpt.loop(4, 8))  # before a body
    assert steps(job.root) == [4]
    assert slots(job.root.parent) == []


def test_a_restore_behind_a_save_is_refused(job: Job) -> None:
    """It would not find the save, which is still being written, and `close` would not wait for that any more."""
    with job.checkpointer(every=4) as ckpt:
        ckpt.save(1)
        before = job.bits()
        with pytest.raises(ValueError, match=r"call restore before the first save.*create another one"):
            ckpt.restore()
        assert job.bits() == before
        pending = ckpt.pending
    assert pending is not None
    assert pending.result() == 1
    with job.checkpointer() as ckpt:
        assert ckpt.restore().step == 1
        assert ckpt.restore().step == 1, "once more is no going back"


def test_a_restore_behind_steps_is_refused(job: Job) -> None:
    """It would go back behind the ranks' agreement on the next step."""
    with job.checkpointer(every=4) as ckpt:
        ckpt.after_step(4)
        with pytest.raises(ValueError, match="call restore before the first after_step"):
            ckpt.restore()
        ckpt.after_step(5)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"algorithm": "md5"}, ValueError, "'md5' is not one of xxh3, blake3"),
        ({"keep": 3}, TypeError, r"keep=3: expected Keep, such as Keep\(last=3\)"),
        ({"peers": 1}, TypeError, "peers=1: expected Peers"),
        ({"timeout": 60}, TypeError, "timeout=60: expected timedelta"),
        ({"every": "5"}, TypeError, "every='5': expected a number of steps"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    job: Job, wrong: dict[str, object], error: type[Exception], says: str
) -> None:
    """An algorithm that nobody knows would stand in the root for ever."""
    with pytest.raises(error, match=says):
        job.checkpointer(**wrong)
    assert not job.root.exists()


def test_routine_is_told_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def train() -> None:
        with job.checkpointer() as ckpt:
            for step in ckpt.loop(ckpt.restore().step, 100):
                if step == 4:
                    wait_settled(ckpt)
                if step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level("INFO", "ckptlib"), pytest.raises(ckptlib.Preempted):
        train()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"restore: nothing to restore in file://{job.root}: a fresh run"
    assert [line.partition(":")[0] for line in said[1:]] == [
        "step 4 is committed",
        "asked to stop",
        "step 8 is committed",
    ]


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_policy_that_makes_no_sense(job: Job, wrong: int) -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        job.checkpointer(every=wrong)


def test_a_relative_path_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the working directory is when the writer has to be started again."""
    for name in ("one/memory", "other"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    with ckptlib.Checkpointer("run", {"w": torch.zeros(3)}, every=1, arena="memory") as ckpt:
        ckpt.save(1).wait_committed()
        os.chdir(tmp_path / "other")
        os.kill(writer_of(ckpt).pid, signal.SIGKILL)
        ckpt.save(2).wait_committed()
    assert steps(tmp_path / "one" / "run") == [1, 2]
    assert list((tmp_path / "other").iterdir()) == []


def test_a_relative_path_is_that_of_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        ckptlib.save("run", {"w": torch.zeros(3)}, 1)
        assert steps(tmp_path / name / "run") == [1]


def test_close_waits_for_the_commit(job: Job) -> None:
    with job.checkpointer(every=1) as ckpt:
        job.body()
        ckpt.after_step(1)
        pending = ckpt.pending
    assert pending.committed
    assert steps(job.root) == [1]


def test_close_may_be_called_before_the_end_of_the_block(job: Job) -> None:
    with job.checkpointer(every=1) as ckpt:
        ckpt.after_step(1)
        ckpt.close()
        assert steps(job.root) == [1]
    assert slots(job.root.parent) == []
