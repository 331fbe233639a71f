"""What modules do of their own in `load_state_dict()` is done when a load has filled them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.old_torch import fsdp2_on_the_host, marked
from helpers.scaled import Scaled
from onerank import Root, same_modules
from test_made_tensors import WRAPPINGS
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ckptlib import StateMismatch, UnsupportedState
from ckptlib.state.own_loads import own_loads, parameters_there


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Derived(nn.Module):
    """Keeps its weight in a narrower dtype as well, which nobody saves."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), value))
        self.renewals = -1
        self.renew()

    def renew(self) -> None:
        weight = self.weight.detach()
        self.cached = (weight.full_tensor() if isinstance(weight, DTensor) else weight).bfloat16()
        self.renewals += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class ByHook(Derived):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self.register_load_state_dict_post_hook(lambda module, keys: module.renew())


class ByMethod(Derived):
    """Knows what it once was, and converts that."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)
        self.renew()


class ByWhole(Derived):
    """Knows no `strict`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)
        self.renew()


KINDS: dict[str, type[Derived]] = {"hook": ByHook, "method": ByMethod}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_what_is_derived_is_renewed_once(root: Root, kind: str, wrapping: str) -> None:
    """Once a resumed model had the weights of the step, and what it derives from them was that of before."""

    def model(value: float) -> tuple[nn.Module, Derived]:
        inner = KINDS[kind](value)
        return WRAPPINGS[wrapping](nn.Sequential(nn.Linear(3, 3), inner)), inner

    (source, _), (target, inner) = model(3.0), model(0.0)
    parameters = [*target.parameters()]
    before = inner.renewals
    root.move({"m": source}, {"m": target})
    assert torch.equal(inner.cached, torch.full((4, 3), 3.0).bfloat16())
    assert inner.renewals == before + 1
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in (*source.parameters(), *target.parameters())]
    assert all(map(torch.equal, whole[:3], whole[3:]))
    assert all(map(lambda a, b: a is b, parameters, target.parameters()))


@pytest.mark.parametrize("wrapping", ["nothing", "DDP", "compile"])
def test_a_whole_method_counts_in_the_outermost_module(root: Root, wrapping: str) -> None:
    """As in torch. That of a module inside may be for what others have saved."""
    target, inside = ByWhole(), nn.Sequential(ByWhole())
    root.move({"m": WRAPPINGS[wrapping](ByWhole(3.0))}, {"m": WRAPPINGS[wrapping](target)})
    root.move({"m": nn.Sequential(ByWhole(3.0))}, {"m": inside})
    assert [target.renewals, inside[0].renewals] == [1, 0]
    assert target.cached.sum() == inside[0].weight.sum() == 36  # type: ignore[operator, union-attr]


def test_modules_without_memory_and_of_inference_mode(root: Root) -> None:
    kinds = (ByHook, ByMethod)
    with torch.device("meta"):
        bare = nn.Sequential(*(kind() for kind in kinds))
    with torch.inference_mode():
        frozen = nn.Sequential(*(kind() for kind in kinds))
    root.save({"m": nn.Sequential(*(kind(3.0) for kind in kinds))})
    for target in (bare, frozen):
        root.load({"m": target})
        assert [inner.cached.sum().item() for inner in target] == [36, 36]  # type: ignore[operator, union-attr]


def test_those_inside_come_first_and_others_are_left_alone(root: Root) -> None:
    calls: list[str] = []

    class Noting(nn.Module):
        def __init__(self, name: str, *inside: nn.Module, extra: int = 0) -> None:
            super().__init__()
            self.inside, self.extra = nn.ModuleList(inside), extra
            self.weight = nn.Parameter(torch.ones(2))
            self.register_load_state_dict_post_hook(lambda module, keys: calls.append(f"{name} {module.extra}"))

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, extra: int) -> None:
            self.extra = extra

    def model(extra: int) -> Noting:
        return Noting("top", Noting("left", Noting("leaf", extra=extra)), Noting("right", extra=extra), extra=extra)

    root.move({"m": model(7)}, {"m": model(0)}, only="m/inside.0.*")
    assert calls == ["leaf 7", "left 0", "top 0"]
    calls.clear()
    root.load({"m": model(0)})
    assert sorted(calls) == ["leaf 7", "left 0", "right 7", "top 7"]
    assert calls.index("leaf 7") < calls.index("left 0")
    assert calls[-1] == "top 7"


class Given(nn.Module):
    """Gives what goes back through its own method, which calls the hook of what is inside."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.count, self.inside = int(value), ByHook(value)
        self.renewed_with: list[int] = []
        self.register_load_state_dict_post_hook(lambda module, keys: module.renewed_with.append(module.count))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.count = state.pop(f"{prefix}count")
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_is_loaded_as_a_whole_is_not_loaded_again(root: Root) -> None:
    target = nn.Sequential(Given(0.0))
    root.move({"m": nn.Sequential(Given(3.0))}, {"m": target})
    assert target[0].renewed_with == [3]
    assert target[0].inside.renewals == 1  # type: ignore[union-attr]


# -- buffers that a module gives another size as it is loaded


def quantized(num_seen: int = 0) -> nn.Sequential:
    """With a scale for each channel of what it has seen, of which there are so many."""
    options = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    model = nn.Sequential(nn.Linear(3, 4), FakeQuantize(MovingAveragePerChannelMinMaxObserver, **options))
    if num_seen:
        model(torch.randn(num_seen, 3))
    return model


class Book(nn.Module):
    """Has an entry for each code that it has met."""

    def __init__(self, num: int = 0) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(2.0 * num).reshape(num, 2))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.codes = torch.empty_like(state[f"{prefix}codes"])
        super()._load_from_state_dict(state, prefix, *rest)


def book(num: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), Book(num))


class Counted(Book):
    """Tells the number of codes by one buffer, and has it in two and in a module of its own."""

    def __init__(self, num: int = 0) -> None:
        super().__init__(num)
        self.register_buffer("met", torch.arange(num))
        self.inside = nn.Embedding(max(num, 1), 2)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        num = len(state[f"{prefix}codes"])
        self.met = torch.empty(num, dtype=torch.int64)
        self.inside = nn.Embedding(len(state[f"{prefix}inside.weight"]), 2)
        super()._load_from_state_dict(state, prefix, *rest)


def counted(num: int, num_inside: int = 4) -> nn.Sequential:
    made = Counted(num)
    made.inside = nn.Embedding(num_inside, 2)
    return nn.Sequential(made)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (quantized(5), quantized()),
        (quantized(), quantized(5)),
        (book(3), book()),
        (book(), book(3)),
        (book(2), book(3)),
        (counted(3), counted(0)),
    ],
    ids=["quantizer", "fresh quantizer", "own", "fresh own", "smaller own", "several"],
)
@pytest.mark.parametrize("wrapping", ["nothing", "DDP", "compile"])
def test_buffers_have_the_size_that_they_had(root: Root, source: Any, target: Any, wrapping: str) -> None:
    expected, target = copy.deepcopy(target), copy.deepcopy(target)
    expected.load_state_dict(source.state_dict())
    parameters = [*target.parameters()]
    root.move({"m": WRAPPINGS[wrapping](source)}, {"m": WRAPPINGS[wrapping](target)})
    assert all(map(operator.is_, parameters, target.parameters())), "an optimizer has them"
    assert same_modules(target, expected)
    assert same_modules(target, source)


def test_a_copy_is_asked_for_the_size(root: Root) -> None:
    """Where another name does not fit, nothing has changed."""
    root.save({"m": quantized(5), "w": torch.ones(3)})
    target = quantized()
    before = copy.deepcopy(target)
    with pytest.raises(StateMismatch, match=r"state:\n  w: target is float32\[4\], checkpoint has float32\[3\]\nmap="):
        root.load({"m": target, "w": torch.ones(4)})
    assert same_modules(target, before)


def test_nothing_inside_has_changed_either(root: Root) -> None:
    root.save({"m": counted(3, 4)})
    target = counted(0, 5)
    before, inside = copy.deepcopy(target), target[0].inside
    with pytest.raises(StateMismatch, match=r"m/0\.inside\.weight: target is float32\[5, 2\], checkpoint has"):
        root.load({"m": target})
    assert target[0].inside is inside
    assert same_modules(target, before)


class Noted(Book):
    """Keeps the size and the bytes of what it loads in containers of its own, and beside them."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.sizes: list[int] = []
        self.met: dict[str, list[int]] = {"codes": []}
        self.last, self.held = torch.zeros(1), [torch.zeros(1)]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        num = len(state[f"{prefix}codes"])
        self.sizes.append(num)
        self.met["codes"].append(num)
        self.last.fill_(num)
        self.held[0].fill_(num)
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_a_module_keeps_of_its_loads_is_kept_of_loads_alone(root: Root) -> None:
    root.save({"m": Noted(3), "w": torch.ones(3)})
    target = Noted(1)
    with pytest.raises(StateMismatch):
        root.load({"m": target, "w": torch.ones(4)})
    assert (target.sizes, target.met) == ([], {"codes": []})
    assert (target.last.item(), target.held[0].item()) == (0, 0)


class Hooked(Book):
    """Makes its weight anew in a hook, which holds the module."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.weight = nn.Parameter(torch.full((2,), float(num)))
        self.register_load_state_dict_pre_hook(lambda module, state, *rest: self._begin(state["weight"]))

    def _begin(self, saved: torch.Tensor) -> None:
        self.weight = nn.Parameter(torch.zeros_like(saved))


def test_hooks_are_not_run_to_ask_for_the_size(root: Root) -> None:
    """Once a hook put a new parameter into the module before all was read: that was never filled, and trained alone."""
    root.save({"m": Hooked(3)})
    target = Hooked(1)
    weight = target.weight
    root.load({"m": target})
    assert target.weight is weight
    assert weight.tolist() == [3.0, 3.0]
    assert same_modules(target, Hooked(3))


class Strict(Book):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.codes.copy_(state[f"{prefix}codes"])


@pytest.mark.parametrize("target", [Strict(4), torch.jit.script(nn.BatchNorm1d(4))], ids=["own", "script"])
def test_a_module_that_refuses_what_is_loaded_is_a_mismatch(root: Root, target: nn.Module) -> None:
    root.save({"m": Book(3) if isinstance(target, Strict) else nn.BatchNorm1d(3)})
    with pytest.raises(StateMismatch, match=r"m/\w+: target is float32\[4"):
        root.load({"m": target})


def test_a_lazy_module_is_named(root: Root) -> None:
    root.save({"m": nn.Linear(3, 4)})
    with pytest.raises(UnsupportedState, match=r"m/weight: is not initialised yet"):
        root.load({"m": nn.LazyLinear(4)})


def test_a_module_of_another_size_is_refused(root: Root) -> None:
    """BatchNorm has a way of its own to load, which gives no buffer another size."""
    root.save({"m": nn.BatchNorm1d(3)})
    with pytest.raises(StateMismatch, match=r"m/running_mean: target is float32\[4\], checkpoint has float32\[3\]"):
        root.load({"m": nn.BatchNorm1d(4)})


class Kept(Book):
    """Comes out of a file of its own as well, under a key there; torch asks that of the outermost alone."""

    def load_state_dict(self, state: dict[str, Any], *rest: Any, **options: Any) -> Any:
        return super().load_state_dict(state["book"], *rest, **options)


class Observed(MovingAveragePerChannelMinMaxObserver):
    """So does this one, and has torch's own way to give its buffers their size."""

    def load_state_dict(self, state: dict[str, Any], *rest: Any, **options: Any) -> Any:
        return super().load_state_dict(state["observer"], *rest, **options)


def observed(num_seen: int = 0) -> nn.Sequential:
    made = Observed()
    made(torch.randn(2, num_seen))
    return nn.Sequential(made)


@pytest.mark.parametrize(
    ("source", "target"), [(nn.Sequential(Kept(3)), nn.Sequential(Kept())), (observed(5), observed())]
)
def test_of_a_module_inside_torchs_way_counts(root: Root, source: nn.Module, target: nn.Module) -> None:
    """It once was given its state by a `load_state_dict()` of its own that knows another one: a KeyError."""
    root.move({"m": source}, {"m": target})
    assert same_modules(target, source)


def _anew(module: Derived, state: dict[str, Any], name: str) -> None:
    """As models do it that have as many rows as what is loaded."""
    module.weight = nn.Parameter(torch.zeros_like(state[name]))


class AnewByMethod(Derived):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _anew(self, state, f"{prefix}weight")
        super()._load_from_state_dict(state, prefix, *rest)
        self.renew()


class AnewByWhole(Derived):
    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        _anew(self, state, "weight")
        super().load_state_dict(state, strict)
        self.renew()


class AnewByHook(Derived):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self.register_load_state_dict_post_hook(lambda module, keys: module.rebuild())

    def rebuild(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().clone())
        self.renew()


class AnewAndGiven(Given):
    """Part of what it gives is no tensor, so it is loaded as a whole."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _anew(self.inside, state, f"{prefix}inside.weight")
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)  # type: ignore[no-any-return]


ANEW: dict[str, Callable[[float], nn.Module]] = {
    "method": lambda value: nn.Sequential(nn.Linear(3, 3), AnewByMethod(value)),
    "method, FSDP2": lambda value: WRAPPINGS["FSDP2"](nn.Sequential(nn.Linear(3, 3), AnewByMethod(value))),
    "hook": lambda value: nn.Sequential(nn.Linear(3, 3), AnewByHook(value)),
    "hook, DDP": lambda value: WRAPPINGS["DDP"](nn.Sequential(nn.Linear(3, 3), AnewByHook(value))),
    "whole, DDP": lambda value: WRAPPINGS["DDP"](AnewByWhole(value)),
    "given": lambda value: nn.Sequential(AnewAndGiven(value)),
}


@pytest.mark.parametrize("kind", marked(ANEW, "FSDP2", fsdp2_on_the_host))
def test_an_optimizer_trains_the_parameters_of_a_module_that_makes_them_anew(root: Root, kind: str) -> None:
    """A resumed training went on, and changed nothing of the module."""
    source, target = ANEW[kind](3.0), ANEW[kind](0.0)
    parameters = [*target.parameters()]
    for model in (source, target):  # FSDP2 looks at what there is once
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
    root.move({"m": source}, {"m": target})
    target(torch.ones(2, 3)).sum().backward()
    assert all(map(operator.is_, parameters, target.parameters()))
    assert all(p.grad is not None for p in parameters)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in (*source.parameters(), *target.parameters())]
    assert all(map(torch.equal, whole[: len(parameters)], whole[len(parameters) :]))


class AnewRecurrent(nn.LSTM):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight_ih_l0 = nn.Parameter(torch.zeros_like(state[f"{prefix}weight_ih_l0"]))
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_notes_its_parameters_beside_notes_those_that_stay(root: Root) -> None:
    target = AnewRecurrent(3, 4)
    root.move({"m": AnewRecurrent(3, 4)}, {"m": target})
    target(torch.ones(1, 2, 3))[0].sum().backward()
    assert all(p.grad is not None for p in target.parameters())


class Tying(Derived):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self.again = nn.Parameter(self.weight.detach().clone())

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)
        self.again = self.weight


def test_parameters_that_a_module_ties_stay_tied(root: Root) -> None:
    target = Tying()
    root.move({"m": Tying(3.0)}, {"m": target})
    assert target.again is target.weight


@pytest.mark.parametrize("method", [False, True])
def test_a_parameter_that_is_tied_to_one_of_another_module_stays_so(root: Root, method: bool) -> None:
    def make(value: float) -> nn.Sequential:
        made = nn.Sequential(Derived(value), nn.Sequential((Derived, AnewByMethod)[method](value)))
        made[1].register_load_state_dict_post_hook(lambda module, keys: setattr(module[0], "weight", made[0].weight))
        return made

    target = make(0.0)
    weight = target[0].weight
    root.move({"m": make(3.0)}, {"m": target})
    assert target[0].weight is weight
    assert target[1][0].weight is weight


def test_all_parameters_are_asked_for_once_for_all_hooks() -> None:
    """A thousand modules with hooks and ten thousand parameters took seconds."""
    asked: list[None] = []

    class Asked(nn.ModuleList):
        @override
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            asked.append(None)
            return super().parameters(recurse)

    top, run = Asked(nn.Linear(1, 1) for _ in range(3)), list[nn.Module]()
    for layer in top:
        layer.register_load_state_dict_post_hook(lambda module, keys: run.append(module))
    for call in own_loads(top, [name for name, _ in top.named_parameters()], [], parameters_there(top)):
        call()
    assert (len(run), len(asked)) == (3, 1)


def test_a_parameter_that_a_hook_quantizes_stays_quantized(root: Root) -> None:
    def quantize(module: Derived, keys: Any) -> None:
        module.weight = nn.Parameter(Scaled(module.weight.detach().to(torch.int8), torch.ones(1)), False)

    target = Derived()
    target.register_load_state_dict_post_hook(quantize)  # type: ignore[arg-type]
    root.move({"m": Derived(3.0)}, {"m": target})
    assert isinstance(target.weight, Scaled)
    assert torch.equal(target.weight.value(), torch.full_like(target.weight.value(), 3.0))
