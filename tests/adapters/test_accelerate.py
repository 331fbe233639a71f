"""Loops with Accelerate whose checkpoints are ckptlib's: resumed in mid-epoch, with the bits of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate_job
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers.half_dropped import dropped_by_halves
from helpers.registry import close_sessions
from helpers.same import same
from launch import environment, fork_ranks, forked
from places import WORKERS

import ckptlib
from ckptlib.adapters.accelerate import CkptlibAccelerator
from ckptlib.adapters.step_folders import POINTER

ANEW = "has no state, so its order may be drawn anew"
EPOCHS = 3
KILLED_AT = 11


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerate keeps its state for the life of a process."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    close_sessions()
    for kept in (CkptlibAccelerator._under_way, CkptlibAccelerator._folders, CkptlibAccelerator._whose):
        kept.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def ranks(number: int, directory: Path, at: int, whose: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """In processes of their own. Empty where they were killed."""
    out = directory.with_suffix(".pt")
    codes, output = forked(WORKERS / "accelerate_job.py", number, directory, epochs, at, out, whose, timeout_s=250)
    assert set(codes) == {0} if at < 0 else -9 in codes, output[-20000:]
    return torch.load(out, weights_only=True) if at < 0 else {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "how"), [(1, ""), (2, ""), pytest.param(2, "-fsdp2", marks=pytest.mark.slow)], ids=["1", "2", "2-fsdp2"]
)
def test_killed_and_resumed_in_mid_epoch(tmp_path: Path, number: int, how: str) -> None:
    whole = ranks(number, tmp_path / "whole", -1, f"never{how}")
    ranks(number, tmp_path / "parted", KILLED_AT, f"ours{how}")
    parted = ranks(number, tmp_path / "parted", -1, f"ours{how}")
    assert same(parted, whole)
    root = tmp_path / "parted" / "checkpoints" / "ckptlib"
    left = tuple(f".checkpoint_{step}." for step in dropped_by_halves(root))
    found = sorted(path.name for path in root.parent.iterdir() if not path.name.startswith(left))
    assert found == ["checkpoint_3", "checkpoint_4", "ckptlib"]  # total_limit=2
    assert {info.step for info in ckptlib.checkpoints(root)} - dropped_by_halves(root) == {3, 4}


def test_killed_behind_the_end_of_an_epoch(tmp_path: Path) -> None:
    """All batches of the epoch of the checkpoint are skipped, and the next one is shuffled as it would have been."""
    whole = ranks(1, tmp_path / "whole", -1, "never", epochs=4)
    ranks(1, tmp_path / "parted", 16, "ours", epochs=4)
    assert same(ranks(1, tmp_path / "parted", -1, "ours", epochs=4), whole)


class Trained:
    """A model, an optimizer and a scheduler, of which two steps are done."""

    def __init__(self, kind: type[Accelerator] = CkptlibAccelerator, **options: Any) -> None:
        self.accelerator = kind(cpu=True, **options)
        self.net = torch.nn.Linear(3, 2)
        optim = torch.optim.AdamW(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
        self.model, self.optim, self.scheduler = self.accelerator.prepare(self.net, optim, scheduler)
        self.train()

    def train(self) -> None:
        for _ in range(2):
            self.accelerator.backward(self.model(torch.randn(4, 3)).sum())
            self.optim.step()
            self.scheduler.step()
            self.optim.zero_grad()

    def state(self) -> dict[str, Any]:
        found = {"model": dict(self.net.state_dict()), "optim": self.optim.state_dict()["state"]}
        found["last"] = {"epoch": self.scheduler.state_dict()["last_epoch"], "random": torch.get_rng_state()}
        copied: dict[str, Any] = torch.utils._pytree.tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) else x, found
        )
        return copied


def test_by_name(tmp_path: Path) -> None:
    """The directory is saved to again, and another is left as it is."""
    one, states = Trained(), []
    for name in ("first", "second", "first"):
        one.train()
        where = one.accelerator.save_state(tmp_path / name)
        assert where == str(tmp_path / name)
        states.append(one.state())
    one.train()
    for name, n in (("second", 1), ("first", 2)):
        one.accelerator.load_state(tmp_path / name)
        assert same(one.state(), states[n])
    one.accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckptlib", "first", "second"]
    assert {path.name for path in (tmp_path / "first").iterdir()} == {POINTER}
    with pytest.raises(ValueError, match="needs output_dir"):
        one.accelerator.save_state()


NAMELESS = """
import sys
from pathlib import Path
import torch
from ckptlib.adapters.accelerate import CkptlibAccelerator
directory = Path(sys.argv[1])
accelerator = CkptlibAccelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
try:
    accelerator.save_state(directory / ("x" * 250))  # longer yet, while it is under way
except Exception as error:
    (directory / f"rank-{accelerator.process_index}").write_text(str(error))
accelerator.save_state(directory / "good")
accelerator.end_training()
"""


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Rank 0 makes it; both raise, and both go on."""
    script, directory = tmp_path / "nameless.py", tmp_path / "run"
    script.write_text(NAMELESS)
    directory.mkdir()
    codes, output = forked(script, 2, directory, timeout_s=100)
    assert codes == [0, 0], output[-20000:]
    assert all("File name too long" in (directory / f"rank-{rank}").read_text() for rank in (0, 1))
    assert sorted(path.name for path in directory.iterdir()) == ["ckptlib", "good", "rank-0", "rank-1"]


UNENDED = """
import sys
import torch
from accelerate.utils import ProjectConfiguration
from ckptlib.adapters.accelerate import CkptlibAccelerator
project = ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True, total_limit=1)
accelerator = CkptlibAccelerator(cpu=True, project_config=project)
accelerator.prepare(torch.nn.Linear(2, 2))
for _ in range(3):
    accelerator.save_state()
"""


def test_a_program_that_ends_without_saying_so(tmp_path: Path) -> None:
    """All that is committed by then gets its name. What is too many may stay: Python begins no thread any more."""
    (tmp_path / "unended.py").write_text(UNENDED)
    command = [sys.executable, str(tmp_path / "unended.py"), str(tmp_path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-20000:]
    assert (tmp_path / "checkpoints" / "checkpoint_2" / POINTER).exists()


def test_another_process_goes_on(tmp_path: Path) -> None:
    one = Trained()
    one.accelerator.save_state(tmp_path / "a")
    state = one.state()
    one.accelerator.end_training()
    close_sessions()
    AcceleratorState._reset_state(reset_partial_state=True)
    other = Trained()
    other.accelerator.load_state(tmp_path / "a")
    assert same(other.state(), state)
    other.accelerator.save_state(tmp_path / "b")
    other.accelerator.wait_for_saves()
    assert len(list(ckptlib.checkpoints(tmp_path / "ckptlib"))) == 2


def test_another_accelerator_of_the_process_goes_on(tmp_path: Path) -> None:
    """At once: it finds the directory that the first one has just saved, and the limit is its own."""
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    one = Trained(project_config=accelerate_job.ProjectConfiguration(**project))
    one.accelerator.save_state()
    state = one.state()
    limited = accelerate_job.ProjectConfiguration(**project, iteration=1, total_limit=1)
    other = Trained(project_config=limited)
    other.accelerator.load_state()
    assert same(other.state(), state)
    other.accelerator.save_state()
    other.accelerator.wait_for_saves()
    one.accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "ckptlib"]
    other.accelerator.save_state()
    other.accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "ckptlib"]


def test_what_accelerate_wrote_itself(tmp_path: Path) -> None:
    one = Trained(Accelerator)
    one.accelerator.save_state(str(tmp_path / "a"))
    state = one.state()
    AcceleratorState._reset_state(reset_partial_state=True)
    other = Trained()
    other.accelerator.load_state(tmp_path / "a")
    assert same(other.state(), state)


def test_a_name_is_in_use(tmp_path: Path) -> None:
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    one = Trained(project_config=accelerate_job.ProjectConfiguration(**project))
    with pytest.raises(ValueError, match="checkpoints"):
        one.accelerator.load_state()
    one.accelerator.save_state()
    one.accelerator.load_state()
    one.accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match="exists already"):
        one.accelerator.save_state()


def stateful(directory: Path, stops_at: int = -1, workers: int = 0, seeded: bool = True) -> list[Any]:
    """The batches of two epochs, from where the newest checkpoint says. `stops_at` below 0: behind an epoch's loop."""
    AcceleratorState._reset_state(reset_partial_state=True)
    loading = accelerate_job.DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=seeded, data_seed=3
    )
    accelerator = CkptlibAccelerator(cpu=True, dataloader_config=loading)
    torch.manual_seed(0)
    data: Any = torch.arange(20.0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    loader = accelerator.prepare(loader)
    if (directory / "a").exists():
        accelerator.load_state(directory / "a")
    assert accelerator.prepare(loader) is loader  # changes nothing
    seen = []
    for _ in range(loader.iteration, 2):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == stops_at:
                accelerator.save_state(directory / "a")
                accelerator.end_training()
                return seen
        if len(seen) == -stops_at:
            accelerator.save_state(directory / "a")
            accelerator.end_training()
            return seen
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops_at", [4, 10, -10, 13])
def test_a_stateful_loader_goes_on_at_its_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stops_at: int, workers: int
) -> None:
    whole = stateful(tmp_path)
    assert len(whole) == 20
    assert stateful(tmp_path, stops_at, workers) + stateful(tmp_path, workers=workers) == whole
    assert ANEW not in caplog.text


@pytest.mark.parametrize("stops_at", [4, 10])
def test_a_stateful_loader_whose_order_is_drawn_anew_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stops_at: int
) -> None:
    """At the end of an epoch nothing is left of it."""
    stateful(tmp_path, stops_at, seeded=False)
    stateful(tmp_path, seeded=False)
    assert (f"dataloader: the RandomSampler of this DataLoaderShard {ANEW}" in caplog.text) == (stops_at == 4)


def with_loaders(number: int) -> tuple[CkptlibAccelerator, list[Any]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = CkptlibAccelerator(cpu=True)
    data: Any = torch.arange(4.0)
    return accelerator, [accelerator.prepare(torch.utils.data.DataLoader(data, 2)) for _ in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_another_number_of_data_loaders(tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Those that both have go on; as one for validation that is prepared in the second half of a training."""
    one, loaders = with_loaders(2)
    for loader, epochs in zip(loaders, (2, 1), strict=True):
        for _ in range(epochs):
            assert len([*loader]) == 2
    one.save_state(tmp_path / "a")
    one.end_training()
    other, loaders = with_loaders(number)
    other.load_state(tmp_path / "a")
    assert [loader.iteration for loader in loaders] == [2, 1, 0][:number]
    assert (f"was saved with 2 prepared data loaders, and there are {number} now" in caplog.text) == (number != 2)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    one = Trained()
    one.accelerator.register_for_checkpointing(Strange())
    with pytest.raises(ckptlib.UnsupportedState, match="custom_checkpoint"):
        one.accelerator.save_state(tmp_path / "a")
    one.accelerator._custom_objects.clear()
    one.accelerator.register_save_state_pre_hook(lambda models, weights, where: None)
    with pytest.raises(ValueError, match="hooks"):
        one.accelerator.save_state(tmp_path / "a")
    assert not (tmp_path / "a").exists()


class Strange:
    def state_dict(self) -> dict[str, Any]:
        return {"x": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_damage(tmp_path: Path) -> None:
    one = Trained()
    one.accelerator.save_state(tmp_path / "a")
    one.accelerator.wait_for_saves()
    (tmp_path / "a" / POINTER).write_text("{}")
    with pytest.raises(ckptlib.FormatError, match=POINTER):
        one.accelerator.load_state(tmp_path / "a")
    one.accelerator.save_state(tmp_path / "b")
    one.accelerator.wait_for_saves()
    shutil.rmtree(tmp_path / "ckptlib" / "steps")
    os.mkdir(tmp_path / "ckptlib" / "steps")
    with pytest.raises(ckptlib.CheckpointNotFound):
        one.accelerator.load_state(tmp_path / "b")
    with pytest.raises(ValueError, match="no directory"):
        one.accelerator.load_state(tmp_path / "none")


def test_all_ranks_go_by_what_rank_0_sees(tmp_path: Path) -> None:
    fork_ranks("accelerate_ranks.py", 2, tmp_path, timeout_s=60)


def test_ranks_that_hear_of_a_failure_at_different_times(tmp_path: Path) -> None:
    """It is raised once, on both; the next save is begun."""
    fork_ranks("accelerate_failed.py", 2, tmp_path, timeout_s=200)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["ckptlib", "one", "three"]
