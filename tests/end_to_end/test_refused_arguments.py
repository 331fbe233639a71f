"""What a Checkpointer cannot do is told before it does anything, in a sentence that says what to write instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onerank import Root

import ckptlib


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"every": None}, TypeError, r"every=None: expected a number of steps, .* or Overhead\(at_most=0.035\)"),
        ({"every": timedelta()}, ValueError, r"expected a time above 0, such as Minutes\(10\)"),
        (
            {"every": ckptlib.Overhead(0.1) | ckptlib.Overhead(0.2)},
            ValueError,
            r"2 budgets \(10.0% and 20.0%\).*give one Overhead",
        ),
        ({"preempted": "http://metadata"}, TypeError, r"preempted='http://metadata': expected a function"),
        ({"save_deadline": timedelta(seconds=-1)}, ValueError, r"save_deadline=.*such as timedelta\(hours=1\)"),
        ({"save_deadline": 60}, TypeError, r"save_deadline=60: expected timedelta, such as timedelta\(hours=1\)"),
        ({"save_deadline": timedelta.max}, ValueError, r"save_deadline=.*: expected at most timedelta\(days=11574\)"),
        ({"timeout": timedelta.max}, ValueError, r"^timeout=.*: expected at most timedelta\(days=11574\)"),
        ({"peers": ckptlib.Peers(timeout=timedelta.max)}, ValueError, r"^Peers.timeout=.*: expected at most timedelta"),
        ({"tags": {"seed": 1}}, TypeError, r"tags=\{'seed': 1\}: expected a dict of texts by name.* str\(seed\)"),
        ({"tags": {1: "seed"}}, TypeError, r"tags=\{1: 'seed'\}: expected a dict of texts by name"),
        ({"tags": "seed"}, TypeError, r"tags='seed': expected a dict of texts by name"),
        ({"on_event": "print"}, TypeError, r"on_event='print': expected a function of an event"),
        ({"export": "out"}, TypeError, r"export='out': expected Export, such as Export\('out/\{step\}'"),
        ({"local": "~/l"}, ValueError, r"local='~/l' would be below a directory called ~.*pass '/.*l', or"),
        ({"arena": "~/a"}, ValueError, r"arena='~/a' would be below a directory called ~.*pass '/.*a', or"),
        ({"local": ""}, ValueError, r"local='' is empty.*is a variable in it not set"),
        ({"local": "s3://b/l"}, ValueError, r"local='s3://b/l' is a URL.*give its path, or './s3://b/l' if"),
        ({"local": Path("file:///l")}, ValueError, r"local='file:/l' is a URL"),
        ({"arena": ""}, ValueError, r"arena='' is empty"),
        ({"local": "l", "drain_bandwidth": "50MB"}, TypeError, r"drain_bandwidth='50MB': expected bytes per second"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_at_construction(tmp_path: Path, wrong: dict[str, Any], kind: type[Exception], said: str) -> None:
    root = tmp_path / "root"
    with pytest.raises(kind, match=said):
        ckptlib.Checkpointer(root, {"w": torch.zeros(3)}, **{"every": 1, "arena": tmp_path, **wrong})
    assert not root.exists(), "nothing is opened"


@pytest.mark.parametrize("above", ["", "all", "all/0"])
def test_what_an_optimizers_state_dict_gave(tmp_path: Path, root: Root, above: str) -> None:
    """As `torch.save` is given it. Saved again and again it would stay as it was made, without moments."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    inner = {"model": model.state_dict(), "optim": optim.state_dict()}
    state: dict[str, dict[str, object]] = {"": inner, "all": {"all": inner}, "all/0": {"all": [inner]}}
    name = f"{above}/optim".strip("/")
    with pytest.raises(ckptlib.UnsupportedState, match=rf"^{name} is what .* Give the objects themselves, such as"):
        ckptlib.Checkpointer(tmp_path / "root", state[above], every=1)
    assert not (tmp_path / "root").exists(), "nothing is opened"
    root.save(inner)  # a state of that moment is what it is


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau", "ChainedScheduler", "GradScaler"])
def test_what_the_state_dict_of_a_scheduler_or_a_scaler_gave(tmp_path: Path, root: Root, kind: str) -> None:
    """Saved again and again, it would begin each restart with the first learning rate, or the first scale."""
    optim = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    schedulers = torch.optim.lr_scheduler
    made = {
        "StepLR": lambda: schedulers.StepLR(optim, 2),
        "ReduceLROnPlateau": lambda: schedulers.ReduceLROnPlateau(optim),
        "ChainedScheduler": lambda: schedulers.ChainedScheduler([schedulers.StepLR(optim, 2)]),
        "GradScaler": lambda: torch.amp.GradScaler("cpu"),
    }[kind]()
    whose = "a gradient scaler" if kind == "GradScaler" else "a scheduler"
    with pytest.raises(ckptlib.UnsupportedState, match=rf"^x is what the state_dict\(\) of {whose} gave: a copy"):
        ckptlib.Checkpointer(tmp_path / "root", {"x": made.state_dict()}, every=1)
    assert not (tmp_path / "root").exists(), "nothing is opened"
    root.save({"x": made.state_dict()})  # a state of that moment is what it is
    with ckptlib.Checkpointer(tmp_path / "run", {"x": made}, every=1, arena=tmp_path):
        pass


def test_what_has_no_more_than_the_keys_of_one(tmp_path: Path) -> None:
    state = {"run": {"state": np.zeros(3), "param_groups": []}, "more": {"state": torch.zeros(3), "param_groups": []}}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1, arena=tmp_path) as ckpt:
        ckpt.restore()
        ckpt.save(1)


@pytest.mark.parametrize("kind", [dict, list])
def test_a_state_that_contains_itself(tmp_path: Path, kind: type) -> None:
    inner: Any = kind()
    for key in "ab":
        inner.append(inner) if kind is list else inner.update({key: inner})
    with pytest.raises(ckptlib.UnsupportedState, match="nested deeper than"):
        ckptlib.Checkpointer(tmp_path / "root", {"run": inner}, every=1)


@pytest.mark.parametrize("url", [None, b"run", {"w": torch.zeros(3)}, 7], ids=lambda url: type(url).__name__)
def test_a_url_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    """As that of a variable which is not set: a directory called None would take all checkpoints."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.zeros(3)}
    for call in (
        lambda: ckptlib.Checkpointer(url, state, every=1),
        lambda: ckptlib.save(url, state, step=1),
        lambda: ckptlib.save_async(url, state, step=1),
        lambda: ckptlib.load(url, state),
        lambda: ckptlib.open(url),
        lambda: ckptlib.read(url),
        lambda: [*ckptlib.checkpoints(url)],
    ):
        with pytest.raises(TypeError, match=rf"a path, or a URL such as 's3://bucket/run7'; got {type(url).__name__}"):
            call()
    assert not [*tmp_path.iterdir()]


def test_a_state_that_is_no_dict(tmp_path: Path) -> None:
    """Before anything is opened: a Checkpointer trained up to its first save before it said so."""
    model, root = torch.nn.Linear(2, 2), tmp_path / "root"
    for wrong in (model, [model], "model"):
        for call in (
            lambda wrong=wrong: ckptlib.Checkpointer(root, wrong, every=1),
            lambda wrong=wrong: ckptlib.load(root, wrong),
        ):
            with pytest.raises(TypeError, match=f"the state must be a dict of .*; got {type(wrong).__name__}"):
                call()
    with pytest.raises(ValueError, match="'@rng' is reserved for ckptlib"):
        ckptlib.Checkpointer(root, {"@rng": model}, every=1)
    assert not root.exists()


def test_what_a_root_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for blake3 then would take the root for safe against forgery."""

    def heard(**asked: Any) -> list[str]:
        caplog.clear()
        ckptlib.Checkpointer(tmp_path / "root", {"w": torch.zeros(3)}, every=1, arena=tmp_path, **asked).close()
        return [record.getMessage().partition(": ")[0] for record in caplog.records if record.levelname == "WARNING"]

    hours = [timedelta(hours=number) for number in range(4)]
    assert heard(save_deadline=hours[2]) == heard(save_deadline=hours[2]) == heard() == []
    assert heard(algorithm="blake3", save_deadline=hours[3]) == [
        "algorithm=blake3 has no effect",
        "save_deadline=3:00:00 has no effect",
    ]


@pytest.mark.parametrize("peers", [None, ckptlib.Peers(copies=0)], ids=["", "peers"])
@pytest.mark.parametrize("wrong", ["does not exist", "is no directory"])
def test_an_arena_that_takes_no_slots(tmp_path: Path, wrong: str, peers: ckptlib.Peers | None) -> None:
    """The training would go on without a snapshot, until three saves had failed."""
    arena = tmp_path / "arena"
    if wrong == "is no directory":
        arena.touch()
    with pytest.raises(ckptlib.NoRoom, match=rf"arena='{arena}' {wrong} on .*make the directory on every host"):
        ckptlib.Checkpointer(tmp_path / "root", {"w": torch.zeros(3)}, every=1, arena=arena, peers=peers)


def test_memory_of_this_process() -> None:
    """The writer would see none of it: it would look there for the root, and fail."""
    state = {"w": torch.zeros(3)}
    for save in (
        lambda: ckptlib.Checkpointer("memory://run", state, every=1),
        lambda: ckptlib.save("memory://run", state, step=1),
        lambda: ckptlib.save_async("memory://run", state, step=1),
    ):
        with pytest.raises(ckptlib.SaveFailed, match=r"memory://run is memory of this process.* such as /dev/shm/run7"):
            save()
    assert [*ckptlib.checkpoints("memory://run")] == []


def test_metrics_that_are_none_and_steps_that_are_none(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1, arena=tmp_path) as ckpt:
        for wrong in (True, 1.0):
            with pytest.raises((TypeError, ckptlib.CheckpointNotFound), match=r"expected a whole number|no step"):
                ckpt.restore(step=wrong)  # type: ignore[arg-type]
        ckpt.restore()
        with pytest.raises(ValueError, match="a step is between 0 and 999999999999, got -1"):
            ckpt.save(-1)
        for metrics in (["val_loss"], {3: 1.0}, 0.5):
            for tell in (ckpt.log, lambda told: ckpt.after_step(1, metrics=told), lambda told: ckpt.save(1, told)):
                with pytest.raises(TypeError, match=r"metrics=.*expected a dict by name, such as \{'val_loss': loss"):
                    tell(metrics)  # type: ignore[arg-type]
        for tell in (ckpt.log, lambda told: ckpt.save(1, told)):
            with pytest.raises(ckptlib.UnsupportedState, match=r"metrics\[val_loss\].*of a tensor, tensor.item\(\)"):
                tell({"val_loss": torch.zeros(())})
        ckpt.after_step(1, metrics={"val_loss": 0.5})
        ckpt.save(1)
        with pytest.raises(TypeError, match=r"close\(timeout=5\): expected timedelta"):
            ckpt.close(5)  # type: ignore[arg-type]
    (info,) = ckptlib.checkpoints(tmp_path / "root")
    assert info.metrics == {"val_loss": 0.5}


@pytest.mark.parametrize("number", [torch.tensor, np.int64], ids=["tensor", "numpy"])
def test_steps_that_are_counted_elsewhere(tmp_path: Path, number: Callable[[int], Any]) -> None:
    """By a scheduler, or in a buffer: `save` takes them as `after_step` does, and refuses the same ones."""
    with ckptlib.Checkpointer(tmp_path / "root", {"w": torch.zeros(3)}, every=10, arena=tmp_path) as ckpt:
        ckpt.after_step(number(1))
        pending = ckpt.save(number(2))
        pending.wait_committed(60)
        for wrong in (2.0, np.bool_(True), torch.tensor(True)):
            with pytest.raises(TypeError, match="expected a whole number"):
                ckpt.save(wrong)
        assert ckpt.save(2) is pending
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [2]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy(tmp_path: Path, duplicate: Callable[[object], object]) -> None:
    """As by a trainer that is copied, or an argument of a process that is spawned."""
    with ckptlib.Checkpointer(tmp_path / "root", {"w": torch.zeros(3)}, every=1, arena=tmp_path) as ckpt:
        with pytest.raises(TypeError, match=r"a Checkpointer cannot be copied, pickled .* make one in each"):
            duplicate({"trainer": [ckpt]} if duplicate is not copy.copy else ckpt)
        ckpt.after_step(1)


@pytest.mark.slow
def test_a_deadline_that_is_shorter_than_a_save(tmp_path: Path) -> None:
    """The store is well, and slow: what helps is told with the failure."""
    url = f"latency+file://{tmp_path}/root?latency=0.01&bandwidth=1e5"
    state = {"w": torch.zeros(1_000_000)}
    told: list[str] = []

    def note(event: object) -> None:
        if isinstance(event, ckptlib.events.Failed):
            told.append(str(event.error))

    deadline = timedelta(seconds=6)  # a writer that says nothing for half as long again counts as one that hangs
    with (
        pytest.raises(ckptlib.SaveFailed, match="needs a longer save_deadline: a root keeps the one"),
        ckptlib.Checkpointer(url, state, every=1, arena=tmp_path, save_deadline=deadline, on_event=note) as ckpt,
    ):
        ckpt.save(1).wait_committed(150)
    assert "a new root with a longer one" in told[0]
