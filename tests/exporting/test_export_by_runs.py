"""Exports that a run makes by itself, read by safetensors; and what becomes of those that fail or are killed."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.one_job import WAIT_S, Job, faulty, steps
from launch import Program
from onerank import bits
from places import WORKERS
from safetensors.torch import load_file
from workers.held_exports import hold_first

import ckptlib
from ckptlib import events
from ckptlib.errors import SaveFailed, StateMismatch, WaitTimeout


def weights(job: Job) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in job.model.state_dict().items()}


def run(job: Job, export: ckptlib.Export, total: int = 6, back_to: int | None = None) -> list[events.Event]:
    """What a run with a save every second step told of its exports. `back_to`: restored behind the newest step."""
    told: list[events.Event] = []
    with job.checkpointer(every=2, export=export, on_event=told.append) as ckpt:
        start = ckpt.restore().step
        for _ in ckpt.loop(start if back_to is None else ckpt.restore(step=back_to).step, total):
            if ckpt.pending is not None:  # so that each save is taken when it is due
                ckpt.pending.wait_committed()
            job.body()
    return [event for event in told if isinstance(event, (events.Exported, events.ExportFailed))]


def exported(path: Path) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in load_file(path).items()}


def test_the_last_step_is_exported(tmp_path: Path) -> None:
    job, out = Job(tmp_path / "root"), tmp_path / "out" / "model.safetensors"
    export = ckptlib.Export(out, only="model", strip="model/")
    (told,) = run(job, export)
    assert isinstance(told, events.Exported)
    assert (told.step, told.out) == (6, str(out))
    assert exported(out) == weights(job)
    modified = out.stat().st_mtime_ns
    assert run(Job(tmp_path / "root"), export) == [], "a run that is at its end has exported it"
    assert out.stat().st_mtime_ns == modified
    out.unlink()
    assert [event.step for event in run(Job(tmp_path / "root"), export)] == [6], "unless that was lost"
    assert exported(out) == weights(job)


def test_a_run_that_is_told_to_stop_at_its_last_step_has_ended(tmp_path: Path) -> None:
    """It ends with status 0, so no launcher starts it again."""
    told: list[events.Event] = []
    job, export = Job(tmp_path / "root"), ckptlib.Export(tmp_path / "{step}", only="model", strip="model/")
    with job.checkpointer(every=100, export=export, on_event=told.append) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 6):
            job.body()
            if step == 4:  # all ranks act on it one step later, which is the last
                os.kill(os.getpid(), signal.SIGTERM)
    assert [type(event) for event in told][-2:] == [events.Committed, events.Exported]
    assert exported(tmp_path / "6") == weights(job)


def test_a_run_that_goes_on_behind_the_loop_in_which_it_is_told_to_stop_has_not_ended(tmp_path: Path) -> None:
    job, export = Job(tmp_path / "root"), ckptlib.Export(tmp_path / "out", only="model")
    ckpt = job.checkpointer(every=100, export=export)
    for step in ckpt.loop(ckpt.restore().step, 6):
        job.body()
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(ckptlib.Preempted):
        ckpt.after_step(7)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_a_killed_export_has_left_is_no_export(tmp_path: Path) -> None:
    job, out = Job(tmp_path / "root"), tmp_path / "out"
    export = ckptlib.Export(out / "{step}", format="hf", only="model", strip="model/")
    left, other = (out / "6" / f".{name}.0123abcd.partial" for name in ("model.safetensors", "another"))
    left.parent.mkdir(parents=True)
    for path in (left, other):
        path.write_bytes(bytes(100))
        os.utime(path, (1, 1))
    run(job, ckptlib.Export(tmp_path / "elsewhere", only="model"))
    assert [event.step for event in run(Job(tmp_path / "root"), export)] == [6]
    assert exported(out / "6" / "model.safetensors") == weights(job)
    assert not left.exists()
    assert other.exists(), "it is of something else"
    assert run(Job(tmp_path / "root"), export) == []


def test_steps_of_ones_choice_are_exported_meanwhile(tmp_path: Path) -> None:
    out = str(tmp_path / "{step}" / "hf")
    export = ckptlib.Export(out, format="hf", only="model", steps=lambda step: step in (2, 5, 6, 7))
    told = run(Job(tmp_path / "root"), export, total=8)
    assert [event.step for event in told] == [2, 6, 8], "the first save from each of them on"
    assert all((tmp_path / str(step) / "hf" / "model.safetensors").exists() for step in (2, 6, 8))
    model = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(150))
    for step in (2, 6):
        ckptlib.load(tmp_path / "root", {"model": model}, step, only="model")
        found = exported(tmp_path / str(step) / "hf" / "model.safetensors")
        assert found == {f"model/{name}": bits(tensor) for name, tensor in model.state_dict().items()}


def test_a_due_step_is_exported_once_whoever_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save`, asked for a step behind its `after_step` or before it, had the next save exported as well, or instead."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    told: list[events.Event] = []
    job, export = Job(tmp_path / "root"), ckptlib.Export("out/{step}", only="model", steps=lambda step: step in (2, 4))
    tier = {"local": tmp_path / "disk", "drain": ckptlib.Steps(100)}
    with job.checkpointer(every=2, export=export, on_event=told.append, **tier) as ckpt:
        os.chdir("elsewhere")
        for step in ckpt.loop(ckpt.restore().step, 8):
            if step == 2:
                ckpt.save(2).wait_committed()  # until now on the local disk alone
            job.body()
            if step in (3, 5):
                ckpt.save(step + 1).wait_committed()
    assert [event.step for event in told if isinstance(event, events.Exported)] == [2, 4, 8]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["2", "4", "8"]


def test_a_second_restore_forgets_what_was_due_by_the_first(tmp_path: Path) -> None:
    run(Job(tmp_path / "root"), ckptlib.Export(tmp_path / "last", only="model"))
    export = ckptlib.Export(tmp_path / "{step}", only="model", steps=lambda step: step in (4, 6))
    told = run(Job(tmp_path / "root"), export, total=8, back_to=2)
    assert [event.step for event in told if isinstance(event, events.Exported)] == [4, 6, 8]


def test_what_stays_on_local_disks_leaves_its_export_to_the_next_save_in_the_store(tmp_path: Path) -> None:
    told: list[events.Event] = []
    export = ckptlib.Export(tmp_path / "{step}.safetensors", only="model", steps=lambda step: step == 2)
    job, local = Job(tmp_path / "root"), {"local": tmp_path / "disk", "drain": ckptlib.Steps(4)}
    pendings = set[ckptlib.Pending]()
    with job.checkpointer(every=2, **local, export=export, on_event=told.append) as ckpt:
        for _ in ckpt.loop(0, 6):
            pendings |= {ckpt.pending} if ckpt.pending is not None else set()
            for pending in pendings:
                pending.wait_local(WAIT_S)  # of an earlier one, too, when a later one has come there
            job.body()
    assert {(pending.step, pending.drains) for pending in pendings} == {(2, False), (4, True)}
    assert [event.step for event in told if isinstance(event, events.Exported)] == [4, 6]


def test_a_save_that_fails_leaves_its_export_to_the_next_one(tmp_path: Path) -> None:
    job, told = Job(tmp_path / "root"), list[events.Event]()
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "full"}])
    export = ckptlib.Export(tmp_path / "{step}.safetensors", only="model", steps=lambda step: step == 1)
    with ckptlib.Checkpointer(url, job.state, every=1000, arena=tmp_path, export=export, on_event=told.append) as ckpt:
        failed = ckpt.save(1)
        ckpt.after_step(1)
        with pytest.raises(SaveFailed):
            failed.wait_committed(WAIT_S)
        faulty(job, [])
        for step in (2, 4):
            ckpt.after_step(step)
            ckpt.save(step).wait_committed(WAIT_S)
            ckpt.after_step(step + 1)
    assert [event.step for event in told if isinstance(event, events.Exported)] == [2, 4]


def test_what_fails_is_told_and_no_save_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("mine")
    cases = {
        "taken": "is there already",  # a file where the export goes
        "taken/below": "it or one above it is a file",
    }
    for n, (out, text) in enumerate(cases.items()):
        (told,) = run(Job(tmp_path / str(n)), ckptlib.Export(tmp_path / out, only="model"))
        assert isinstance(told, events.ExportFailed)
        assert text in str(told.error)
        assert steps(tmp_path / str(n)) == [2, 4, 6]
    (told,) = run(Job(tmp_path / "names"), ckptlib.Export(tmp_path / "o", only="nobody"))
    assert isinstance(told, events.ExportFailed)
    assert "no tensor for 'nobody'" in str(told.error)
    assert (tmp_path / "taken").read_text() == "mine"
    assert "taken is there already, and no export overwrites it" in caplog.text
    assert "the step itself is whole" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "names", "taken"]


@pytest.mark.parametrize("only", ["model", "nobody"])
def test_close_within_the_block_exports_the_last_step_once(tmp_path: Path, only: str) -> None:
    """Whether that succeeds or fails: the end of the block closes again."""
    told: list[events.Event] = []
    job, export = Job(tmp_path / "root"), ckptlib.Export(tmp_path / "model.safetensors", only=only)
    for _ in range(2):  # the second run is at its end when it begins
        with job.checkpointer(every=2, export=export, on_event=told.append) as ckpt:
            for _ in ckpt.loop(ckpt.restore().step, 3):
                job.body()
            ckpt.close()
    kinds = [type(event) for event in told if isinstance(event, (events.Exported, events.ExportFailed))]
    assert kinds == ([events.Exported] if only == "model" else [events.ExportFailed] * 2), "one for each run"


def test_what_cannot_be_meant_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'gguf'"):
        ckptlib.Export(tmp_path, format="gguf")
    with pytest.raises(ValueError, match=r"put \{step\} into out"):
        ckptlib.Export(tmp_path, steps=100)
    with pytest.raises(ValueError, match="from the step alone"):
        ckptlib.Export(tmp_path / "{step}", steps=ckptlib.Minutes(5))
    with pytest.raises(ValueError, match="a path of this machine"):
        ckptlib.Export("s3://bucket/model")
    with pytest.raises(ValueError, match="dtype 'int3'"):
        ckptlib.Export(tmp_path, dtype="int3")


def large(root: Path) -> dict[str, torch.Tensor]:
    return {"large": torch.arange(1 << 20, dtype=torch.float32)}  # 4 MiB


def held_export(pid: int) -> int:
    """The export that a process has begun and that is held. A kernel names what it runs a moment after it began."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = [int(child) for child in listed if b"ckptlib.exporting" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if found:
            (child,) = found
            return child
        time.sleep(0.02)
    raise AssertionError("no export was begun")


def test_an_export_that_is_killed_is_told_and_leaves_no_name(tmp_path: Path) -> None:
    hold_first()
    told: list[events.Event] = []
    state, out = large(tmp_path), tmp_path / "out"
    export = ckptlib.Export(out / "{step}", steps=1)
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1, export=export, on_event=told.append) as ckpt:
        ckpt.restore()
        ckpt.after_step(1)
        assert ckpt.pending is not None
        ckpt.pending.wait_committed()
        ckpt.after_step(2)
        child = held_export(os.getpid())
        os.kill(child, signal.SIGKILL)
    failed, done = (event for event in told if isinstance(event, (events.Exported, events.ExportFailed)))
    assert isinstance(failed, events.ExportFailed)
    assert "signal 9" in str(failed.error)
    assert (failed.step, done.step) == (1, 2)
    assert [path.name for path in out.iterdir() if not path.name.startswith(".")] == ["2"]
    assert steps(tmp_path / "root") == [1, 2]


TRAINER = """
import sys, torch, ckptlib
root, out = sys.argv[1:]
state = {"large": torch.arange(1 << 20, dtype=torch.float32)}
with ckptlib.Checkpointer(root, state, every=1, export=ckptlib.Export(out + "/{step}", steps=1)) as ckpt:
    ckpt.restore()
    ckpt.after_step(1)
    ckpt.pending.wait_committed()
    ckpt.after_step(2)
    print("begun", flush=True)
"""


HELD = f"""
import sys
sys.path.append({str(WORKERS)!r})
import held_exports
held_exports.hold_first()
"""


def trainer(directory: Path, text: str) -> Program:
    script = directory / "trainer.py"
    script.write_text(text)
    return Program(script, directory / "root", directory / "out", log=directory / "log")


def test_an_export_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with trainer(tmp_path, f"{HELD}{TRAINER}    __import__('time').sleep(600)\n") as killed:
        killed.wait_for("begun")
        child = held_export(killed.pid)
    os.kill(child, signal.SIGCONT)
    deadline = time.monotonic() + 150
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [path.name for path in out.iterdir()] == ["1"], "whole, and nothing else"
    assert torch.equal(load_file(out / "1")["large"], large(tmp_path)["large"])


@pytest.mark.parametrize("total", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_restart_exports_the_step_that_was_due(tmp_path: Path, total: int) -> None:
    """The job was killed after the save, and before its export was begun: it was lost without a word."""
    killed = TRAINER.replace("    ckpt.after_step(2)", "    __import__('os').kill(__import__('os').getpid(), 9)")
    with trainer(tmp_path, killed) as process:
        assert process.wait(120) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    export, told = ckptlib.Export(tmp_path / "out" / "{step}", steps=lambda step: step in (1, 2)), list[events.Event]()
    for _ in range(2):  # the second one has nothing to do
        state = large(tmp_path)
        with ckptlib.Checkpointer(tmp_path / "root", state, every=4, export=export, on_event=told.append) as ckpt:
            start = ckpt.restore().step
            for _ in ckpt.loop(start, total):
                pass
    done = [event for event in told if isinstance(event, (events.Exported, events.ExportFailed))]
    assert [(type(event), event.step) for event in done] == [(events.Exported, step) for step in sorted({1, total})]
    assert torch.equal(load_file(tmp_path / "out" / "1")["large"], state["large"])


@pytest.mark.slow
def test_a_restart_exports_a_step_that_a_local_disk_alone_has(tmp_path: Path) -> None:
    options = "local=out + '/../disk', drain=ckptlib.Steps(100), export=ckptlib.Export(out + '/{step}', steps=1)"
    killed = TRAINER.replace('export=ckptlib.Export(out + "/{step}", steps=1)', options)
    killed = killed.replace("wait_committed()", "wait_local()")
    killed = killed.replace("    ckpt.after_step(2)", "    __import__('os').kill(__import__('os').getpid(), 9)")
    with trainer(tmp_path, killed) as process:
        assert process.wait(120) == -signal.SIGKILL
    assert steps(tmp_path / "root") == []
    export, told = ckptlib.Export(tmp_path / "out" / "{step}", steps=lambda step: step == 1), list[events.Event]()
    tier = {"local": tmp_path / "disk", "drain": ckptlib.Steps(100)}
    with ckptlib.Checkpointer(
        tmp_path / "root", large(tmp_path), every=1, export=export, on_event=told.append, **tier
    ) as ckpt:
        assert ckpt.restore().tier == "local"
        ckpt.after_step(2)  # so that the one that was saved again is the latest no more
        ckpt.save(3)
    assert [event.step for event in told if isinstance(event, events.Exported)] == [1, 3]


def test_a_full_disk_fails_the_export_alone(tmp_path: Path) -> None:
    """By a limit on the size of files that the export alone has."""
    code = TRAINER.replace("import sys", "import resource, sys").replace(
        "    ckpt.restore()",
        "    ckpt.restore()\n    real = __import__('subprocess').Popen\n"
        "    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "    __import__('subprocess').Popen = lambda *a, **k: real(*a, preexec_fn=limit, **k)",
    )
    with trainer(tmp_path, code) as process:
        assert process.wait(120) == 0, process.printed()
        assert "File too large" in process.printed()
    assert [*(tmp_path / "out").iterdir()] == []
    assert steps(tmp_path / "root") == [1, 2]


@pytest.mark.parametrize("seconds", [0, 2])
def test_close_waits_no_longer_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: int) -> None:
    """Where it does not wait for the end of its writer either, and raises, exports were given up without a word."""
    hold_first()
    export = ckptlib.Export(tmp_path / "out" / "{step}", steps=1)
    ckpt = ckptlib.Checkpointer(tmp_path / "root", large(tmp_path), every=1, export=export)
    ckpt.restore()
    ckpt.after_step(1)
    assert ckpt.pending is not None
    ckpt.pending.wait_committed()
    ckpt.after_step(2)
    ckpt.pending.wait_committed()
    child = held_export(os.getpid())
    with caplog.at_level(logging.INFO), suppress(WaitTimeout):
        ckpt.close(timedelta(seconds=seconds))
    os.kill(child, signal.SIGCONT)
    assert (
        f"the export of step 1 to {tmp_path / 'out' / '1'} has not ended; it goes on alone (pid {child})" in caplog.text
    )
    assert "step 2 is not exported" in caplog.text
    os.waitpid(child, 0)
    assert torch.equal(load_file(tmp_path / "out" / "1")["large"], large(tmp_path)["large"])


def test_what_the_users_function_raises_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def steps_of(step: int) -> bool:
        raise StateMismatch("mine")

    told = run(Job(tmp_path / "root"), ckptlib.Export(tmp_path / "{step}", only="model", steps=steps_of))
    assert [event.step for event in told] == [6]
    assert "Export(steps=...) failed for step 2" in caplog.text


def test_an_export_that_prints_much_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library does that warns for each tensor. Nobody reads before the process has ended."""
    (tmp_path / "site").mkdir()
    code = "import sys\nif 'ckptlib.exporting' in sys.orig_argv: print('a warning ' * 100_000)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "site")
    job, out = Job(tmp_path / "root"), tmp_path / "out.safetensors"
    (told,) = run(job, ckptlib.Export(out, only="model", strip="model/"))
    assert isinstance(told, events.Exported)
    assert exported(out) == weights(job)
