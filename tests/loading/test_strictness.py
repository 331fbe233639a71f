"""What a strict load refuses, what it leaves out and tells, and what its errors advise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.one_job import Job, steps
from helpers.verdicts import assert_cases_pass
from onerank import Holder, Root, bits, opened
from torch import nn
from typing_extensions import override

import ckptlib
from ckptlib.errors import StateMismatch


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "root")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_plain_value_that_one_side_lacks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as root:
        root.save({"w": torch.ones(3), "old": {"a": None, "b": {1, 2}}})
        target = {"w": torch.zeros(3), "new": {"lr": 0.1}}
        report = root.load(target)
    assert torch.equal(target["w"], torch.ones(3))  # type: ignore[arg-type]
    assert target["new"] == {"lr": 0.1}
    assert (report.missing, set(report.unexpected)) == (("new/lr",), {"old/a", "old/b"})
    assert warnings(caplog) == [
        "step 1: not in the checkpoint, and left as it was: new/lr",
        "step 1: not in the state: old/a, old/b",
    ]


@pytest.mark.parametrize("content", [{"last_epoch": 3}, {0: "x"}, {}, [1], (2, 3), {"t": torch.ones(1)}])
def test_an_object_that_one_side_lacks_is_refused(root: Root, content: object) -> None:
    """Though its state be made of plain values, as a scheduler's is."""
    root.save({"w": torch.ones(3), "sched": Holder(content)})
    target = torch.zeros(3)
    with pytest.raises(StateMismatch, match="  sched: not in the state"):
        root.load({"w": target})
    root.save({"w": torch.ones(3)})
    with pytest.raises(StateMismatch, match="  sched: not in the checkpoint"):
        root.load({"w": target, "sched": Holder(content)})
    assert not target.any()


def test_a_value_that_was_asked_for_is_refused(root: Root) -> None:
    root.save({"w": torch.ones(3), "n": 1})
    for asked in ({"only": ["w", "m"]}, {"map": {"m": "k"}}, {"map": lambda name: name.replace("m", "k")}):
        with pytest.raises(StateMismatch, match="  m: not in the checkpoint"):
            root.load({"w": torch.zeros(3), "n": 0, "m": 0}, **asked)


def test_what_either_side_may_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as root:
        root.save({"m": nn.Linear(2, 2), "config": {"t": torch.ones(2), "h": Holder(1), "both": torch.ones(1)}})
        new = torch.full((2,), 5.0)
        target = {"m": nn.Linear(2, 2), "config": {"u": new, "g": Holder("g"), "both": torch.zeros(1)}}
        with pytest.raises(StateMismatch, match="config/u: not in the checkpoint"):
            root.load(target)
        with pytest.raises(StateMismatch, match="config/u: not in the checkpoint"):
            root.load(target, optional="confg/*")
        before = bits(target["m"].weight)  # type: ignore[attr-defined]
        report = root.load(target, optional=("config/*",))
    assert bits(target["m"].weight) != before  # type: ignore[attr-defined]
    assert bool(target["config"]["both"])  # type: ignore[index]
    assert torch.equal(new, torch.full((2,), 5.0))
    assert target["config"]["g"].content == "g"  # type: ignore[index]
    assert set(report.missing) == {"config/u", "config/g"}
    assert set(report.unexpected) == {"config/t", "config/h"}
    assert warnings(caplog) == [
        "step 1: not in the checkpoint, and left as it was: config/g, config/u",
        "step 1: not in the state: config/h, config/t",
    ]


def test_what_both_sides_have_must_fit_though_it_is_optional(root: Root) -> None:
    root.save({"a": torch.ones(3), "b": torch.ones(1)})
    with pytest.raises(StateMismatch, match=r"a: target is float32\[2\]"):
        root.load({"a": torch.zeros(2), "b": torch.zeros(1)}, optional="*")
    with pytest.raises(StateMismatch, match="a: is a plain value in the state; the checkpoint has a tensor"):
        root.load({"a": 1, "b": torch.zeros(1)}, optional="*")


def test_an_optimizer_may_come_without_the_state_of_a_new_layer(root: Root) -> None:
    old, new = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    saved, target = torch.optim.Adam(old.parameters()), torch.optim.Adam(new.parameters())
    old(torch.ones(2)).sum().backward()
    saved.step()
    root.save({"m": old, "o": saved})
    state = {"m": new, "o": target}
    with pytest.raises(StateMismatch, match=r"m/1\.weight: not in the checkpoint"):
        root.load(state, optional="o/m/1.*")
    report = root.load(state, optional=("m/1.*", "o/m/1.*"))
    assert set(report.missing) == {f"{at}1.{name}" for at in ("m/", "o/m/") for name in ("weight", "bias")}
    assert bits(new[0].weight) == bits(old[0].weight)
    assert len(target.state) == 2


# -- advice


def test_a_part_of_a_step_is_told_how_to_load_it(root: Root) -> None:
    root.save({"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2), "optim": Holder({"lr": 1})})
    model = nn.Linear(2, 2)
    with pytest.raises(StateMismatch, match="All that the state has is there: to load that alone, only='model'"):
        root.load({"model": model})
    root.load({"model": model}, only="model")
    with pytest.raises(StateMismatch, match=r"only=\['model', 'ema'\]"):
        root.load({"model": model, "ema": nn.Linear(2, 2)})
    for other in ({"model": nn.Linear(2, 3)}, {"model": model, "x": torch.ones(1)}, {"ema": nn.Linear(2, 2, False)}):
        with pytest.raises(StateMismatch) as caught:
            root.load(other)
        assert "to load that alone" not in str(caught.value)


def test_the_beginning_of_a_name_is_no_path(root: Root) -> None:
    root.save({"model": nn.Sequential(nn.Linear(2, 2))})
    target = {"model": nn.Sequential(nn.Linear(2, 2))}
    with pytest.raises(
        StateMismatch, match=r"model/0: not in the state; it is how 'model/0\.bias' begins.*after a '/'"
    ):
        root.load(target, map={"model/0": "model/1"})
    with pytest.raises(StateMismatch, match=r"give a pattern, only='model/0\*'"):
        root.load(target, only="model/0")
    root.load(target, only="model/0*")
    with pytest.raises(StateMismatch, match=r"  nothing: not in the state\n"):
        root.load(target, only="nothing")


def test_the_function_that_is_advised_does_it(root: Root) -> None:
    root.save({"model": nn.Sequential(nn.Identity(), nn.Linear(2, 2))})
    target = {"model": nn.Sequential(nn.Linear(2, 2))}
    with pytest.raises(StateMismatch) as caught:
        root.load(target, map={"model/0.": "model/1."})
    function = str(caught.value).partition("map=lambda name: ")[2].partition("\n")[0]
    root.load(target, map=eval(f"lambda name: {function}"))


# -- restore


def test_restore_takes_a_part(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with job.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 4):
            job.body()
    again = Job(job.root, seed=7)
    torch.manual_seed(11)
    with again.checkpointer() as ckpt:
        report = ckpt.restore(only="model")
        ckpt.restore_random()
        drawn = torch.rand(3)
        assert ckpt.pending is None
    assert report.step == 4
    assert bits(again.model[0].weight) == bits(job.model[0].weight)
    assert not again.optimizer.state
    torch.manual_seed(11)
    assert torch.equal(drawn, torch.rand(3)), "the generators are left alone"
    assert [line.partition(":")[0] for line in warnings(caplog)] == ["restore(only='model')"]


def test_restore_renames_and_leaves_out(job: Job) -> None:
    with job.checkpointer() as ckpt:
        for _ in ckpt.loop(0, 4):
            job.body()
    again = Job(job.root, seed=7)
    again.state = {"net": again.model, "optim": again.optimizer, "sched": again.scheduler, "new": torch.ones(1)}
    renames = ({"net": "model"}, lambda name: "model" + name[3:] if name.startswith("net") else f"{name}")
    for rename in renames:
        with again.checkpointer() as ckpt:
            with pytest.raises(StateMismatch, match="new: not in the checkpoint"):
                ckpt.restore(map=rename)
            report = ckpt.restore(map=rename, optional="new")
            assert (report.step, report.missing) == (4, ("new",))
        assert again.bits() == job.bits()


def test_a_function_that_renames_everything_leaves_the_generators_alone(job: Job) -> None:
    state = {"a/b".replace("/", "_"): torch.ones(3)}
    with ckptlib.Checkpointer(job.root, {"x": state}, every=4, arena=job.root.parent) as ckpt:
        ckpt.save(1)
        expected = torch.rand(3)
    with ckptlib.Checkpointer(job.root, {"y": state}, every=4, arena=job.root.parent) as ckpt:
        ckpt.restore(map=lambda name: "x" + name[1:])
        ckpt.restore_random()
        assert torch.equal(torch.rand(3), expected)


# -- history, and ranks


def test_a_new_plain_value_does_not_keep_a_load_from_going_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2, 3):
        ckptlib.save(tmp_path, {"model": model}, step)
    state = {"model": model, "note": "new"}
    ckptlib.load(tmp_path, state, step=1)
    ckptlib.save(tmp_path, state, 2)
    assert steps(tmp_path) == [1, 2]


def test_ranks_raise_alike_and_rank_0_tells_of_all(tmp_path: Path) -> None:
    assert_cases_pass("strictness.py", 2, tmp_path, 2)


class Counts(nn.Module):
    """With an extra state that is a plain value."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    @override
    def get_extra_state(self) -> int:
        return self.count

    @override
    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_the_extra_state_of_a_module_is_no_plain_value(root: Root) -> None:
    root.save({"m": Counts(3), "t": torch.ones(1)})
    with pytest.raises(StateMismatch, match="m/_extra_state: not in the state"):
        root.load({"m": nn.Identity(), "t": torch.ones(1)})
    root.save({"m": nn.Identity(), "t": torch.ones(1)})
    with pytest.raises(StateMismatch, match="m/_extra_state: not in the checkpoint"):
        root.load({"m": Counts(3), "t": torch.ones(1)})
