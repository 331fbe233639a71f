"""Each option of torchtitan's manager, in one process with torchtitan's containers, as its own unit tests name them.

Those replace DCP's save and load by mocks, and look at the calls; here real steps are looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import fork_one
from torch import nn

import ckptlib
from ckptlib.errors import CheckpointNotFound, UnsupportedState

pytest.importorskip("torchtitan", reason="brings dozens of packages")

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckptlib.adapters.torchtitan import CkptlibCheckpointManager


class Counter:
    """A state of torchtitan's kind."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Model(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), value))
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("freqs_cis", torch.full((2,), value), persistent=False)


class Run:
    """A training with its manager, from a value that tells it from others."""

    def __init__(self, folder: Path, value: float = 1.0, **options: Any) -> None:
        self.model, self.counter = Model(value), Counter()
        groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[self.model]
        )
        schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=self.optimizers, training_steps=20)
        config = CkptlibCheckpointManager.Config(**{"enable": True, "interval": 2, "keep_latest_k": 0, **options})
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedulers,
            states={"train_state": self.counter},
            sd_adapter=None,
            base_folder=str(folder),
        )
        self.loaded = self.manager.load(step=config.load_step)

    def step(self) -> None:
        self.counter.step += 1
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizers.step()

    def train(self, last: int) -> list[int]:
        """Up to that step, which is the last one. The steps at which it saved."""
        saved = []
        while self.counter.step < last:
            self.step()
            if self.manager.save(self.counter.step, last_step=self.counter.step == last):
                saved.append(self.counter.step)
                if self.manager.enable:
                    self.manager._checkpointer.pending.wait_committed()
        self.manager.close()
        return saved


def steps(folder: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(folder / "checkpoint")]


def test_interval_and_what_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.loaded
    assert run.train(5) == [2, 4, 5]
    assert steps(tmp_path) == [2, 4, 5]
    again = Run(tmp_path, 7.0)
    assert again.loaded
    assert again.counter.step == 5
    assert torch.equal(again.model.weight, run.model.weight)
    assert torch.equal(again.model.kept, run.model.kept)
    assert again.model.freqs_cis.eq(7).all(), "what is not persistent is not saved"
    (ours,), (theirs,) = again.optimizers.optimizers, run.optimizers.optimizers
    assert torch.equal(ours.state[again.model.weight]["exp_avg"], theirs.state[run.model.weight]["exp_avg"])
    again.manager.close()


def test_enable(tmp_path: Path) -> None:
    run = Run(tmp_path, enable=False)
    assert not run.loaded
    assert run.train(4) == []
    assert not [*tmp_path.iterdir()]


def test_enable_first_step_checkpoint(tmp_path: Path) -> None:
    assert Run(tmp_path, enable_first_step_checkpoint=True).train(5) == [1, 2, 4, 5]


def test_keep_latest_k(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=2).train(9)
    assert steps(tmp_path) == [8, 9]


def test_load_step(tmp_path: Path) -> None:
    Run(tmp_path).train(6)
    run = Run(tmp_path, load_step=4)
    assert run.counter.step == 4
    assert run.train(5) == [5]
    assert steps(tmp_path) == [2, 4, 5], "what came behind it is abandoned"
    with pytest.raises(CheckpointNotFound, match="77"):
        Run(tmp_path, load_step=77)
    with pytest.raises(CheckpointNotFound):
        Run(tmp_path / "nowhere", load_step=4)


def test_exclude_from_loading(tmp_path: Path) -> None:
    Run(tmp_path).train(3)
    run = Run(tmp_path, 7.0, exclude_from_loading=["train_state", "lr_scheduler"])
    assert run.counter.step == 0
    assert not run.model.weight.eq(7).any()
    run.manager.close()
    with pytest.raises(ValueError, match="nobody"):
        Run(tmp_path, exclude_from_loading=["nobody"])


def test_load_only(tmp_path: Path) -> None:
    trained = Run(tmp_path)
    trained.train(3)
    before = sorted(path for path in tmp_path.rglob("*"))
    run = Run(tmp_path, 7.0, load_only=True)
    assert run.loaded
    assert torch.equal(run.model.weight, trained.model.weight)
    assert run.train(7) == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [{}, {"load_only": True}], ids=str)
def test_a_run_that_must_resume(tmp_path: Path, options: dict[str, Any]) -> None:
    Run(tmp_path / "first").train(3)
    options = {**options, "checkpointer": {"must_resume": True}}
    beginning = {"initial_load_path": str(tmp_path / "first" / "checkpoint")}
    with pytest.raises(CheckpointNotFound):
        Run(tmp_path / "run", **beginning, **options)
    assert not (tmp_path / "run").exists()
    run = Run(tmp_path / "first", 7.0, **options)
    assert run.counter.step == 3
    run.manager.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_initial_load_path(tmp_path: Path, model_only: bool) -> None:
    first = Run(tmp_path / "first")
    first.train(3)
    beginning = {"initial_load_path": str(tmp_path / "first" / "checkpoint"), "initial_load_model_only": model_only}
    run = Run(tmp_path / "run", 7.0, **beginning)
    assert run.loaded
    assert torch.equal(run.model.weight, first.model.weight)
    assert run.counter.step == (0 if model_only else 3)
    run.train(6)
    again = Run(tmp_path / "run", 7.0, **beginning)
    assert again.counter.step == 6, "the run's own step comes first"
    assert torch.equal(again.model.weight, run.model.weight)
    again.manager.close()


def test_last_save_model_only(tmp_path: Path) -> None:
    """The last step is whole, and its model is exported besides, as DCP reads it."""
    run = Run(tmp_path, export_dtype="bfloat16")
    run.train(3)
    found = {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "kept": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(found, checkpoint_id=tmp_path / "checkpoint-export" / "final-step-3")
    assert torch.equal(found["weight"], run.model.weight.bfloat16())
    longer = Run(tmp_path, 7.0, last_save_model_only=False)
    assert longer.counter.step == 3
    longer.train(4)
    assert [path.name for path in (tmp_path / "checkpoint-export").iterdir()] == ["final-step-3"]


def make_seed(folder: Path) -> None:
    """As Trainer makes one: step 0, before it loads anything."""
    seed = Run.__new__(Run)
    seed.model = Model(3.0)
    config = CkptlibCheckpointManager.Config(enable=True, create_seed_checkpoint=True)
    optimizers = OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})],
        implementation="for-loop",
    ).build(model_parts=[seed.model])
    manager = config.build(
        dataloader=None,
        model_parts=[seed.model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=20),
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
    manager.save(0, last_step=True)
    manager.close()
    assert steps(folder) == [0]


def test_create_seed_checkpoint(tmp_path: Path) -> None:
    """The run that begins with it loads the model, and all that it saves itself afterwards."""
    make_seed(tmp_path)
    run = Run(tmp_path, 7.0)
    assert run.loaded
    assert run.model.weight.eq(3).all()
    assert run.train(3) == [2, 3]
    again = Run(tmp_path, 8.0)
    assert again.counter.step == 3
    assert torch.equal(again.model.weight, run.model.weight)
    (ours,), (theirs,) = again.optimizers.optimizers, run.optimizers.optimizers
    assert torch.equal(ours.state[again.model.weight]["exp_avg"], theirs.state[run.model.weight]["exp_avg"])
    again.manager.close()


@pytest.mark.parametrize(
    "options",
    [{"load_only": True}, {"load_step": 0}, {"exclude_from_loading": ["optimizer", "lr_scheduler", "train_state"]}],
)
def test_a_seed_with_other_options(tmp_path: Path, options: dict[str, Any]) -> None:
    make_seed(tmp_path)
    run = Run(tmp_path, 7.0, **options)
    assert run.loaded
    assert run.model.weight.eq(3).all()
    run.manager.close()


KILLED = """
import os, sys
from pathlib import Path
from test_torchtitan_options import Run, in_memory
run = Run(Path(sys.argv[1]), 7.0, **in_memory(sys.argv[1]))
for _ in range(3):
    run.step()
    run.manager.save(run.counter.step)
run.manager._checkpointer.drain()
os._exit(9)
"""


def in_memory(folder: object) -> dict[str, Any]:
    """Options by which every step has a snapshot and the store gets none."""
    return {"interval": 100, "checkpointer": {"peers": ckptlib.Peers(copies=0, every=1), "arena": str(folder)}}


def test_a_step_in_memory_comes_before_the_seed(tmp_path: Path) -> None:
    """And all of it is loaded."""
    make_seed(tmp_path)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    log = tmp_path / "log"
    assert fork_one(script, tmp_path, log=log, timeout_s=100) == 9, log.read_text()
    assert steps(tmp_path) == [0]
    run = Run(tmp_path, 8.0, **in_memory(tmp_path))
    assert run.counter.step == 3
    assert run.optimizers.optimizers[0].state[run.model.weight]["step"] == 3
    run.manager.close()


def test_fused_weights_in_several_stages_are_refused() -> None:
    """Their parts are made anew at each look: one state of all stages would keep those of the first one."""
    from ckptlib.adapters.torchtitan import _model

    def split(module: Model, state: dict[str, torch.Tensor], prefix: str, local: object) -> None:
        state[f"{prefix}part"] = state.pop(f"{prefix}weight")[:1].clone()

    def join(module: Model, state: dict[str, torch.Tensor], prefix: str, *rest: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}part").expand(3, 4)

    fused = Model(1.0)
    fused.register_state_dict_post_hook(split)
    fused.register_load_state_dict_pre_hook(join)
    assert _model([fused]) is fused
    with pytest.raises(UnsupportedState, match=r"model/part.*2 pipeline stages"):
        _model([Model(2.0), fused])
