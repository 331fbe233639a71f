"""A training state, the ways in which it may change between two saves, and what a save should hold then.

`expected` is told by `state_dict()` of torch alone, and shares nothing with the code that walks a state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

State = dict[str, Any]


class Block(nn.Module):
    """Parameters, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.register_buffer("kept", torch.randn(4))
        self.register_buffer("other", torch.randn(4))
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)


class Lazy(nn.Module):
    """Makes a parameter when it is first called, as some modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def make(self) -> None:
        self.late = nn.Parameter(torch.randn(3))


class Named(nn.Module):
    """Parameters of these names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(2)))


def make_state() -> State:
    torch.manual_seed(0)
    layers = nn.ModuleList([Block(), Block()])
    model = nn.Sequential(Block(), layers, parametrizations.weight_norm(nn.Linear(4, 4)), Lazy(), nn.Linear(0, 3))
    model.extend([checkpoint_wrapper(nn.Linear(4, 4)), nn.Sequential(Named("ab"), Named("c"))])
    optimizer = torch.optim.AdamW([{"params": [*model[:2].parameters()]}, {"params": [*model[2].parameters()]}])
    momentum = torch.optim.SGD([*model[3:].parameters()], momentum=0.5)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    momentum.step()
    return {"m": model, "o": optimizer, "p": momentum}


def expected(state: State) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name; and the representation of plain values by name."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, str] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            values[name] = repr(value)

    module = state["m"]
    for key, value in module.state_dict().items():
        add(f"m/{bare(key)}", value)
    names: dict[int, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        names.setdefault(id(value), f"m/{bare(key)}")
    for path, optimizer in state.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        told = optimizer.state_dict()
        params: dict[int, str] = {}
        for i, (group, with_numbers) in enumerate(zip(optimizer.param_groups, told["param_groups"], strict=True)):
            for j, (p, number) in enumerate(zip(group["params"], with_numbers["params"], strict=True)):
                params[number] = names.get(id(p), f"@{i}.{j}")
            plain = {key: value for key, value in with_numbers.items() if key not in ("params", "param_names")}
            for key in [key for key, value in plain.items() if isinstance(value, torch.Tensor)]:
                add(f"{path}/@group.{i}/{key}", plain.pop(key))
            add(f"{path}/@group.{i}", plain)
        for number, entry in told["state"].items():
            for key, value in entry.items():
                add(f"{path}/{params[number]}/{key}", value)
    return tensors, values


def bare(key: str) -> str:
    """Without what wrappers add."""
    return ".".join(
        part for part in key.split(".") if part not in ("module", "_orig_mod", "_checkpoint_wrapped_module")
    )


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that is to be seen of it."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, tuple(plain.shape), bytes(plain.reshape(-1).view(torch.uint8).tolist())


# Changes


def weight(state: State) -> nn.Parameter:
    found: nn.Parameter = state["m"][0].first.weight
    return found


def entry(state: State) -> dict[str, Any]:
    found: dict[str, Any] = state["o"].state[weight(state)]
    return found


def assign(state: State) -> None:
    given = {key: value.clone() + 1 for key, value in state["m"].state_dict().items()}
    state["m"].load_state_dict(given, assign=True)


def move_submodule(state: State) -> None:
    state["m"][1].append(state["m"][0].first)
    del state["m"][0].first


def parameter_for_buffer(state: State) -> None:
    del state["m"][0].kept
    state["m"][0].kept = nn.Parameter(torch.ones(3))


def swap_layers(state: State) -> None:
    layers = state["m"][1]
    layers[0], layers[1] = layers[1], layers[0]


def swap_persistence(state: State) -> None:
    """As many names as before."""
    found = state["m"][0]._non_persistent_buffers_set
    found.remove("cache")
    found.add("kept")


def replace_dict(name: str) -> Callable[[State], None]:
    def apply(state: State) -> None:
        block = state["m"][0]
        found = dict(getattr(block, name))
        found = {key: nn.Parameter(value.detach() + 1) if key == "weight" else value for key, value in found.items()}
        found.pop("none", None)
        found.pop("kept", None)
        found.pop("second", None)
        object.__setattr__(block, name, found)

    return apply


def replace_all_attributes(state: State) -> None:
    block = state["m"][0]
    block.__dict__ = {**block.__dict__, "_buffers": {"kept": torch.zeros(7)}}


def move_between(state: State) -> None:
    """The last entry of one module's parameters is the first of the next one's: all keys and values, joined, stay."""
    one, other = state["m"][-1]
    moved, rest = one._parameters.popitem(), list(other._parameters.items())
    other._parameters.clear()
    other._parameters.update([moved, *rest])


def another_order(state: State) -> None:
    block = state["m"][0]
    block._parameters, block._buffers = dict(block._parameters), dict(block._buffers)
    block._buffers["kept"] = block._buffers.pop("kept")


def own_state_dict(state: State) -> None:
    block = state["m"][0].first

    def state_dict(destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "renamed"] = block.weight

    block.state_dict = state_dict


def own_save(state: State) -> None:
    block = state["m"][0].first

    def save(destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "bias"] = block.bias

    block._save_to_state_dict = save


class Silent(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight


class Renamed(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["destination"][kwargs["prefix"] + "other"] = self.weight


class WithExtra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"n": 5}


def another_class(cls: type) -> Callable[[State], None]:
    return lambda state: setattr(state["m"][0].first, "__class__", cls)


def without_kept(module: nn.Module, found: dict[str, object], prefix: str, _: object) -> None:
    found.pop(f"{prefix}kept", None)


def post_hook(state: State) -> None:
    state["m"][0]._register_state_dict_hook(without_kept)


def public_hook(state: State) -> None:
    def hook(module: nn.Module, found: dict[str, object], prefix: str, _: object) -> None:
        without_kept(module, found, prefix, _)

    state["m"][0].register_state_dict_post_hook(hook)


def pre_hook(state: State) -> None:
    """Puts another buffer in place at each call."""

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        module._buffers["kept"] = torch.full((4,), 7.0)

    state["m"][0].register_state_dict_pre_hook(hook)


def no_hook_of_wrapper(state: State) -> None:
    """Keys have the wrapper's name then; ours do not."""
    state["m"][-2]._state_dict_hooks.clear()


def replace_state(state: State) -> None:
    """By dicts that look alike, and tensors that do not."""
    optimizer = state["o"]
    optimizer.state = defaultdict(dict, {p: {k: v + 1 for k, v in e.items()} for p, e in optimizer.state.items()})


def replace_entry_by_equal(state: State) -> None:
    state["o"].state[weight(state)] = {key: value.clone() for key, value in entry(state).items()}
    entry(state)["exp_avg"] += 1


def ordered_entry(state: State) -> None:
    found = OrderedDict(entry(state))
    found.move_to_end("step", last=False)
    found["exp_avg"] = found["exp_avg"] + 1
    state["o"].state[weight(state)] = found


def made_by_asking(state: State) -> None:
    """A parameter without state, of which a defaultdict was asked."""
    state["o"].state.pop(weight(state))
    _ = state["o"].state[weight(state)]


def rename_in_place(state: State) -> None:
    """The same tensors in the same order."""
    found = {f"{key}_2": value for key, value in entry(state).items()}
    entry(state).clear()
    entry(state).update(found)


class Adam2(torch.optim.AdamW):
    """Of another name."""


def trade(state: State) -> None:
    found = state["o"].state
    (p, first), (q, second), *rest = found.items()
    found.clear()
    found.update([(q, first), (p, second), *rest])


def move_param(state: State) -> None:
    groups = state["o"].param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def parametrize_it(state: State) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    parametrize.register_parametrization(state["m"][0].second, "weight", Double())


def swap_tensors(state: State) -> None:
    """Another tensor in the same object."""
    block = state["m"][0]
    torch.utils.swap_tensors(block.kept, torch.arange(6).view(2, 3))


def complex_buffer(state: State) -> None:
    state["m"][0].kept.data = torch.ones(4, dtype=torch.complex64).mul(1j).conj()


def another_optimizer(state: State) -> None:
    state["o"] = torch.optim.RMSprop([p for group in state["o"].param_groups for p in group["params"]])


@torch.no_grad()
def transpose(state: State) -> None:
    weight(state).t_()


def _data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: None,
    "memory": lambda s: _data(weight(s), torch.randn(4, 4)),
    "memory of a buffer": lambda s: _data(s["m"][0].kept, torch.randn(4)),
    "a view": lambda s: _data(weight(s), weight(s).data.t()),
    "transposed in place": transpose,
    "fewer rows": lambda s: _data(weight(s), weight(s).data[:2]),
    "no rows": lambda s: _data(weight(s), weight(s).data[:0]),
    "dtype in the same memory": lambda s: _data(s["m"][0].kept, s["m"][0].kept.data.view(torch.int32)),
    "resized": lambda s: s["m"][0].kept.resize_(2),
    "negated": lambda s: _data(s["m"][0].kept, torch._neg_view(s["m"][0].kept.data)),
    "conjugated": complex_buffer,
    "swapped": swap_tensors,
    "double": lambda s: s["m"].double(),
    "bfloat16": lambda s: s["m"].to(torch.bfloat16),
    "frozen": lambda s: weight(s).requires_grad_(False),
    "assigned": assign,
    "a parameter added": lambda s: s["m"][0].register_parameter("new", nn.Parameter(torch.ones(2))),
    "a parameter removed": lambda s: delattr(s["m"][0].first, "bias"),
    "a parameter set to none": lambda s: setattr(s["m"][0].first, "bias", None),
    "none set to a parameter": lambda s: setattr(s["m"][0], "none", nn.Parameter(torch.ones(2))),
    "a parameter replaced": lambda s: setattr(s["m"][0].first, "weight", nn.Parameter(torch.randn(4, 4))),
    "a parameter in the same memory": lambda s: setattr(s["m"][0].first, "weight", nn.Parameter(weight(s).data)),
    "a parameter for a buffer": parameter_for_buffer,
    "a buffer added": lambda s: s["m"][0].register_buffer("new", torch.ones(2)),
    "a buffer replaced": lambda s: setattr(s["m"][0], "kept", torch.randn(4)),
    "a buffer removed": lambda s: delattr(s["m"][0], "kept"),
    "a cache replaced": lambda s: setattr(s["m"][0], "cache", torch.randn(9)),
    "none set to a buffer": lambda s: setattr(s["m"][0], "nothing", torch.ones(2)),
    "a buffer made persistent": lambda s: s["m"][0]._non_persistent_buffers_set.clear(),
    "a buffer no more persistent": lambda s: s["m"][0].register_buffer("kept", torch.ones(2), persistent=False),
    "persistence swapped": swap_persistence,
    "tied": lambda s: setattr(s["m"][0].second, "weight", weight(s)),
    "untied": lambda s: setattr(s["m"][1][1].first, "weight", nn.Parameter(torch.randn(4, 4))),
    "a module appended": lambda s: s["m"][1].append(Block()),
    "a module inserted": lambda s: s["m"][1].insert(0, nn.Linear(2, 2)),
    "a module removed": lambda s: s["m"][1].__delitem__(0),
    "a module replaced": lambda s: s["m"].__setitem__(0, nn.Linear(3, 3)),
    "a module set to none": lambda s: setattr(s["m"][0], "second", None),
    "a module moved": move_submodule,
    "modules swapped": swap_layers,
    "a module twice": lambda s: s["m"].append(s["m"][1]),
    "a lazy parameter": lambda s: s["m"][3].make(),
    "a parametrization": parametrize_it,
    "no parametrization": lambda s: parametrize.remove_parametrizations(s["m"][2], "weight"),
    "activation checkpoints": lambda s: s["m"].__setitem__(0, checkpoint_wrapper(s["m"][0])),
    "parameters replaced": lambda s: replace_dict("_parameters")({"m": [s["m"][0].first]}),
    "buffers replaced": replace_dict("_buffers"),
    "modules replaced": replace_dict("_modules"),
    "attributes replaced": replace_all_attributes,
    "an entry moved to the next module": move_between,
    "another order": another_order,
    "own state_dict": own_state_dict,
    "own _save_to_state_dict": own_save,
    "a class that saves less": another_class(Silent),
    "a class with other names": another_class(Renamed),
    "a class with extra state": another_class(WithExtra),
    "a hook": post_hook,
    "a public hook": public_hook,
    "a hook before": pre_hook,
    "no hook of a wrapper": no_hook_of_wrapper,
    "a number of a group": lambda s: s["o"].param_groups[0].update(lr=0.25),
    "a list of a group": lambda s: s["o"].param_groups[0].update(betas=[0.5, 0.75]),
    "a list that changes in place": lambda s: s["o"].param_groups[0].setdefault("x", []).append(1),
    "a number that becomes a tensor": lambda s: s["o"].param_groups[0].update(lr=torch.tensor(0.5)),
    "capturable": lambda s: [group.update(capturable=True) for group in s["o"].param_groups],
    "fused": lambda s: [group.update(fused=True, foreach=False) for group in s["o"].param_groups],
    "a group added": lambda s: s["o"].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a parameter in another group": move_param,
    "a key added": lambda s: entry(s).update(new=torch.ones(2)),
    "a key with a number": lambda s: entry(s).update(new=3),
    "a key removed": lambda s: entry(s).pop("exp_avg"),
    "a key renamed": lambda s: entry(s).update(exp_new=entry(s).pop("exp_avg")),
    "keys renamed in place": rename_in_place,
    "a tensor replaced": lambda s: entry(s).update(exp_avg=torch.randn(4, 4)),
    "a tensor with other memory": lambda s: _data(entry(s)["exp_avg"], torch.randn(4, 4)),
    "a step that is a number": lambda s: entry(s).update(step=3),
    "a step of its own memory": lambda s: _data(entry(s)["step"], torch.tensor(9.0)),
    "a step of another dtype": lambda s: _data(entry(s)["step"], torch.tensor(9, dtype=torch.int64)),
    "state replaced": replace_state,
    "an entry replaced": replace_entry_by_equal,
    "an entry of another class": ordered_entry,
    "an entry made by asking": made_by_asking,
    "entries traded": trade,
    "an entry gone": lambda s: s["o"].state.pop(weight(s)),
    "no state": lambda s: s["o"].state.clear(),
    "state loaded": lambda s: s["o"].load_state_dict(copy.deepcopy(s["o"].state_dict())),
    "an optimizer of another class": lambda s: setattr(s["o"], "__class__", Adam2),
    "another optimizer": another_optimizer,
    "another optimizer of the same state": lambda s: s.update(o=copy.copy(s["o"])),
    "no optimizer": lambda s: s.pop("o"),
}
"""A few leave a state that holds the same; a test says which."""
