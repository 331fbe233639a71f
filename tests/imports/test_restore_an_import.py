"""A run goes on from a step that another library saved: all of the state comes back, but the random generators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.errors import StateMismatch


def job() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optim.step()
    return model, optim


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.nn.Linear]:
    """A root with an import of a file of torch.save, and the model that was saved."""
    model, optim = job()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "epoch": 3}, tmp_path / "ckpt.pt")
    names = [f"model/{name}" for name, _ in model.named_parameters()]
    ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "run", step=2000, params={"optim": names})
    return tmp_path / "run", model


def test_a_run_goes_on_from_it(saved: tuple[Path, torch.nn.Linear], caplog: pytest.LogCaptureFixture) -> None:
    url, before = saved
    model, optim = job()
    state = {"model": model, "optim": optim, "epoch": 0}
    with ckptlib.Checkpointer(url, state, every=10) as ckpt:
        generators = torch.get_rng_state()
        report = ckpt.restore()
        assert report.step == 2000
        assert report.missing == ("@rng",)
        assert torch.equal(torch.get_rng_state(), generators)
        for _ in ckpt.loop(report.step, 2002):
            assert torch.equal(model.weight, before.weight)
    assert state["epoch"] == 3
    assert "not in the checkpoint, and left as it was: @rng" in caplog.text
    assert [info.step for info in ckptlib.checkpoints(url)] == [2000, 2002]
    with ckptlib.Checkpointer(url, state, every=10) as ckpt:
        assert ckpt.restore().missing == ()  # its own steps have them


def test_who_asks_for_the_generators_is_told(saved: tuple[Path, torch.nn.Linear]) -> None:
    url, _ = saved
    model, optim = job()
    with pytest.raises(StateMismatch, match="@rng: not in the checkpoint"):
        ckptlib.load(url, {"model": model, "optim": optim, "epoch": 0}, random=True)


def test_what_else_is_missing_is_still_refused(saved: tuple[Path, torch.nn.Linear]) -> None:
    url, _ = saved
    model, optim = job()
    other = torch.nn.Linear(2, 2)
    state = {"model": model, "optim": optim, "epoch": 0, "other": other}
    with ckptlib.Checkpointer(url, state, every=10) as ckpt, pytest.raises(StateMismatch) as error:
        ckpt.restore()
    assert "other/weight: not in the checkpoint" in str(error.value)
    assert "@rng" not in str(error.value)
