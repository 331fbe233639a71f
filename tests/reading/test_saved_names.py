"""From which rank a value comes that this one did not save, and how many parts are read to find it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptlib.format.layout import OwnPerRank
from ckptlib.reading import rank_values, saved_names
from ckptlib.reading.saved_names import LAYOUTS_ASKED, SavedNames

RANKS = 40


class Stages:
    """A step of so many stages, each with a layout of its own. Counts the parts that are read."""

    own_rank, step = 0, 1

    def __init__(self, values: dict[int, dict[str, Any]]) -> None:
        self.values, self.asked = values, set[int]()
        self.layouts = {f"{rank:032x}": self._layout(rank) for rank in range(RANKS)}

    def _layout(self, rank: int) -> Any:
        return SimpleNamespace(tensors=(), index={}, aliases={}, objects={f"s{rank}/sched": "tensor"})

    def part(self, rank: int) -> Any:
        self.asked.add(rank)
        return SimpleNamespace(table=SimpleNamespace(layout=f"{rank:032x}"), values=self.values.get(rank, {}))

    def first_rank(self, layout: str) -> int:
        return int(layout, 16)


def names(**values: dict[str, Any]) -> tuple[SavedNames, Stages]:
    stages = Stages({int(rank[1:]): of for rank, of in values.items()})
    return SavedNames(stages), stages  # type: ignore[arg-type]


def test_a_value_of_another_stage_costs_one_part() -> None:
    saved, stages = names(r0={"s0/n": 5}, r35={"s35/n": 7})
    assert saved.value("s0/n") == 5
    assert stages.asked == {0}
    assert saved.value("s35/n") == 7
    assert stages.asked == {0, 35}


def test_a_value_of_a_stage_is_found_without_a_look_at_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tens of thousands of values, each would cost one at each of hundreds of layouts."""
    saved, _ = names(r3={"s3/deep/n": 1})
    looks: list[str] = []
    look = saved_names.any_below
    monkeypatch.setattr(saved_names, "any_below", lambda *asked: looks.append(asked[1]) or look(*asked))
    assert saved.value("s3/deep/n") == 1
    assert len(looks) == RANKS - 1 + 3, "all at its own level, and those up to the one at the level above"


def test_the_layouts_that_have_names_nearest_to_a_value_come_first() -> None:
    saved, stages = names(r0={})
    for rank, below in ((7, "a/b/c/x"), (20, "a/b/x"), (5, "a/x"), (30, "a/b/c/y")):
        stages.layouts[f"{rank:032x}"].objects[below] = "tensor"
    assert list(saved._by_nearness("a/b/c/n"))[:5] == [7, 30, 20, 5, 1]
    assert sorted(saved._by_nearness("a/b/c/n")) == list(range(1, RANKS))


def test_a_value_that_nobody_has_costs_few_parts() -> None:
    saved, stages = names(r0={"s0/n": 5})
    assert "new" not in saved.values_at("new")
    assert "s1/d/new" not in saved.values_at("s1/d/new")
    assert saved.below("other") == []
    assert len(stages.asked) <= 1 + LAYOUTS_ASKED + 1


def test_what_is_below_a_container_comes_from_where_the_container_does() -> None:
    """Also where another rank has names that are nearer to those below it, and values of the same names."""
    saved, stages = names(r1={"h/a/x": 1, "h/y": 2}, r2={"h/a/x": 3, "h/z": 4})
    layout = stages.layouts[f"{2:032x}"]
    layout.objects["h/a/object"] = "tensor"
    assert saved.below("h") == ["a/x", "y"]
    assert [saved.value(f"h/{rest}") for rest in saved.below("h")] == [1, 2]
    assert saved.value("h/z") == 4, "the first one lacks it"


def test_a_rank_with_tensors_alone_has_saved_something_there() -> None:
    """Another's values there would stand for its own tensors."""
    saved, stages = names(r1={"h": {}, "t": None, "a": 1, "h/n": 2, "k": 3})
    own = stages.layouts[f"{0:032x}"]
    own.index.update({"h/x": 0, "t": 1})
    own.aliases["a"] = "t"
    own.objects["k"] = {"dict": []}
    for name in ("h", "t", "a", "k"):
        assert name not in saved.values_at(name)
        assert saved.below(name) == []
    assert saved.value("h/n") == 2, "nothing of its own is there"
    assert saved.below("h/x") == []


def test_of_all_values_this_ranks_own_counts_first_and_then_the_first_that_has_one() -> None:
    saved, _ = names(r0={"a": 1}, r1={"a": 2, "b": 3}, r2={"b": 4, "c": 5})
    assert saved.all_values() == {"a": 1, "b": 3, "c": 5}


def add(stages: Stages, rank: int, name: str, alias: str, holding: object) -> Any:
    """A tensor of a rank, and a further name of it."""
    entry, layout = SimpleNamespace(name=name, holding=holding), stages.layouts[f"{rank:032x}"]
    layout.tensors, layout.index, layout.aliases = (entry,), {name: 0}, {alias: name}
    return entry


def test_what_this_rank_saved_counts_under_all_its_names() -> None:
    """Another rank has the same two names for one tensor, the other way about."""
    stages = Stages({})
    own = add(stages, 0, "a", "b", None)
    add(stages, 1, "b", "a", None)
    saved = SavedNames(stages)  # type: ignore[arg-type]
    assert saved.tensors == {"a": own, "b": own}
    assert [saved.first_name(name) for name in "ab"] == ["a", "a"]


def test_what_another_rank_has_as_its_own_counts_under_none_of_its_names() -> None:
    stages = Stages({})
    own = add(stages, 0, "a", "b", OwnPerRank())
    add(stages, 1, "c", "d", OwnPerRank())
    saved = SavedNames(stages)  # type: ignore[arg-type]
    assert saved.tensors == {"a": own, "b": own}


def test_what_a_rank_has_that_takes_the_place_of_another() -> None:
    """Tensors alone are something, and so are values; nobody takes a place where fewer or more ranks load."""
    stages = Stages({0: {"v": 1}, 1: {"w": 2}})
    stages.layouts[f"{0:032x}"].index["t/x"] = 0
    for as_many in (True, False):
        saved = SavedNames(stages, as_many=as_many)  # type: ignore[arg-type]
        names = ["v", "t", "t/x", "w", "other"]
        assert [saved.has_own(name) for name in names] == [as_many, as_many, as_many, False, False]
        assert [saved.others_alone(name) for name in names] == [False, False, False, as_many, as_many]


def test_objects_whose_tensors_each_rank_had_as_its_own() -> None:
    """Where this rank has some of it, there is nothing to ask another for; of what has no such tensor neither."""
    stages = Stages({})
    for rank, holding in enumerate([OwnPerRank(), OwnPerRank(), None, OwnPerRank()]):
        add(stages, rank, f"s{rank}/sched/x", f"s{rank}/alias", holding)
    stages.layouts[f"{0:032x}"].index["s3/sched/y"] = 1
    saved = SavedNames(stages)  # type: ignore[arg-type]
    names = [f"s{rank}/sched" for rank in range(4)]
    assert [saved.is_of_others(name) for name in names] == [False, True, False, False]
    assert not saved.is_of_others("other")


def test_names_below_one_are_found_without_a_look_at_those_before_it() -> None:
    """Each of thousands of dicts may be asked for."""
    looks: list[Any] = []

    class Names(list[str]):
        def __getitem__(self, at: Any) -> Any:
            looks.append(at)
            return super().__getitem__(at)

        def __iter__(self) -> Any:
            raise AssertionError("all of them are looked at")

    found = rank_values.names_below(Names(f"d{n:04d}/x" for n in range(5000)), "d4000")
    assert list(found) == ["d4000/x"]
    assert len(looks) < 20
