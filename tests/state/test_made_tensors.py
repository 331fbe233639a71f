"""What `state_dict()` gives beside a module's own tensors comes back through `load_state_dict()`, or is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.old_torch import fsdp2_on_the_host, marked
from onerank import Root, bits, same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import ckptlib
from ckptlib import StateMismatch, UnsupportedState
from ckptlib.state import collector

PARTS = ("q", "k", "v")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps_of(root: Root) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(root.url)]


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.redistribute(tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
    return tensor


class Fused(nn.Module):
    """As models have it whose checkpoints are to look like those of others: rows of q, k and v take turns in memory."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.arange(36.0).view(12, 3) + value)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
        fused = everywhere(state.pop(f"{prefix}qkv"))
        for i, part in enumerate(PARTS):
            one = fused.view(4, 3, 3).narrow(1, i, 1)  # no [:, i], which the oldest torch does to no DTensor
            state[f"{prefix}{part}"] = one.squeeze(1).clone()

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        if all(f"{prefix}{part}" in state for part in PARTS):
            parts = [everywhere(state.pop(f"{prefix}{part}")) for part in PARTS]
            state[f"{prefix}qkv"] = torch.stack(parts, 1).view(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.qkv.T


def net(value: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Fused(value), nn.Linear(12, 2)))


def full(tensor: torch.Tensor) -> bytes:
    return bits(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def whole(module: nn.Module) -> list[bytes]:
    return [full(parameter) for parameter in module.parameters()]


def moments(optim: torch.optim.Optimizer) -> list[bytes]:
    return [full(state["exp_avg"]) for state in optim.state.values()]


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module[1])  # type: ignore[index]
    return fully_shard(module)


def checkpointed(module: nn.Module) -> nn.Module:
    module[1] = checkpoint_wrapper(module[1])  # type: ignore[index, operator]
    return module


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "FSDP2": sharded,
    "DDP": DistributedDataParallel,
    "compile": lambda m: torch.compile(m, backend="eager"),  # type: ignore[return-value]
    "checkpoint inside": checkpointed,
}


@pytest.mark.parametrize("wrapping", marked(WRAPPINGS, "FSDP2", fsdp2_on_the_host))
def test_they_come_back(root: Root, wrapping: str) -> None:
    """Again and again, with the optimizer, and into a model that is wrapped otherwise."""
    source, target, plain = (WRAPPINGS[w](net(v)) for w, v in ((wrapping, 1.0), (wrapping, 50.0), ("nothing", 70.0)))
    optim = torch.optim.AdamW(source.named_parameters(), lr=0.1)
    for _ in range(3):
        source(torch.ones(2, 3)).square().sum().backward()
        optim.step()
        root.save({"m": source, "o": optim})
        assert whole(source) != whole(target)
        again = torch.optim.AdamW(target.named_parameters(), lr=0.5)
        root.load({"m": target, "o": again})
        assert whole(source) == whole(target)
        assert moments(optim) == moments(again)
        root.load({"m": plain}, only="m")
        assert whole(source) == whole(plain)
        with ckptlib.open(root.url) as found:
            names = found.keys()
        assert [n for n in names if n.startswith("m/1.0.")] == [f"m/1.0.{part}" for part in sorted(PARTS)]


def test_a_part_of_them(root: Root) -> None:
    source, target = Fused(), Fused(100.0)
    root.move({"m": source}, {"m": target}, only="m/k")
    rows = torch.arange(12) % 3 == 1
    assert torch.equal(target.qkv[rows], source.qkv[rows])
    assert torch.equal(target.qkv[~rows], source.qkv[~rows] + 100)


def test_a_checkpointer_restores_them(tmp_path: Path) -> None:
    model = net(3.0)
    with ckptlib.Checkpointer(tmp_path, {"m": model}, every=1) as ckpt:
        ckpt.restore()
        ckpt.after_step(1)
    target = net(9.0)
    with ckptlib.Checkpointer(tmp_path, {"m": target}, every=1) as ckpt:
        assert ckpt.restore().step == 1
    assert whole(target) == whole(model)


def test_nobody_keeps_them(root: Root) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    model = Fused()
    model.register_state_dict_post_hook(
        lambda module, state, prefix, local: made.extend(weakref.ref(state[f"{prefix}{part}"]) for part in PARTS)
    )
    for _ in range(2):
        root.save({"m": model})
        gc.collect()
        assert not [ref for ref in made if ref() is not None]


def test_a_tie_to_a_parameter_of_another_module_stays(tmp_path: Path) -> None:
    def make(value: float) -> nn.Sequential:
        made = nn.Sequential(nn.Linear(3, 12, bias=False), Fused(value))
        made[0].weight.data.copy_(made[1].qkv)
        made[1].register_load_state_dict_post_hook(lambda module, keys: setattr(module, "qkv", made[0].weight))
        return made

    source, target = make(3.0), make(0.0)
    weight = target[0].weight
    ckptlib.save(tmp_path, {"m": source}, 1)
    ckptlib.load(tmp_path, {"m": target})
    assert target[0].weight is weight
    assert target[1].qkv is weight
    assert whole(target) == whole(source)[:1]


class Wrong(Fused):
    """Takes q for k."""

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        parts = [state.pop(f"{prefix}{part}") for part in PARTS]
        state[f"{prefix}qkv"] = torch.stack([parts[1], parts[0], parts[2]], 1).view(12, 3)


def test_hooks_that_do_not_turn_back_what_they_make(root: Root) -> None:
    with pytest.raises(StateMismatch, match=r"q: Wrong.load_state_dict\(\) was given"):
        root.move({"m": Wrong()}, {"m": Wrong(5.0)})


class OneWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.register_state_dict_post_hook(self.double)

    @staticmethod
    def double(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
        state[f"{prefix}doubled"] = everywhere(state[f"{prefix}weight"]) * 2


@pytest.mark.parametrize("shard", [False, True])
def test_without_a_way_back_nothing_is_saved(root: Root, shard: bool) -> None:
    """A DTensor that a hook made was once taken for the module's own, and a load into it was lost."""
    module, steps = fully_shard(OneWay()) if shard else OneWay(), steps_of(root)
    with pytest.raises(UnsupportedState, match=r"m: state_dict\(\) returns a copy of 'doubled'"):
        root.save({"m": module})
    assert steps_of(root) == steps


def test_a_hook_that_comes_later(root: Root) -> None:
    def double(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
        state[f"{prefix}doubled"] = state[f"{prefix}weight"] * 2

    def copy(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().clone()

    module, target = nn.Linear(3, 3), nn.Linear(3, 3)
    root.move({"m": module}, {"m": target})
    module.register_state_dict_post_hook(double)
    with pytest.raises(UnsupportedState, match="doubled"):
        root.save({"m": module})
    target.register_state_dict_post_hook(copy)
    with pytest.raises(UnsupportedState, match="weight"):
        root.load({"m": target})


def test_a_hook_that_comes_later_and_keeps_all_names(root: Root) -> None:
    """Once its copies were taken for the module's own, and committed in a step that the same program cannot load."""

    def copy(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach().clone()

    module = nn.Linear(3, 3)
    for _ in range(2):
        root.save({"m": module})
    steps = steps_of(root)
    hook = module.register_state_dict_post_hook(copy)
    with pytest.raises(UnsupportedState, match=r"m: state_dict\(\) returns a copy of 'weight'"):
        root.save({"m": module})
    assert steps_of(root) == steps
    hook.remove()
    root.save({"m": module})


def test_a_module_without_memory(root: Root) -> None:
    with torch.device("meta"):
        target = Fused()
    with pytest.raises(StateMismatch, match=r"m/q: hooks of state_dict\(\) make it.*to_empty"):
        root.move({"m": Fused(2.0)}, {"m": target})
    target.to_empty(device="cpu")
    root.load({"m": target})
    assert whole(target) == whole(Fused(2.0))


class Gathering(nn.Module):
    """As metrics are: what they gather, and how often, is in their `state_dict()` and in no buffer."""

    def __init__(self, gathered: list[torch.Tensor], calls: int | None, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), value))
        self.gathered, self.calls = gathered, calls

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}gathered"], destination[f"{prefix}calls"] = [*self.gathered], self.calls

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.gathered, self.calls = state.pop(f"{prefix}gathered"), state.pop(f"{prefix}calls")
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Forgetful(Gathering):
    """Has no way to load what it gives."""

    _load_from_state_dict = nn.Module._load_from_state_dict  # type: ignore[assignment]


GATHERED: list[list[torch.Tensor]] = [[], [torch.arange(4.0)], [torch.ones(2, 2), torch.zeros(0), torch.tensor(5)]]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_what_is_no_tensor_comes_back(root: Root, wrapping: str) -> None:
    """Once a step with a list in a module was committed, and could not be loaded, not even into the same module."""

    def model(gathered: list[torch.Tensor], calls: int | None, value: float) -> tuple[nn.Module, Gathering]:
        inner = Gathering([tensor.clone() for tensor in gathered], calls, value)
        return WRAPPINGS[wrapping](nn.Sequential(nn.Linear(3, 3), nn.Sequential(inner, nn.Linear(4, 2)))), inner

    for before, now in zip(GATHERED, [*GATHERED[1:], GATHERED[0]], strict=True):
        source, given = model(now, 7, 3.0)
        target, taken = model(before, None, 0.0)
        root.move({"m": source}, {"m": target})
        assert same(taken.gathered, now)
        assert taken.calls == 7
        assert whole(target) == whole(source)
        given.calls = None
        root.load({"m": source})
        assert same(given.gathered, now)
        assert given.calls == 7


def test_a_part_of_what_is_no_tensor(root: Root) -> None:
    target = Gathering([], 0)
    root.move({"m": Gathering([torch.ones(2)], 7, 3.0)}, {"m": target}, only="m/calls")
    assert (target.gathered, target.calls, target.weight.sum()) == ([], 7, 0)
    root.load({"m": target}, only=["m/gathered", "m/weight"])
    assert same(target.gathered, [torch.ones(2)])
    assert target.weight.sum() == 36


@pytest.mark.parametrize("calls", [7, None])
def test_what_nothing_would_take_back_is_not_saved(root: Root, calls: int | None) -> None:
    module, steps = nn.Sequential(Forgetful([], calls)), steps_of(root)
    with pytest.raises(UnsupportedState, match=r"m/0.gathered: .* a list, .* take it back"):
        root.save({"m": module})
    assert steps_of(root) == steps


def test_steps_that_lack_it_or_have_more_of_it_load_as_before(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, unable, astray = Gathering([], 4), Forgetful([], 4), nn.Sequential(Forgetful([], 4))
    astray.register_load_state_dict_pre_hook(lambda *given: None)
    bare, source = Gathering([], 7, 3.0), Gathering([], 7, 3.0)
    monkeypatch.setattr(bare, "_save_to_state_dict", partial(nn.Module._save_to_state_dict, bare))
    assert {*root.move({"m": bare}, {"m": target}).missing} == {"m/gathered", "m/calls"}
    assert {*root.move({"m": source}, {"m": unable}, optional="m/gathered").unexpected} == {"m/gathered", "m/calls"}
    root.move({"m": nn.Sequential(source)}, {"m": astray})
    assert [target.calls, unable.calls, astray[0].calls] == [4, 4, 4]
    assert {module.weight.sum().item() for module in (target, unable, astray[0])} == {36}  # type: ignore[union-attr, operator]
    assert "0.calls: nothing of Sequential takes what was loaded" in caplog.text


def test_a_metric_that_gathers_comes_back(root: Root) -> None:
    metrics = pytest.importorskip("torchmetrics")

    def model() -> nn.ModuleDict:
        metric = metrics.CatMetric()
        metric.persistent(True)
        return nn.ModuleDict({"layer": nn.Linear(2, 2), "metric": metric})

    source, target = model(), model()
    root.move({"m": source}, {"m": target})
    for value in (1.0, 2.0):
        source["metric"].update(torch.full((2,), value))
    root.move({"m": source}, {"m": target})
    assert target["metric"].compute().tolist() == [1, 1, 2, 2]


class Holder:
    """An object of the job's own, which asks its module at each save."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state)


@pytest.mark.parametrize("kind", ["hooks", "objects on a device"])
def test_dtensors_that_nobody_keeps_are_not_taken_for_one_another(
    root: Root, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each dies when its shard is noted, and the next may lie where it lay: once that was a tie, and was not saved."""

    def stack(value: float) -> nn.Module:
        return fully_shard(nn.Sequential(*(Fused(value + 100 * i) for i in range(8))))

    wrap: Callable[[nn.Module], object] = (lambda m: m) if kind == "hooks" else Holder
    if kind != "hooks":  # what comes from an object is kept by nobody where it lies on a device
        monkeypatch.setattr(collector, "accelerator", SimpleNamespace(device_of=lambda tensor: torch.device("cuda", 0)))
    source, target = ({"model": stack(v), "ema": stack(v + 5000)} for v in (0.0, 70.0))
    root.move({name: wrap(m) for name, m in source.items()}, {name: wrap(m) for name, m in target.items()})
    assert root.saved()[1].aliases == {}
    assert {name: whole(m) for name, m in target.items()} == {name: whole(m) for name, m in source.items()}
