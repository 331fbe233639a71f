"""Names of a module's tensors: the same with and without wrappers, and none that a user chose is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from onerank import Root, opened, same, same_modules
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ckptlib import UnsupportedState
from ckptlib.state.modules import named_state


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with opened(tmp_path_factory.mktemp("root")) as root:
        yield root
    dist.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def checkpointed_inside(module: nn.Module) -> nn.Module:
    module[1] = checkpoint_wrapper(module[1])  # type: ignore[index, operator]
    return module


def compiled_inside(module: nn.Module) -> nn.Module:
    module[0] = compiled(module[0])  # type: ignore[index, operator]
    return module


def scripted(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)  # type: ignore[no-any-return]


def scripted_inside(module: nn.Module) -> nn.Module:
    module[1] = scripted(module[1])  # type: ignore[index, operator]
    return module


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "checkpoint inside": checkpointed_inside,
    "compile inside": compiled_inside,
    "script": scripted,
    "script inside": scripted_inside,
    "DDP(compile)": lambda m: DistributedDataParallel(compiled(m)),
    "compile(DDP)": lambda m: compiled(DistributedDataParallel(m)),
    "DDP(compile(checkpoint inside))": lambda m: DistributedDataParallel(compiled(checkpointed_inside(m))),
    "compile(checkpoint(compile inside))": lambda m: compiled(checkpoint_wrapper(compiled_inside(m))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappers_leave_no_trace_in_names(root: Root, wrapping: str) -> None:
    wrapped = WRAPPINGS[wrapping](net())
    assert [name for name, _ in named_state(wrapped, "m")] == list(net().state_dict())


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_what_one_wrapping_saved_every_other_loads(root: Root, wrapping: str) -> None:
    bare, target = net(), net()
    root.save({"m": WRAPPINGS[wrapping](bare)})
    wrapped = WRAPPINGS[wrapping](target)
    root.load({"m": wrapped})
    again = net()
    root.load({"m": again})
    expected = dict(named_state(wrapped, "m"))
    assert same(expected, dict(again.state_dict()))
    root.move({"m": again}, {"m": WRAPPINGS["DDP(compile(checkpoint inside))"](net())})


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_a_users_own_layer_keeps_its_name(root: Root, name: str) -> None:
    def make() -> nn.Module:
        outer, inner = nn.Module(), nn.Module()
        outer.add_module(name, inner)
        inner.add_module(name, nn.Linear(2, 2))
        outer.add_module("other", nn.Linear(2, 2))
        return outer

    own = [f"{name}.{name}.weight", f"{name}.{name}.bias", "other.weight", "other.bias"]
    wrappings = ["nothing", "DDP", "compile", "DDP(compile)"]
    if name != "_checkpoint_wrapped_module":  # checkpoint_wrapper's own hooks drop a segment of this name
        wrappings.append("checkpoint")
    for wrapping in wrappings:
        model, target = make(), make()
        wrapped = WRAPPINGS[wrapping](model)
        assert [n for n, _ in named_state(wrapped, "m")] == own, wrapping
        root.move({"m": wrapped}, {"m": target})
        assert same_modules(model, target)


class Elementwise(nn.Linear):
    """Compares as tensordict's parameters do: no two are simply equal or not."""

    __hash__ = nn.Linear.__hash__

    def __eq__(self, other: object) -> Any:
        return self.weight == other


@pytest.mark.parametrize("make", [lambda: Elementwise(2, 2), lambda: nn.Sequential(Elementwise(2, 2))])
def test_a_module_may_have_an_equality_of_its_own(root: Root, make: Callable[[], nn.Module]) -> None:
    model, target = make(), make()
    for _ in range(2):
        root.move({"m": model}, {"m": target})
        assert same(dict(model.state_dict()), dict(target.state_dict()))
        nn.init.ones_(next(model.parameters()))


# -- extra state


class Counting(nn.Module):
    """A layer with a state beside its tensors, whatever kind."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra
        self.asked = 0

    def get_extra_state(self) -> object:
        self.asked += 1
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


EXTRAS: dict[str, object] = {
    "value": {"calls": 7, 3: (1.5,)},
    "none": None,
    "tensor": torch.arange(5, dtype=torch.uint8),
    "tree": {"amax": torch.rand(3), "scales": [torch.rand(()), 2.5]},
}


@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("wrapping", ["nothing", "DDP", "compile", "checkpoint inside"])
def test_extra_states_come_back(root: Root, kind: str, wrapping: str) -> None:
    source = nn.Sequential(Counting("first"), Counting(EXTRAS[kind]))
    target = nn.Sequential(Counting(0), Counting(0))
    root.save({"m": WRAPPINGS[wrapping](source)})
    assert source[1].asked == 1
    root.load({"m": WRAPPINGS[wrapping](target)})
    inner = target[1] if isinstance(target[1], Counting) else target[1]._checkpoint_wrapped_module
    assert isinstance(inner, Counting)
    assert same(inner.extra, EXTRAS[kind])
    assert target[0].extra == "first"


def test_a_module_under_two_names_is_one(root: Root) -> None:
    def make(extra: object) -> nn.Module:
        layer = Counting(extra)
        return nn.ModuleDict({"a": layer, "b": layer})

    source, target = make(5), make(0)
    with torch.no_grad():
        source["a"].weight.fill_(3)  # type: ignore[index]
    root.move({"m": source}, {"m": target})
    assert target["b"].extra == 5  # type: ignore[index]
    assert same_modules(source, target)


# -- hooks


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.arange(6.0))


def test_copies_made_by_a_hook_are_refused_and_views_are_not(tmp_path: Path) -> None:
    def add_copy(module: nn.Module, state: dict[str, object], prefix: str, local: object) -> None:
        state[f"{prefix}doubled"] = module.fused.detach() * 2  # type: ignore[operator]

    def split(module: nn.Module, state: dict[str, object], prefix: str, local: object) -> None:
        del state[f"{prefix}fused"]
        state[f"{prefix}q"], state[f"{prefix}k"] = module.fused.detach().chunk(2)  # type: ignore[operator]

    copying, source, target = Doubling(), Doubling(), Doubling()
    copying.register_state_dict_post_hook(add_copy)
    with pytest.raises(
        UnsupportedState, match=r"m: state_dict\(\) returns a copy of 'doubled'.*and no load_state_dict"
    ):
        list(named_state(copying, "m"))
    frozen = nn.Sequential(copying.requires_grad_(False), nn.Linear(2, 2))
    with pytest.raises(UnsupportedState, match=r"what is trained alone, .*: \{name: p for .* if p.requires_grad\}"):
        list(named_state(frozen, "m"))
    for module in (source, target):
        module.register_state_dict_post_hook(split)
    with torch.no_grad():
        target.fused.zero_()
    with opened(tmp_path) as root:
        root.move({"m": source}, {"m": target})
    assert torch.equal(target.fused, torch.arange(6.0))


def test_a_copy_of_what_is_in_a_script_is_refused(root: Root) -> None:
    model = scripted_inside(net())
    model.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"1.1.copy": torch.ones(1)}))
    with pytest.raises(UnsupportedState, match=r"m: state_dict\(\) returns a copy of '1.1.copy'"):
        root.save({"m": model})


def test_state_dict_is_called_once(root: Root) -> None:
    calls = []
    model = net()
    model.register_state_dict_pre_hook(lambda *args: calls.append(1))
    root.save({"m": model})
    assert calls == [1]
