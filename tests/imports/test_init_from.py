"""A fresh run begins from other weights; a run that has a step of its own never looks at them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.one_job import Job, catalog, steps
from launch import fork_ranks
from onerank import bits
from rankthreads import run_ranks
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckptlib
from ckptlib import events
from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.errors import CheckpointNotFound, FormatError, StateError, StateMismatch, UnsupportedState
from ckptlib.imports.beginning import opened
from ckptlib.imports.formats import format_of
from ckptlib.ranks.group import Group, SoloGroup


def weights(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def source(tmp_path: Path) -> Job:
    """A run whose weights are another one's beginning."""
    job = Job(tmp_path / "source", seed=7)
    for _ in range(3):
        job.body()
    return job


def as_torch(job: Job, at: Path) -> Path:
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "it": 3}, at / "ckpt.pt")
    return at / "ckpt.pt"


def as_safetensors(job: Job, at: Path) -> Path:
    (at / "hf").mkdir()
    save_file(dict(job.model.state_dict()), at / "hf" / "model.safetensors")
    return at / "hf"


def as_dcp(job: Job, at: Path) -> Path:
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=at / "dcp", no_dist=True)
    return at / "dcp"


def as_root(job: Job, at: Path) -> Path:
    ckptlib.save(job.root, job.state, 30)
    return job.root


@pytest.mark.parametrize("write", [as_torch, as_safetensors, as_dcp, as_root])
def test_a_fresh_run_begins_from_it(write: Callable[[Job, Path], Path], tmp_path: Path) -> None:
    before = source(tmp_path)
    path = write(before, tmp_path)
    told: list[events.Event] = []
    job = Job(tmp_path / "root")
    with job.checkpointer(init_from=path, init_only="model", every=1, on_event=told.append) as ckpt:
        generators = torch.get_rng_state()
        report = ckpt.restore()
        assert torch.equal(torch.get_rng_state(), generators)
        assert weights(job.model) == weights(before.model)
        assert not job.optimizer.state
        assert (report.step, report.save) == (0, None)
        assert report.initialized_from is not None
        assert str(path) in str(report)
        for _ in ckpt.loop(report.step, 2):
            job.body()
    (began,) = (event for event in told if isinstance(event, events.Initialized))
    assert began.step == 0
    assert str(path) in began.source
    assert began.nbytes > 0
    assert f"{path.name}" in began_from(job.root)

    shutil.rmtree(path) if path.is_dir() else path.unlink()  # a resumed run never looks at it
    again = Job(tmp_path / "root", seed=1)
    with again.checkpointer(init_from=path, init_only="model", every=1) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.initialized_from) == (2, None)
    assert weights(again.model) == weights(job.model)
    assert f"{path.name}" in began_from(job.root)


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_a_step_that_only_memory_or_a_disk_has_comes_first(tier: str, tmp_path: Path) -> None:
    path = as_torch(source(tmp_path), tmp_path)
    options: dict[str, object] = {"every": 10**6, "peers": ckptlib.Peers(copies=0)}
    if tier == "local":
        options = {"every": 1, "local": tmp_path / "nvme", "drain": ckptlib.Steps(10**6)}
    options |= {"init_from": path, "init_only": "model"}
    job = Job(tmp_path / "root")
    with suppress(KeyboardInterrupt), job.checkpointer(**options) as ckpt:
        assert ckpt.restore().initialized_from is not None
        job.body()
        ckpt.after_step(1)
        ckpt.drain()
        if tier == "local":
            assert ckpt.pending is not None
            ckpt.pending.wait_local(60.0)
        raise KeyboardInterrupt  # as a job that dies
    assert steps(job.root) == []
    path.unlink()
    again = Job(tmp_path / "root", seed=1)
    with again.checkpointer(**options) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.tier, report.initialized_from) == (1, tier, None)
    assert weights(again.model) == weights(job.model)


class AsDcpWrapsIt:
    """An optimizer in the wrapper of DCP's tutorial: to make its state, torch steps it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._of = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(*self._of)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(*self._of, state)


@pytest.mark.parametrize("write", [as_torch, as_root])
def test_an_optimizer_that_a_look_would_step_is_as_new(write: Callable[[Job, Path], Path], tmp_path: Path) -> None:
    path, job = write(source(tmp_path), tmp_path), Job(tmp_path / "root")
    state = {"model": job.model, "optim": AsDcpWrapsIt(job.model, job.optimizer)}
    with ckptlib.Checkpointer(job.root, state, every=10**6, init_from=path, init_only="model") as ckpt:
        ckpt.restore()
        assert not job.optimizer.state


class AskingTheOthers:
    """An object whose state all ranks make together."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def state_dict(self) -> dict[str, int]:
        return {"ranks": len(self._group.gather(b""))}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_copy_that_is_not_whole_is_told_where_looking_at_the_state_is_collective(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict()}, tmp_path / "0.pt")
    (tmp_path / "1.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:-300])

    def begin(group: Group) -> None:
        path = tmp_path / f"{group.rank}.pt"
        opened(group, format_of(path), path, {"model": model, "all": AskingTheOthers(group)}, None, None)

    with pytest.raises(FormatError, match=r"on rank 1: .*1\.pt: is no whole file"):
        run_ranks(2, begin)


def began_from(root: Path) -> str:
    """What `ckptlib show` says of it."""
    command = [sys.executable, "-m", "ckptlib.cli", "show", str(root)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("begun from"))
    return line


def test_all_of_a_root_or_one_step_under_other_names(tmp_path: Path) -> None:
    before = source(tmp_path)
    for step in (10, 20):
        before.body()
        ckptlib.save(before.root, before.state, step)
        if step == 10:
            wanted = before.bits()
    job = Job(tmp_path / "root")
    with job.checkpointer(init_from=ckptlib.Init(before.root, step=10)) as ckpt:
        assert ckpt.restore().step == 0
    assert job.bits() == wanted

    (before.root / "ckptlib.json").unlink()  # its copy serves, as it does a load
    other = nn.Linear(150, 150)
    state = {"net": nn.ModuleDict({"first": other}), "optim": torch.optim.SGD(other.parameters())}
    init = ckptlib.Init(before.root, map={"net/first.weight": "model/0.weight", "net/first.bias": "model/0.bias"})
    with ckptlib.Checkpointer(tmp_path / "b", state, every=5, init_from=init, init_only="net") as ckpt:
        ckpt.restore()
    assert bits(other.weight) == bits(before.model[0].weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight


def test_tied_weights_that_have_one_name_in_the_file(tmp_path: Path) -> None:
    before, model = Tied(), Tied()
    path = tmp_path / "tied.safetensors"
    save_model(before, path)
    with ckptlib.Checkpointer(tmp_path / "root", {"model": model}, every=5, init_from=path) as ckpt:
        assert ckpt.restore().missing == ()
    assert bits(model.wte.weight) == bits(before.wte.weight)
    assert model.head.weight is model.wte.weight
    other = nn.ModuleDict({"first": nn.Embedding(16, 8), "last": nn.Linear(8, 16, bias=False)})
    with pytest.raises(StateMismatch, match="last"):  # what is not tied is not taken to be
        begin_as(other, tmp_path / "other", ckptlib.Init(path, map={"model/first": "model/head"}))


@pytest.mark.parametrize("shared", ["wte.weight", "head.weight"])
def test_ranks_that_tie_differently(shared: str, tmp_path: Path) -> None:
    """As stages of a pipeline do. The file has the tied weights under one name, and what only the other rank has."""
    before = {shared: torch.randn(16, 8), "out.weight": torch.randn(3, 8)}
    save_file(before, tmp_path / "both.safetensors")
    models: list[nn.Module] = [Tied(), nn.ModuleDict({"out": nn.Linear(8, 3, bias=False)})]
    fill(tmp_path / "both.safetensors", models)
    assert bits(models[0].wte.weight) == bits(before[shared])
    assert models[0].head.weight is models[0].wte.weight
    assert bits(models[1].out.weight) == bits(before["out.weight"])

    layers = {"wte": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False), "out": nn.Linear(8, 3, bias=False)}
    lacked = "wte" if shared == "head.weight" else "head"
    with pytest.raises(StateMismatch, match=rf"model/{lacked}\.weight: not in the checkpoint"):
        fill(tmp_path / "both.safetensors", [Tied(), nn.ModuleDict(layers)])  # what another rank ties is not tied here


def fill(path: Path, models: list[nn.Module]) -> None:
    """Each rank's, of one file."""

    def on_rank(group: Group) -> None:
        state = {"model": models[group.rank]}
        step = opened(group, format_of(path), path, state, None, None)
        load_step(group, step, LoadOrder(state, reader=lambda _, rank: step.reader(rank)))

    run_ranks(len(models), on_rank)


def test_ranks_that_see_different_files(tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"weight": torch.ones(2, 2 + rank)}, tmp_path / f"{rank}.safetensors")

    def on_rank(group: Group) -> None:
        path = tmp_path / f"{group.rank}.safetensors"
        opened(group, format_of(path), path, {}, None, None)

    with pytest.raises(StateError, match="the ranks do not see the same checkpoint"):
        run_ranks(2, on_rank)


def begin_as(model: nn.Module, root: Path, init: ckptlib.Init) -> None:
    with ckptlib.Checkpointer(root, {"model": model}, every=5, init_from=init) as ckpt:
        ckpt.restore()


def test_numbers_are_converted_only_when_asked_to(tmp_path: Path) -> None:
    job, half = Job(tmp_path / "root"), {n: t.bfloat16() for n, t in source(tmp_path).model.state_dict().items()}
    half = {name: tensor for name, tensor in half.items() if tensor.dtype == torch.bfloat16}
    save_file(half, tmp_path / "half.safetensors")
    with pytest.raises(StateMismatch, match=r"cast=.* only= is init_only=, and the rest goes into Init$"):
        begin(job, tmp_path / "half.safetensors")
    job = Job(tmp_path / "root2")
    begin(job, ckptlib.Init(tmp_path / "half.safetensors", cast=True, optional="model/2.num_batches_tracked"))
    found = job.model.state_dict()
    assert all(torch.equal(found[name], half[name].to(found[name].dtype)) for name in half if "batches" not in name)


def begin(job: Job, init: object, only: object = "model") -> None:
    with job.checkpointer(init_from=init, init_only=only) as ckpt:
        ckpt.restore()


def test_what_is_wrong_is_said_at_construction(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "nowhere", CheckpointNotFound, "nowhere: does not exist"),
        (tmp_path / "notes.txt", FormatError, "no root of ckptlib; nor another library's"),
        (tmp_path / "empty", FormatError, "no root of ckptlib; nor another library's"),
        ("memory://no-such-root", CheckpointNotFound, "no-such-root"),
        (job.root, ValueError, "is the root of this run"),
    ]
    for given, kind, text in cases:
        shutil.rmtree(job.root, ignore_errors=True)
        with pytest.raises(kind, match=text):
            job.checkpointer(init_from=given)
    with pytest.raises(ValueError, match="there is no init_from="):
        job.checkpointer(init_only="model")
    made = tmp_path / "made"
    ckptlib.save(made, {"x": torch.ones(2)}, 1)
    shutil.rmtree(job.root)  # behind a writer that has yet to end, a job is not the first of its root
    with pytest.raises(CheckpointNotFound, match="7"):
        job.checkpointer(init_from=ckptlib.Init(made, step=7))


def test_a_source_that_lacks_something_names_it_and_leaves_no_step(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    torch.save({"model": {"0.weight": torch.ones(3)}}, tmp_path / "small.pt")
    with pytest.raises(StateMismatch, match=r"model/0\.weight"):
        begin(job, tmp_path / "small.pt")
    assert catalog(job.root).saves() == []


class Made:
    """What only unpickling could make."""


def test_objects_that_the_state_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = source(tmp_path)
    saved = {"model": before.model.state_dict(), "optimizer": {Made(): 1}, "args": argparse.Namespace(lr=0.1)}
    torch.save({**saved, "list": [torch.ones(2), Made()]}, tmp_path / "ckpt.pt")
    job = Job(tmp_path / "root")
    begin(job, tmp_path / "ckpt.pt")
    assert weights(job.model) == weights(before.model)
    (told,) = (record.getMessage() for record in caplog.records if "left out" in record.getMessage())
    assert "args (argparse.Namespace)" in told
    assert "list/1" in told


@pytest.mark.parametrize(
    ("saved", "mine", "named"),
    [
        ({"args": argparse.Namespace(lr=0.1)}, {"args": {"lr": 0.2}}, "args"),
        ({"args": {"of": Made()}}, {"args": {"of": 1}}, "args/of"),
        ({"args": {"of": Made(), "lr": 0.1}}, {"args": {"lr": 0.2}}, "args/of"),
        ({"args": {Made(): 1, "lr": 0.1}}, {"args": {"lr": 0.2}}, "args/a key"),
        ({"args": Made()}, {"args": {"w": torch.ones(2), "lr": 0.2}}, "args"),
        ({"args": [torch.ones(2), Made()]}, {"args": [torch.zeros(2), 1]}, "args/1"),
        ({"net": Made()}, {"args": nn.Linear(2, 2)}, "net"),
    ],
)
def test_objects_that_the_state_asks_for_stop_it(
    saved: dict[str, object], mine: dict[str, object], named: str, tmp_path: Path
) -> None:
    path, rename = tmp_path / "ckpt.pt", {"args": "net"} if named == "net" else None
    torch.save({**saved, "other": torch.ones(2)}, path)
    state = {**mine, "other": torch.zeros(2)}
    for only in (None, "args", "args*"):
        with pytest.raises(UnsupportedState, match=rf"{named} \(.*Leave them out \(init_only=\)"):
            opened(SoloGroup(), format_of(path), path, state, only, rename)
    assert {*opened(SoloGroup(), format_of(path), path, state, "other", rename).leaves} >= {"other"}


def test_a_run_that_died_before_its_first_step_begins_again(tmp_path: Path) -> None:
    before = source(tmp_path)
    path = as_torch(before, tmp_path)
    for _ in range(2):
        job = Job(tmp_path / "root")
        ckpt = job.checkpointer(init_from=path, init_only="model")
        ckpt.restore()
        assert weights(job.model) == weights(before.model)
        ckpt._ending.leave()


def test_two_ranks_of_fsdp_and_ddp(tmp_path: Path) -> None:
    """The oracle is torch's own `full_tensor`, and the files are read by torch and safetensors."""
    script = Path(__file__).parent / "init_ranks.py"
    assert fork_ranks(str(script), 2, tmp_path, timeout_s=120).count("alike") == 4
