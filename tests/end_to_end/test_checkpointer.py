"""The Checkpointer: what a training loop may rely upon, in one process, and in processes that end in every way."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from helpers.inside import arena_of, num_failures, num_saves, refuse_slots, settle, snapshots_of, stager_of, writer_of
from helpers.stage import put_job, wait_grown
from launch import environment
from places import TESTS
from support import age, all_keys, keys_of
from workers.torn import raw

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import AgreementFailed, CorruptData, NoRoom, SaveFailed, StateMismatch, Superseded
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit

WAIT_S = 60.0


class Job:
    """A small training that draws from every generator, and what it saves."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(150))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 / (s + 1))
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer, "sched": self.scheduler}
        self.losses: list[str] = []

    def body(self) -> None:
        scale = random.random() + np.random.rand()
        loss = self.model(torch.randn(8, 150)).pow(2).mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(loss.item().hex())

    def checkpointer(self, **options: object) -> ckptlib.Checkpointer:
        return ckptlib.Checkpointer(self.root, self.state, **{"every": 4, "arena": self.root.parent, **options})

    def bits(self) -> list[bytes]:
        moments = [entries[name] for entries in self.optimizer.state.values() for name in sorted(entries)]
        return [raw(t) for t in [*self.model.state_dict().values(), *moments]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "root")


def catalog(root: Path) -> Catalog:
    return Catalog(LocalStore(str(root)))


def steps(root: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(root)]


def slots(directory: Path) -> list[Path]:
    return [*directory.glob("*.slot")]


def step_once(ckpt: ckptlib.Checkpointer, step: int, wait: bool = True) -> None:
    """One step, and whatever it saves is committed."""
    ckpt.after_step(step)
    if wait and ckpt.pending is not None:
        ckpt.pending.wait_committed(WAIT_S)


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


def test_a_second_checkpointer_in_the_same_process(job: Job) -> None:
    for expected in (0, 2, 4):
        with job.checkpointer() as ckpt:
            assert ckpt.restore().step == expected
            for _ in ckpt.loop(expected, expected + 2):
                job.body()
    records = [*catalog(job.root).generations().values()]
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


def damage(root: Path, prefix: str) -> None:
    """Flips a bit in the middle of the largest object."""
    path = max((p for p in root.rglob("*") if p.is_file() and prefix in str(p)), key=lambda p: p.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)


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


def test_metrics_and_tags_are_kept(job: Job) -> None:
    metrics = {"loss": 0.1, "nan": math.nan, "tokens": 10**15, "note": "warm-up", "by head": [1.0, 2.5]}
    with job.checkpointer(tags={"git": "abc123", "name": "run seven"}) as ckpt:
        ckpt.after_step(4, metrics=metrics)
    (info,) = ckptlib.checkpoints(job.root)
    assert all(info.metrics[name] == metrics[name] for name in ("loss", "tokens", "note", "by head"))
    assert math.isnan(info.metrics["nan"]), "JSON has no word for it"
    (record,) = catalog(job.root).generations().values()
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
    assert steps(job.root) == [4]
    assert slots(job.root.parent) == []


def test_a_restore_behind_steps_is_refused(job: Job) -> None:
    """It would go back behind the ranks' agreement on the next step."""
    with job.checkpointer(every=4) as ckpt:
        ckpt.after_step(4)
        with pytest.raises(ValueError, match="restore comes before the first after_step"):
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
    with caplog.at_level("INFO", "ckptlib"), job.checkpointer() as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 100):
            if step == 4:
                wait_settled(ckpt)
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"restore: nothing to restore in file://{job.root}: a fresh run"
    assert [line.partition(":")[0] for line in said[1:]] == [
        "step 4 is committed",
        "told to stop",
        "step 8 is committed",
    ]


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_policy_that_makes_no_sense(job: Job, wrong: int) -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        job.checkpointer(every=wrong)


class At:
    """Due at certain steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        return step in self._steps


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing until the body is done."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_save_that_finds_no_slot_is_taken_later(job: Job) -> None:
    """A writer that is slower than the saves costs saves, never a wait, and never what was saved."""
    expected = {}
    with job.checkpointer(every=At(3, 6, 9)) as ckpt:
        with stopped(writer_of(ckpt).pid):
            for step in range(1, 12):
                job.body()
                expected[step] = job.bits()
                ckpt.after_step(step)
                if ckpt.pending is not None:
                    ckpt.pending.wait_staged(WAIT_S)
            assert ckpt.pending.step == 6, "both slots are full"
        ckpt.pending.wait_committed(WAIT_S)
        for step in (12, 13, 14):
            job.body()
            expected[step] = job.bits()
            ckpt.after_step(step)
    assert steps(job.root) == [3, 6, 13]
    for step in steps(job.root):
        ckptlib.load(job.root, job.state, step=step)
        assert job.bits() == expected[step]


def test_snapshots_in_memory_go_on_at_every_step_while_one_is_written(job: Job) -> None:
    """A writer that takes longer than a step gets a slot of its own: no more than two steps are ever at stake."""
    with job.checkpointer(every=At(2), peers=ckptlib.Peers(copies=0)) as ckpt:
        begun = []
        with stopped(writer_of(ckpt).pid):
            for step in range(1, 20):
                job.body()
                num_before = num_saves(ckpt)
                ckpt.after_step(step)
                begun.append(num_saves(ckpt) - num_before)
                settle(ckpt, WAIT_S)
                wait_grown(arena_of(ckpt), WAIT_S)
                assert ckpt.coverage is not None
                if step >= 10:
                    assert (snapshots_of(ckpt).own.newest, ckpt.coverage.lag <= 2) == (step, True)
        assert 0 in begun[2:8], "three slots are too few"
        assert begun[9:] == [1] * 10
    assert slots(job.root.parent) == []


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


# -- retention in a live job


def test_old_steps_go_while_the_job_lives(job: Job) -> None:
    keep = ckptlib.Keep(last=2, every=6, grace=timedelta(seconds=40))
    options: dict[str, object] = {"every": 3, "keep": keep, "save_deadline": timedelta(seconds=20)}
    expected = {}
    with job.checkpointer(**options) as ckpt:
        for step in range(1, 16):
            job.body()
            expected[step] = job.bits()
            step_once(ckpt, step)
    assert steps(job.root) == [6, 12, 15]
    store = LocalStore(str(job.root))
    dropped = {key.split("/")[1].split("-")[0].lstrip("0") for key in all_keys(store) if key.startswith("trash/")}
    assert {"3", "9"} <= dropped
    age(store, 60)
    with job.checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 15
        for step in range(16, 19):
            job.body()
            expected[step] = job.bits()
            step_once(ckpt, step)
    assert steps(job.root) == [6, 12, 15, 18]
    there = {key for save in catalog(job.root).visible() for key in keys_of(store, save)}
    bytes_left = {key for key in all_keys(store) if key.startswith(("packs/", "parts/"))}
    assert bytes_left == {key for key in there if key.startswith(("packs/", "parts/"))}, "what was dropped is deleted"
    for step in steps(job.root):
        ckptlib.load(job.root, job.state, step=step)
        assert job.bits() == expected[step]


def test_a_grace_period_that_is_too_short_is_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="save deadline"):
        job.checkpointer(keep=ckptlib.Keep(grace=timedelta(seconds=30)), save_deadline=timedelta(seconds=20))


# -- trouble


def faulty(job: Job, plan: list[Mapping[str, object]]) -> str:
    path = job.root.parent / "plan.json"
    path.write_text(json.dumps(plan))
    return f"fault+file://{job.root}?plan={quote(str(path))}"


def test_failures_in_a_row_are_raised_and_earlier_steps_stay(job: Job) -> None:
    url = faulty(job, [])
    done: list[int] = []

    def train() -> None:
        with ckptlib.Checkpointer(url, job.state, every=3, arena=job.root.parent) as ckpt:
            for step in range(1, 40):
                job.body()
                ckpt.after_step(step)
                done.append(step)
                wait_settled(ckpt)
                if step == 4:
                    faulty(job, [{"op": "commit", "key": "^packs/", "action": "full"}])

    with pytest.raises(SaveFailed, match=r"3 saves in a row failed.*no space, as planned"):
        train()
    assert done == list(range(1, 14)), "the third one failed in step 12, all agreed in 13, and acted in 14"
    assert steps(job.root) == [3]


def wait_settled(ckpt: ckptlib.Checkpointer) -> None:
    """Whatever becomes of the newest save is known."""
    if ckpt.pending is not None:
        with contextlib.suppress(SaveFailed):
            ckpt.pending.wait_committed(WAIT_S)


def test_what_failed_here_is_told_with_its_reason(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Before there is a save that could have an error."""
    ckpt = job.checkpointer(every=1)

    def no_room(nbytes: int) -> None:
        raise NoRoom("no room, as planned")

    refuse_slots(ckpt, no_room)

    def train() -> None:
        for step in range(1, 10):
            ckpt.after_step(step)

    with pytest.raises(SaveFailed, match=r"3 saves in a row failed.*no room, as planned"):
        train()
    said = [record.getMessage() for record in caplog.records]
    assert all(line.count("could not be saved") == 1 for line in said if "no room" in line)
    ckpt.close()


def test_one_failure_is_a_warning(job: Job) -> None:
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "error", "nth": 1}])
    with ckptlib.Checkpointer(url, job.state, every=3, arena=job.root.parent) as ckpt:
        for step in range(1, 10):
            job.body()
            ckpt.after_step(step)
            wait_settled(ckpt)
        assert num_failures(ckpt) == 0
    assert steps(job.root) == [3, 9]


def test_an_older_job_is_superseded(job: Job) -> None:
    def train() -> None:
        with job.checkpointer(every=3) as old:
            for step in range(1, 4):
                step_once(old, step)
            with job.checkpointer(every=3) as new:
                for step in range(1, 7):
                    step_once(new, step)
            for step in range(4, 20):
                job.body()
                old.after_step(step)
                wait_settled(old)

    with pytest.raises(Superseded):
        train()
    assert [save.generation.number for save in catalog(job.root).saves()] == [1, 2, 2]


def test_an_exception_comes_out_as_it_is(job: Job) -> None:
    def train() -> None:
        with job.checkpointer(every=1) as ckpt:
            job.body()
            ckpt.after_step(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    wait_until(lambda: steps(job.root) == [1])
    wait_until(lambda: slots(job.root.parent) == [])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- signals


def test_sigterm_ends_the_loop_after_a_last_save(job: Job) -> None:
    with job.checkpointer(every=1000) as ckpt:
        seen = []
        for step in ckpt.loop(0, 100):
            seen.append(step)
            job.body()
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.stopping
        expected = job.bits()
    assert seen == list(range(8)), "agreed upon one step later"
    assert steps(job.root) == [8]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ckptlib.load(job.root, job.state)
    assert job.bits() == expected


def test_a_handler_of_the_users_own_is_left_alone(job: Job) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
    try:
        with job.checkpointer() as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in ckpt.loop(0, 3):
                job.body()
            assert not ckpt.stopping
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(seen) == 1


def run(kind: str, url: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "workers/jobs.py", kind, url, str(tmp_path)],
        cwd=TESTS,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_terminated_job_exits_well_and_is_continued(tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = run("terminated", str(root), tmp_path)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["start 0", "ended 9 True", "closed", ""]), done.stderr
    assert steps(root) == [9]
    done = run("terminated twice", str(root), tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "start 9\n"), "the second one kills as ever"
    assert steps(root) == [9]
    wait_until(lambda: slots(tmp_path) == [])


def test_a_job_that_raises_does_not_wait_and_its_writer_finishes(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "commit", "key": "^packs/", "action": "stall", "seconds": 4}]))
    root = tmp_path / "root"
    done = run("raises", f"fault+file://{root}?plan={quote(str(plan))}", tmp_path)
    assert done.returncode == 1
    left = float(done.stdout.split("left ")[1])
    assert 'KeyError: "the trainer\'s own trouble"' in done.stderr
    wait_until(lambda: steps(root) == [9])
    (info,) = ckptlib.checkpoints(root)
    (manifest,) = (root / "steps").iterdir()
    assert manifest.stat().st_mtime > info.created + 4, "the store did stall"
    assert left < manifest.stat().st_mtime, "and nobody waited"
    wait_until(lambda: slots(tmp_path) == [])
