"""What a load does to its targets, and what it says when they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from onerank import Holder, Root, bits, same, same_modules
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import ckptlib
from ckptlib import CheckpointNotFound, StateMismatch, UnsupportedState
from ckptlib.devices import accelerator
from ckptlib.loading import match
from ckptlib.loading.load_plan import LoadPlan
from ckptlib.reading.saved_names import SavedNames
from ckptlib.state.leaf import home_of


class Tied(nn.Module):
    def __init__(self, tied: bool, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, device=device)
        self.head = nn.Linear(4, 6, bias=False, device=device)
        self.register_buffer("scale", torch.ones(2, device=device))
        if tied:
            self.head.weight = self.embed.weight


# -- ties


@pytest.mark.parametrize("from_tied", [True, False])
@pytest.mark.parametrize("into_tied", [True, False])
def test_tied_weights_go_into_tied_and_untied_targets(root: Root, from_tied: bool, into_tied: bool) -> None:
    source, target = Tied(from_tied), Tied(into_tied)
    with torch.no_grad():
        source.head.weight.copy_(source.embed.weight)
    root.move({"m": source}, {"m": target})
    assert same_modules(source, target)
    assert (target.head.weight is target.embed.weight) == into_tied
    assert root.nbytes_of("m/embed.weight") == 6 * 4 * 4
    assert root.nbytes_of("m/head.weight") == (0 if from_tied else 6 * 4 * 4)


def test_two_values_do_not_go_into_one_tensor(root: Root) -> None:
    root.save({"m": Tied(False)})
    with pytest.raises(StateMismatch, match=r"m/head.weight: is tied to what m/embed.weight fills"):
        root.load({"m": Tied(True)})


def test_a_tie_may_be_across_modules_and_optimizers_know_it(root: Root) -> None:
    def make() -> dict[str, Any]:
        model = Tied(True)
        return {"m": model, "again": {"w": model.embed.weight}, "o": torch.optim.Adam(model.parameters(), lr=0.1)}

    source, target = make(), make()
    source["m"].head(source["m"].embed(torch.tensor([1, 2]))).sum().backward()
    source["o"].step()
    root.move(source, target)
    assert same_modules(source["m"], target["m"])
    assert same(list(target["o"].state.values()), list(source["o"].state.values()))


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_parameters_that_shared_a_tensor_of_state_are_tied_now(root: Root, names: str) -> None:
    def saved(moment: float) -> dict[str, Any]:
        params = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
        optimizer, step = torch.optim.SGD(params.items()), torch.tensor(3.0)
        for param, value in zip(params.values(), (0.5, moment), strict=True):
            optimizer.state[param] = {"step": step, "m": torch.full((2,), value)}
        return {**params, "o": optimizer}

    param = nn.Parameter(torch.zeros(2))
    target = {**dict.fromkeys(names, param), "o": torch.optim.SGD([param])}
    root.move(saved(0.5), target)
    assert same(target["o"].state[param], {"step": torch.tensor(3.0), "m": torch.full((2,), 0.5)})
    with pytest.raises(StateMismatch, match=rf"o/{names[1]}: is tied to {names[0]}, but their optimizer state differs"):
        root.move(saved(0.25), target)


# -- modules without memory


@pytest.mark.parametrize("tied", [True, False])
def test_meta_modules_get_their_memory_from_the_load(root: Root, tied: bool) -> None:
    source, target = Tied(tied), Tied(tied, device="meta")
    source.embed.weight.requires_grad_(False)
    target.embed.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in source.parameters() if p.requires_grad] or [torch.ones(1)])
    root.save({"m": source, "o": optimizer})
    root.load({"m": target}, only="m")
    assert same_modules(source, target)
    assert not any(t.is_meta for t in target.state_dict().values())
    assert (target.head.weight is target.embed.weight) == tied
    assert [(type(p), p.requires_grad) for p in target.parameters()] == [
        (nn.Parameter, p.requires_grad) for p in source.parameters()
    ]


@pytest.mark.parametrize("who", ["asked", "default", "accelerator", "nobody"])
def test_the_home_of_what_has_no_memory(root: Root, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """Each of these comes before those behind it."""
    given: list[torch.device | None] = []
    empty_like = torch.empty_like

    def watched(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        given.append(device)
        return empty_like(tensor, device="cpu")

    root.save({"m": nn.Linear(3, 2)})
    target = nn.Linear(3, 2, device="meta")
    if who != "nobody":
        monkeypatch.setattr(accelerator, "available", lambda: torch.device("cuda", 7))
    monkeypatch.setattr(torch, "empty_like", watched)
    if who in ("asked", "default"):
        monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("xpu", 1))
    root.load({"m": target}, device="cpu:0" if who == "asked" else None)
    homes = {"asked": "cpu:0", "default": "xpu:1", "accelerator": "cuda:7", "nobody": "cpu"}
    assert given == [torch.device(homes[who])] * 2
    assert not target.weight.is_meta


def test_an_optimizer_is_made_after_its_meta_module_was_loaded(root: Root) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.Adam(source.parameters())
    source(torch.ones(3)).sum().backward()
    optimizer.step()
    root.save({"m": source, "o": optimizer})
    with pytest.raises(UnsupportedState, match=r"o: holds parameters on the meta device.*load the module first"):
        root.load({"m": target, "o": torch.optim.Adam(target.parameters())})
    root.load({"m": target}, only="m")
    resumed = torch.optim.Adam(target.parameters())
    root.load({"m": target, "o": resumed})
    assert same(list(resumed.state.values()), list(optimizer.state.values()))


def test_what_is_not_in_the_checkpoint_stays_without_memory(root: Root) -> None:
    target = nn.Linear(3, 2, device="meta")
    report = root.move({"m": nn.Linear(3, 2, bias=False)}, {"m": target}, strict=False)
    assert report.missing == ("m/bias",)
    assert not target.weight.is_meta
    assert target.bias.is_meta


def test_a_plain_meta_tensor_is_refused(root: Root) -> None:
    root.save({"t": torch.ones(3)})
    with pytest.raises(UnsupportedState, match="t: is on the meta device"):
        root.load({"t": torch.empty(3, device="meta")})


def test_a_tensor_whose_memory_was_freed_is_refused(root: Root) -> None:
    root.save({"t": torch.ones(3)})
    target = torch.zeros(3)
    target.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedState, match="t: its memory was freed"):
        root.load({"t": target})


# -- what does not fit


def test_one_error_names_everything_that_does_not_fit(root: Root) -> None:
    root.save(
        {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float16), "c": 1, "d": torch.ones(1), "h": Holder([1])}
    )
    target = {"a": torch.zeros(4), "b": torch.zeros(2), "e": torch.zeros(1), "f": 0, "g": Holder()}
    before = {name: bits(t) for name, t in target.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(StateMismatch) as caught:
        root.load(target)
    for text in (
        f"step {root.step} does not fit the state",
        "a: target is float32[4], checkpoint has float32[3]",
        "b: target is float32[2], checkpoint has float16[2]",
        "e: not in the checkpoint",
        "g: not in the checkpoint",
        "d: not in the state",
        "h: not in the state",
    ):
        assert text in str(caught.value)
    assert "f: " not in str(caught.value), "a plain value that one side lacks is no reason to refuse"
    assert before == {name: bits(t) for name, t in target.items() if isinstance(t, torch.Tensor)}
    assert target["f"] == 0


def test_long_lists_of_misfits_are_cut(root: Root) -> None:
    root.save({"a": {str(i): torch.ones(1) for i in range(60)}})
    with pytest.raises(StateMismatch, match="and 20 more"):
        root.load({})


def test_not_strict_loads_what_fits_and_reports_the_rest(root: Root) -> None:
    target = {"a": torch.zeros(2), "c": 5, "e": Holder("old"), "f": torch.zeros(1)}
    root.save({"a": torch.ones(2), "b": {"x": 1, "y": torch.ones(1)}, "g": Holder({"t": torch.ones(1)})})
    report = root.load(target, strict=False)
    assert torch.equal(target["a"], torch.ones(2))  # type: ignore[arg-type]
    assert set(report.missing) == {"c", "e", "f"}
    assert set(report.unexpected) == {"b/x", "b/y", "g"}
    assert (target["c"], target["e"].taken) == (5, 0)  # type: ignore[attr-defined]
    with pytest.raises(StateMismatch, match="a: target is"):  # what does not fit is no matter of strictness
        root.load({"a": torch.zeros(3)}, strict=False)


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda t: t.view(2, 3), lambda t: t[:]])
def test_two_values_do_not_go_into_one_memory(root: Root, alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Two tensors of it, as a state_dict() of tied weights has them, are two objects."""
    first, second = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 1
    root.save({"a": first, "b": second})
    target = torch.zeros(2, 3)
    with pytest.raises(StateMismatch, match="b: is tied to what a fills"):
        root.load({"a": target, "b": alias(target)}, strict=False)
    assert not target.any()
    root.save({"a": first, "b": first.clone()})
    root.load({"a": target, "b": alias(target)})
    assert torch.equal(target, first)


def test_views_beside_one_another_in_one_memory_are_filled(root: Root) -> None:
    saved = {"a": torch.arange(3.0), "b": torch.arange(3.0) + 5, "c": torch.arange(4.0)}
    root.save(saved)
    flat = torch.zeros(10)
    target = {"a": flat[0:6:2], "b": flat[1:6:2], "c": flat[6:]}
    root.load(target)
    assert all(torch.equal(target[name], saved[name]) for name in saved)


# -- only, map, cast


def test_only_a_part(root: Root) -> None:
    def zeros() -> dict[str, Any]:
        return {"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "n": {"a": 0, "b": torch.zeros(1)}, "h": Holder()}

    source = {"m": zeros()["m"], "n": {"a": 7, "b": torch.ones(1)}, "h": Holder("x")}
    root.save(source)
    for only, filled in {
        "m": {"m/0", "m/1"},
        "m/0.*": {"m/0"},
        ("m/1.weight", "m/1.bias", "h"): {"m/1", "h"},
        "n": {"n/a", "n/b"},
        "n/b": {"n/b"},
        "n/[a]": {"n/a"},
        ("n/*", "h/*"): {"n/a", "n/b", "h"},
        ("m/*", "m/0.weight"): {"m/0", "m/1"},
    }.items():
        target = zeros()
        report = root.load(target, only=only)
        found = {f"m/{i}" for i in (0, 1) if same_modules(source["m"][i], target["m"][i])}  # type: ignore[index]
        found |= {"n/a"} if target["n"]["a"] else set()
        found |= {"n/b"} if target["n"]["b"].any() else set()
        found |= {"h"} if target["h"].content else set()
        assert found == filled, only
        assert (report.missing, report.unexpected) == ((), ())
    with pytest.raises(StateMismatch, match=r"m/2\.weight: not in the checkpoint"):
        root.load({"m": nn.Sequential(*zeros()["m"], nn.Linear(2, 2))}, only="m/2*")


def test_a_part_that_the_state_has_nothing_of_is_told(root: Root) -> None:
    root.save({"m": nn.Linear(2, 2), "n": 7})
    target = {"m": nn.Linear(2, 2), "n": 0}
    before = bits(target["m"].weight)  # type: ignore[attr-defined]
    for only in ("mm", "mm/*", ("m", "mm/*")):
        with pytest.raises(StateMismatch, match=r"  mm(/\*)?: not in the state"):
            root.load(target, only=only)
    assert root.load(target, only="mm/*", strict=False).unexpected == ("mm/*",)
    assert bits(target["m"].weight) == before  # type: ignore[attr-defined]
    with pytest.raises(StateMismatch, match="  nn: not in the state"):
        root.load(target, map={"nn": "n"})
    root.load(target, only="m", map={"nn": "n"})


def test_only_takes_steps_without_the_optimizer(root: Root) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    root.save({"m": model, "o": torch.optim.Adam(model.parameters(), lr=0.25)})
    root.load({"m": model, "o": optimizer}, only="m")
    assert optimizer.param_groups[0]["lr"] == 0.5
    root.load({"m": model, "o": optimizer}, only=["o"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = 0.5
    root.load({"m": model, "o": optimizer}, only=["o/*"])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_state_is_in_one_order_whatever_was_there_before(root: Root) -> None:
    """Whoever gathers it tensor by tensor needs the same order on all ranks, of which some may have stepped before."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model.bias.sum().backward()  # the last parameter first
    optimizer.step()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert next(iter(optimizer.state)) is model.bias
    state = {"m": model, "o": optimizer}
    root.save(state)
    root.load(state)
    assert [param is other for param, other in zip(optimizer.state, model.parameters(), strict=True)] == [True, True]
    optimizer.state.clear()
    root.load(state)
    assert [param is other for param, other in zip(optimizer.state, model.parameters(), strict=True)] == [True, True]


def test_map_renames_from_the_state_to_the_checkpoint(root: Root) -> None:
    old, new = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, resumed = torch.optim.Adam(old.parameters()), torch.optim.Adam(new.parameters(), lr=9.0)
    old(torch.ones(3)).sum().backward()
    optimizer.step()
    root.save({"old": old, "o": optimizer, "count": 5, "holder": Holder({"t": torch.ones(2)})})
    target = {"new": new, "o": resumed, "n": 0, "h": Holder()}
    table = {"new/weight": "old/weight", "new/bias": "old/bias", "n": "count", "h": "holder"}
    root.load(target, map=table)
    assert same_modules(old, new)
    assert same(list(resumed.state.values()), list(optimizer.state.values()))
    assert resumed.param_groups[0]["lr"] == 1e-3
    assert target["n"] == 5
    assert same(target["h"].content, {"t": torch.ones(2)})  # type: ignore[attr-defined]
    again = nn.Linear(3, 2)
    root.load({"new": again}, map=lambda name: name.replace("new", "old"), only="new")
    assert same_modules(old, again)
    with pytest.raises(StateMismatch, match="n: not in the checkpoint"):
        root.load(target, map={"n": "nowhere"}, only="n")


@pytest.mark.parametrize(
    "rename", [{"model": "ema"}, lambda name: name.replace("model", "ema")], ids=["dict", "function"]
)
def test_averaged_weights_go_into_the_model(root: Root, rename: Any) -> None:
    saved = {"model": nn.Linear(3, 2), "ema": nn.Linear(3, 2), "other": nn.Linear(3, 2)}
    root.save(saved)
    model = nn.Linear(3, 2)
    root.load({"model": model}, map=rename, only="model")
    assert same_modules(saved["ema"], model)
    with pytest.raises(StateMismatch, match=r"other/weight: not in the state"):
        root.load({"model": model}, map=rename)


def test_the_longest_entry_of_a_map_counts(root: Root) -> None:
    root.save({"a": {"b": 1, "c": 2}, "d": {"c": 3}})
    target = {"x": {"b": 0, "c": 0}}
    root.load(target, map={"x": "a", "x/c": "d/c"}, only="x")
    assert target == {"x": {"b": 1, "c": 3}}


def test_map_may_load_one_tensor_twice(root: Root) -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(2)}
    root.save({"w": torch.arange(2.0)})
    root.load(target, map=lambda name: "w")
    assert same(target, {"a": torch.arange(2.0), "b": torch.arange(2.0)})


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64], ids=str)
@pytest.mark.parametrize("wanted", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_cast_only_when_asked(root: Root, saved: torch.dtype, wanted: torch.dtype) -> None:
    source = torch.arange(-8, 8).view(4, 4).to(saved)
    target = {"a": torch.zeros(4, 4, dtype=wanted), "b": torch.zeros(4, 4, dtype=wanted).t()}
    root.save({"a": source, "b": source})
    if saved == wanted:
        root.load(target)
    else:
        with pytest.raises(StateMismatch, match=r"(?s)a: target is .*cast=True"):
            root.load({"a": target["a"]}, only="a")
        assert not target["a"].any()
        root.load(target, cast=True)
    assert same(target["a"], source.to(wanted))
    assert same(target["b"], source.to(wanted))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("complex64", "float32"),
        ("complex128", "bool"),
        ("float4_e2m1fn_x2", "float32"),
        ("float32", "float4_e2m1fn_x2"),
    ],
)
def test_what_no_cast_converts(root: Root, saved: str, wanted: str) -> None:
    """Without its imaginary part a number is another one."""
    if not hasattr(torch, saved) or not hasattr(torch, wanted):
        pytest.skip("this torch does not have the dtype")
    dtypes: list[torch.dtype] = [getattr(torch, saved), getattr(torch, wanted)]
    source, target = (torch.ones(2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in dtypes)
    other = torch.ones(source.nbytes, dtype=torch.uint8).view(source.dtype)
    root.save({"a": source, "b": source})
    with pytest.raises(StateMismatch, match=r"a: target is .*; cast=True does not convert these dtypes"):
        root.load({"a": target, "b": other}, cast=True)
    assert target.view(torch.uint8).eq(1).all()


def test_a_load_that_is_not_strict_and_finds_nothing_is_told(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    """As by a misspelt map: else somebody evaluates what the program made."""
    root.save({"net": {"w": torch.ones(2), "b": torch.ones(1)}})
    target = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}}
    root.load(target, strict=False, map={"modle": "net"})
    assert "nothing of this state, all of which is left as it was: model/w, model/b. See whether map=" in caplog.text
    caplog.clear()
    root.load(target, strict=False, map={"model": "net"})
    root.load({**target, "net": {"w": torch.zeros(2)}}, strict=False)
    assert caplog.text == ""


def test_an_absent_step_names_those_there_are(root: Root) -> None:
    root.save({"a": 1})
    with pytest.raises(CheckpointNotFound, match=rf"no step 999; the last ones are: .*{root.step}$"):
        ckptlib.load(root.url, {"a": 0}, 999)
    with pytest.raises(
        CheckpointNotFound, match="'newest' is neither a step's number, nor its full name, nor 'latest'"
    ):
        ckptlib.load(root.url, {"a": 0}, "newest")


def test_the_home_of_a_dtensor_is_its_mesh(tmp_path: Path) -> None:
    """Whatever is chosen else: FSDP2 with CPU offloading has a mesh of the accelerator, and asks for the host."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            assert home_of(distribute_tensor(torch.empty(4, device="meta"), mesh)) == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_an_optimizer_looks_at_its_own_names_alone(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be one for each of thousands of parameters."""
    walks: list[str] = []

    class Tensors(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            walks.append("names")
            return super().__iter__()

        def items(self) -> Any:
            walks.append("items")
            return super().items()

    def plan_of(saved: SavedNames, *others: Any) -> LoadPlan:
        saved.tensors = Tensors(saved.tensors)
        return LoadPlan(saved, *others)

    monkeypatch.setattr(match, "LoadPlan", plan_of)
    found = []
    for num in (1, 5):
        params = {f"p{n}": nn.Parameter(torch.ones(1)) for n in range(num)}
        state = {"p": params, "o": {name: optim.Adagrad([param]) for name, param in params.items()}}
        walks.clear()
        root.move(state, state)
        found.append([*walks])
    assert found[0] == found[1]
