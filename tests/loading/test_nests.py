"""Containers of plain values that grow in training come back as they were, into those that a restart makes empty."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from onerank import Root

import ckptlib
from ckptlib import PerRank, StateMismatch
from ckptlib.errors import UnsupportedState
from ckptlib.state import flatten

GROWN: dict[str, tuple[Any, Any]] = {
    "tuples in a list": ([(1, 2.0), (2, math.inf)], []),
    "lists in a list": ([[1, 2], [3], []], []),
    "dicts in a list": ([{"s": 1, 2: b"x"}, {"s": {True}}], []),
    "sizes in a list": ([torch.Size([1, 2])], []),
    "sizes where sizes are": ([torch.Size([1, 2]), (torch.Size([3]), 4)], [torch.Size([7]), (torch.Size([]), 0)]),
    "a size in a dict by number": ({1: torch.Size([1, 2])}, {1: torch.Size([3, 4])}),
    "deep": ({"a": {"b": [[(1,), None]]}}, {"a": {"b": []}}),
    "longer inside": ([[1, 2, 3], [4]], [[0]]),
    "dict": ({"b": 1, "a": {"c": None}}, {}),
    "dict within": ({"x": {"k": 1}, "n": 2}, {"x": {}, "n": 0}),
    "lists in a dict": ({"loss": [0.5, 0.25], "none": [], "at": (1, 2)}, {}),
    "lists deep in a dict": ({"train": {"loss": [1, 2]}}, {"train": {}}),
    "lists in a defaultdict": (defaultdict(list, loss=[1, 2], acc=[0.5]), defaultdict(list)),
    "longer and shorter lists in a dict": ({"loss": [1, 2], "acc": [3]}, {"loss": [9], "acc": [8, 8]}),
    "keys that are text for sure": ({"val/loss": 1, "top-1": [2], "a b": {"c%2F.d": 3}}, {}),
    "defaultdict": (defaultdict(int, a=3), defaultdict(int)),
    "defaultdict by number": (defaultdict(list, {3: [1]}), defaultdict(list)),
    "Counter": (Counter("aab"), Counter()),
    "Counter by number": (Counter([5, 5, 6]), Counter({5: 9})),
    "OrderedDict": (OrderedDict(z=1, a=2), OrderedDict()),
    "keys that are numbers": ({1: "one", 2: "two"}, {}),
    "keys of one name": ({1: "i", "1": "s"}, {}),
    "tuple": ((1, 2), ()),
    "shorter tuple": ((1,), (7, 8, 9)),
    "tuple of lists": (([1], [2, 3]), ()),
    "emptied list": ([], [1, 2]),
    "emptied dict": ({}, {"old": 1}),
    "emptied tuple": ((), (1, 2)),
    "emptied nest": ([], [[1], (2,)]),
    "emptied defaultdict": (defaultdict(int), defaultdict(int, a=1)),
    "into None": ([(1, 2)], None),
    "dict into None": ({"a": 1, "b": {"c": [1], "d": None}}, None),
    "dict into a value within": ({"a": {"b": {"c": 1}}, "z": 0}, {"a": 3}),
    "list into a value": ([1, 2], 5),
    "value into a list": (7, []),
    "value into a dict": ("x", {"a": 1}),
    "None into a dict": (None, {"a": {"b": 1}}),
    "keys like numbers": ({"7": 3, "1e5": 1, "nan": 2, "-1": (4,)}, {}),
    "keys like other types": ({"True": 1, "None": 2, "(1, 2)": 3, "torch.float32": 4, "layer.0": 5}, {}),
    "keys that are no Unicode": ({"\udcff": 1, "a\udcff": 2}, {}),
    "keys with signs": ({"val/loss": 1.0, "top-1 acc": 2, "50%": {"a/b": 3}}, {}),
}


def same(one: object, other: object) -> bool:
    """Same types, content and order all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(autouse=True)
def _close(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "root" not in request.fixturenames:
        close_sessions()


@pytest.mark.parametrize("kind", GROWN)
@pytest.mark.parametrize("per_rank", [False, True])
def test_as_it_was_saved(root: Root, kind: str, per_rank: bool) -> None:
    saved, fresh = copy.deepcopy(GROWN[kind])
    wrap: Any = PerRank if per_rank else lambda value: value
    state = {"v": wrap(fresh), "w": torch.zeros(1)}
    report = root.move({"v": wrap(saved), "w": torch.ones(1)}, state)
    found = state["v"].value if per_rank else state["v"]
    assert same(found, saved)
    assert (report.missing, report.unexpected) == ((), ())
    if isinstance(fresh, (list, dict)) and isinstance(saved, type(fresh)):
        assert found is fresh, "in place, as other names of it see the same"


def test_what_lies_within_is_filled_in_place(root: Root) -> None:
    saved: dict[str, Any] = {"h": [[1, 2], {"a": [3]}], "t": ([4, 5], 6), "d": {0: {"k": [7]}}}
    root.save({**saved, "w": torch.ones(1)})
    row, inner, one, deep = [0], [9, 9], [0], [1]
    state: dict[str, Any] = {"h": [row, {"a": inner}], "t": (one, 0), "d": {0: {"k": deep}}, "w": torch.zeros(1)}
    root.load(state)
    assert {key: state[key] for key in saved} == saved
    assert state["h"][0] is row
    assert state["h"][1]["a"] is inner
    assert state["t"][0] is one
    assert state["d"][0]["k"] is deep


def test_one_list_in_two_places(root: Root) -> None:
    """Where the saved ones differ, they are two; where they are equal, it stays one."""
    root.save({"v": [[1], [2]], "u": [[3], [3]], "w": torch.ones(1)})
    state: dict[str, Any] = {"v": [[0]] * 2, "u": [[0]] * 2, "w": torch.zeros(1)}
    root.load(state)
    assert (state["v"], state["u"]) == ([[1], [2]], [[3], [3]])
    assert state["u"][0] is state["u"][1]


def test_a_job_that_is_restarted_has_all_of_its_history(tmp_path: Path) -> None:
    for total in (3, 7):
        history: list[tuple[int, float]] = []
        best: dict[str, float] = {}
        seen: defaultdict[int, list[int]] = defaultdict(list)
        curves: defaultdict[str, list[float]] = defaultdict(list)
        state = {"history": history, "best": best, "seen": seen, "curves": curves, "w": torch.ones(1)}
        with ckptlib.Checkpointer(tmp_path, state, every=2) as ckpt:
            for step in ckpt.loop(ckpt.restore().step, total):
                history.append((step, step / 2))
                best[f"of{step}"] = step
                seen[step % 2].append(step)
                curves["train/loss"].append(step / 4)
    assert history == [(step, step / 2) for step in range(7)]
    assert [*best.items()] == [(f"of{step}", step) for step in range(7)]
    assert seen == {0: [0, 2, 4, 6], 1: [1, 3, 5]}
    assert curves == {"train/loss": [step / 4 for step in range(7)]}


def test_the_form_changes_from_save_to_save(tmp_path: Path) -> None:
    forms: list[Any] = [[], [[1]], [1, 2], [], [{"a": 1}], [3]]
    value: list[Any] = []
    state = {"v": value, "w": torch.ones(1)}
    for step, form in enumerate(forms):
        value[:] = copy.deepcopy(form)
        ckptlib.save(tmp_path, state, step)
    for step, form in enumerate(forms):
        for fresh in ([], [7], [7, 8, 9]):
            target = {"v": list(fresh), "w": torch.zeros(1)}
            ckptlib.load(tmp_path, target, step)
            assert target["v"] == form


def test_entry_by_entry_as_earlier_versions_saved_it(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers stand for a list, or for keys: what the state has is filled, and nothing is made of them."""
    old = {"v": [[1, 2]], "n": {1: "one"}, "e": [5], "d": {"a": 1, 7: 2, "l": [3], None: 4, b"k": 5}}
    with monkeypatch.context() as patch:
        patch.setattr(flatten, "is_nest", lambda node: False)
        root.save({**old, "w": torch.ones(1)})
    state: dict[str, Any] = {"v": [[0, 0]], "n": {1: ""}, "e": {}, "d": {}, "w": torch.zeros(1)}
    report = root.load(state)
    assert {key: state[key] for key in old} == {"v": [[1, 2]], "n": {1: "one"}, "e": {}, "d": {"a": 1}}
    assert set(report.unexpected) == {"e/0", "d/7", "d/l/0", "d/None", "d/b'k'"}


def test_none_stays_where_no_dict_by_text_was(root: Root) -> None:
    root.save({"n": {"x": {1: torch.ones(1), 2: 5}}, "w": torch.ones(1)})
    state: dict[str, Any] = {"n": {"x": None}, "new": None, "w": torch.zeros(1)}
    report = root.load(state, strict=False)
    assert (state["n"], state["new"]) == ({"x": None}, None)
    assert set(report.missing) == {"n/x", "new"}
    assert set(report.unexpected) == {"n/x/1", "n/x/2"}


def test_asked_for_and_renamed(root: Root) -> None:
    root.save({"a": [[1]], "b": {"x": 1, "y": 2}, "c": {1: 2}, "w": torch.ones(1)})
    for only in ("a", "a/*"):
        state: dict[str, Any] = {"a": [], "b": {}, "c": {}}
        root.load(state, only=only)
        assert state == {"a": [[1]], "b": {}, "c": {}}
    state = {"b": {}}
    root.load(state, only="b/x")
    assert state == {"b": {"x": 1}}
    state = {"new": {"a": [], "b": {}}, "c": {}, "w": torch.zeros(1)}
    report = root.load(state, map={"new/a": "a", "new/b": "b"})
    assert (state["new"], state["c"]) == ({"a": [[1]], "b": {"x": 1, "y": 2}}, {1: 2})
    assert report.unexpected == ()
    state = {"moved": 0, "a": [], "b": {}, "c": {}, "w": torch.zeros(1)}
    root.load(state, map={"moved": "b/x"})
    assert (state["moved"], state["b"]) == (1, {"y": 2}), "what another name took is not added"


def test_one_side_may_lack_it(root: Root) -> None:
    root.save({"old": [[1]], "none": {}, "w": torch.ones(1)})
    state: dict[str, Any] = {"new": [[2]], "w": torch.zeros(1)}
    report = root.load(state)
    assert state["new"] == [[2]]
    assert set(report.unexpected) == {"old", "none"}
    with pytest.raises(StateMismatch, match="new"):
        root.load(state, only=["new", "w"])
    root.load(state, only=["new", "w"], optional="new/*")


class Scheduler:
    def __init__(self) -> None:
        self.loaded: object = None

    def state_dict(self) -> dict[str, object]:
        return {"n": 1}

    def load_state_dict(self, state: object) -> None:
        self.loaded = state


def test_an_object_is_no_container(root: Root) -> None:
    root.save({"x": {"s": Scheduler()}, "w": torch.ones(1)})
    state: dict[str, Any] = {"x": {}, "w": torch.zeros(1)}
    with pytest.raises(StateMismatch, match="x/s: not in the state"):
        root.load(state)
    root.save({"s": {}, "w": torch.ones(1)})
    scheduler = Scheduler()
    with pytest.raises(StateMismatch, match="s: is an object in the state; the checkpoint has a plain value"):
        root.load({"s": scheduler, "w": torch.zeros(1)})
    assert scheduler.loaded is None


class Averages(dict[str, Any]):
    """Has more than its entries."""

    updates = 0

    def state_dict(self) -> Any:
        return {**self, "updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.updates = state.pop("updates")
        self.update(state)


def test_a_dict_that_has_more_than_its_entries_is_refused(root: Root) -> None:
    class Meters(Averages):
        def state_dict(self) -> Any:
            return [*self.items()]

    averages = Averages(w=torch.ones(2))
    with pytest.raises(UnsupportedState, match=r"^averages: .* also gives 'updates', .* put in its place an object"):
        root.save({"averages": averages})
    with pytest.raises(UnsupportedState, match=r"^all/0: .* also gives 'list'"):
        root.save({"all": [Meters(w=torch.ones(2))]})


def test_a_dict_whose_state_is_its_entries_is_walked(root: Root) -> None:
    class StateDict(Averages):
        def state_dict(self) -> Any:
            return self

    class Modules(Averages):
        def state_dict(self) -> Any:
            return {f"{name}.{key}": value for name in self for key, value in self[name].state_dict().items()}

    class TensorDictBase(Averages):
        __module__ = "tensordict.base"

    class Box(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self.setdefault(name, Box())

    def state(value: float) -> dict[str, Any]:
        dicts = {kind.__name__: kind(w=torch.full((2,), value)) for kind in (StateDict, TensorDictBase, Box)}
        return {**dicts, "modules": Modules(a=torch.nn.Linear(1, 1)), "plain": StateDict(step=value)}

    saved, found = state(1.0), state(0.0)
    root.save(saved)
    root.load(found)
    assert [found[name]["w"].tolist() for name in ("StateDict", "TensorDictBase", "Box")] == [[1.0, 1.0]] * 3
    assert (found["Box"].keys(), found["plain"]) == ({"w"}, {"step": 1.0})
    assert torch.equal(found["modules"]["a"].weight, saved["modules"]["a"].weight)


def test_an_object_of_which_a_dict_of_tensors_was_saved_is_told_what_to_do(root: Root) -> None:
    class Average:
        def state_dict(self) -> Any:
            return {"w": torch.zeros(2)}

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    root.save({"average": {"w": torch.ones(2)}})
    with pytest.raises(StateMismatch, match=r"average: .* has a dict, .* load with optional='average'"):
        root.load({"average": Average()})


def test_the_whole_state_is_a_dict_whatever_it_has(root: Root) -> None:
    root.save(Averages(w=torch.ones(2)))
    found = Averages(w=torch.zeros(2))
    root.load(found)
    assert found["w"].tolist() == [1.0, 1.0]
    assert ckptlib.read(root.url).keys() == {"w", "@rng"}


def test_nothing_is_added_beside_tensors(root: Root) -> None:
    root.save({"x": {"t": torch.ones(1), "n": 1}})
    state = {"x": {"t": torch.zeros(1)}}
    assert root.load(state).unexpected == ("x/n",)
    assert [*state["x"]] == ["t"]


def test_in_what_cannot_be_changed(root: Root) -> None:
    root.save({"m": MappingProxyType({"t": ((1,), 2), "l": [[1]]}), "w": torch.ones(1)})
    fresh: list[Any] = []
    root.load({"m": MappingProxyType({"t": ((1,), 2), "l": fresh}), "w": torch.zeros(1)})
    assert fresh == [[1]]
    with pytest.raises(StateMismatch, match=r"m/t: is .* and the mapping around it cannot be changed"):
        root.load({"m": MappingProxyType({"t": (), "l": []}), "w": torch.zeros(1)})


def test_nothing_is_changed_where_the_load_is_refused(root: Root) -> None:
    root.save({"h": [[1]], "d": {"a": 1}, "w": torch.ones(1)})
    state: dict[str, Any] = {"h": [[9]], "d": {}, "w": torch.zeros(2)}
    with pytest.raises(StateMismatch):
        root.load(state)
    assert (state["h"], state["d"]) == ([[9]], {})


def test_what_would_not_come_back_is_refused_or_walked(root: Root) -> None:
    with pytest.raises(UnsupportedState, match="v"):
        root.save({"v": [[object()]], "w": torch.ones(1)})
    root.save({"v": [defaultdict(int, a=1)], "w": torch.ones(1)})
    state: dict[str, Any] = {"v": [defaultdict(int, a=0)], "w": torch.zeros(1)}
    root.load(state)
    assert same(state["v"], [defaultdict(int, a=1)])


def test_read_without_a_state(root: Root) -> None:
    saved: dict[str, Any] = {"h": [(1, 2)], "e": {}, "n": {1: OrderedDict(a=Counter("x"))}, "t": ()}
    root.save({**saved, "w": torch.ones(1)})
    with ckptlib.open(root.url) as opened:
        assert same({name: opened.values[name] for name in saved}, saved)
    found = ckptlib.read(root.url)
    assert same({name: found[name] for name in saved}, saved)
