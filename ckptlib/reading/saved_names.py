"""The names in a checkpoint, as the rank that loads it sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

from ckptlib.errors import StateMismatch
from ckptlib.format import values
from ckptlib.format.box import Box
from ckptlib.format.layout import OwnPerRank, TensorEntry
from ckptlib.format.values import Json
from ckptlib.reading.rank_values import RankValues, any_below, at_or_below, beginning_with, names_below
from ckptlib.reading.reader import StepReader

LAYOUTS_ASKED = 16
"""The most other layouts of which a part is read for a value that a rank did not save itself."""


@dataclass(frozen=True, slots=True, order=True)
class SavedGroup:
    """A parameter group of an optimizer."""

    layout: int
    """Position of its layout among the step's; 0 is the layout of this rank's own part."""
    index: int
    """Position in its optimizer."""


class SavedNames:
    """The tensors, values, trees of objects and groups of optimizers of one step.

    A rank takes its own values. Values that it did not save come from another rank that did: see `values_at`.
    """

    def __init__(self, reader: StepReader[Any], *, as_many: bool = False) -> None:
        """`as_many`: whether as many ranks load it as have saved it, so that each takes the place of one of them."""
        self._reader = reader
        self._as_many = as_many
        own = reader.part(reader.own_rank)
        self._digests = [own.table.layout, *(digest for digest in reader.layouts if digest != own.table.layout)]
        self.values: Mapping[str, Json] = own.values
        """Values of this rank's own part."""
        self._rank_values_by_layout: dict[int, RankValues[Json]] = {}
        self._names_by_layout: dict[int, list[str]] = {}
        self._elsewhere: dict[str, RankValues[Json]] = {}
        """By name that this rank did not save: the values of the rank that has it, and the entries below it."""
        self.tensors: dict[str, TensorEntry] = {}
        """By name or alias. This rank's own layout counts, else the first that has the name."""
        self.objects: dict[str, Json] = {}
        self._aliases: dict[str, str] = {}
        self.groups: dict[str, dict[str, SavedGroup]] = {}
        """Group of each parameter by name, by path of an optimizer."""
        self.classes: dict[str, str] = {}
        """Class name by path of an optimizer, if the checkpoint tells it."""
        self.dtensors: dict[str, dict[str, frozenset[str]]] = {}
        """By path of an optimizer, and by name of a parameter: paths in its state, see
        `ckptlib.state.optimizer_tensors.whole_dtensors`."""
        self._orders: dict[str, dict[frozenset[str], list[str]]] = {}
        """Order of a parameter's state keys, by path of an optimizer and these keys."""
        self._positions: dict[str, dict[str, int]] = {}
        """All keys by path of an optimizer, numbered as they came."""
        for position, digest in enumerate(self._digests):
            layout = reader.layouts[digest]
            for entry in layout.tensors:
                if not (position and isinstance(entry.holding, OwnPerRank)):
                    self.tensors.setdefault(entry.name, entry)
            for alias, name in layout.aliases.items():
                entry = layout.tensors[layout.index[name]]
                if alias not in self.tensors and not (position and isinstance(entry.holding, OwnPerRank)):
                    self.tensors[alias] = entry
                    self._aliases[alias] = name
            for path, tree in layout.objects.items():
                self.objects.setdefault(path, tree)
                self._add_groups(path, tree, position)

    def _add_groups(self, path: str, tree: Json, layout: int) -> None:
        if not isinstance(tree, dict) or "optimizer" not in tree:
            return
        known = self.groups.setdefault(path, {})
        match tree["optimizer"]:
            case {"groups": list(groups)}:
                for i, names in enumerate(groups):
                    for name in names if isinstance(names, list) else []:
                        known.setdefault(str(name), SavedGroup(layout, i))
            case _:
                raise StateMismatch(f"{path}: the layout's groups of this optimizer cannot be read")
        match tree["optimizer"]:
            case {"class": str(name), "keys": list(orders)}:
                self.classes.setdefault(path, name)
                self._add_orders(path, orders)
        match tree["optimizer"]:
            case {"dtensors": dict(found)}:
                told = self.dtensors.setdefault(path, {})
                for name, keys in found.items():
                    told[name] = told.get(name, frozenset()).union(map(str, keys if isinstance(keys, list) else []))

    def _add_orders(self, path: str, orders: list[Json]) -> None:
        known, positions = self._orders.setdefault(path, {}), self._positions.setdefault(path, {})
        for order in orders:
            keys = list(dict.fromkeys(map(str, order if isinstance(order, list) else [])))
            known.setdefault(frozenset(keys), keys)
            for key in keys:
                positions.setdefault(key, len(positions))

    def first_name(self, name: str) -> str:
        """Returns the name that a tensor's optimizer state is kept under, if the tensor had several names."""
        return self._aliases.get(name, name)

    def in_order(self, path: str, keys: Collection[str]) -> list[str]:
        """Returns the keys of a parameter's state, in the order that an optimizer once had them in."""
        found = self._orders.get(path, {}).get(frozenset(keys))
        if found is None:  # other ranks, or other versions, saved them
            positions = self._positions.get(path, {})
            return sorted(keys, key=lambda key: (positions.get(key, len(positions)), key))
        return found

    def further_keys(self, path: str, keys: Collection[str]) -> list[str]:
        """Returns the keys that parameters of an optimizer had besides these, as far as the checkpoint tells."""
        known, orders = {*keys}, self._orders.get(path, {})
        beside = set[str]().union(*(order for order in orders if known < order))
        return [key for key in self._positions.get(path, {}) if key in beside - known]

    def has_own(self, name: str) -> bool:
        """Returns whether the rank whose place this one takes has saved anything at or below this name."""
        return self._as_many and (self._rank_values(0).reach(name) or at_or_below(self._names(0), name))

    def others_alone(self, name: str) -> bool:
        """Returns whether the rank whose place this one takes has saved nothing under this name."""
        if not self._as_many or len(self._digests) == 1:
            return False
        return name not in self.values and not at_or_below(self._names(0), name)

    def is_of_others(self, name: str) -> bool:
        """Returns whether it is an object with tensors of which each rank had its own, and this one has none."""
        if name not in self.objects or at_or_below(self._names(0), name):
            return False
        layout = self.first_layouts[name]
        return any(below not in self.first_layouts for below in names_below(self._names(layout), name))

    def same(self, first: str, second: str, boxes: Sequence[Box] | None = None) -> bool:
        """Returns whether two saved tensors, by any of their names, are one, or are equal, at least in `boxes`."""
        if first == second or first not in self.tensors:
            return first == second
        one, other = self.tensors[first].name, self.tensors[second].name
        return one == other or self._reader.same_bytes(one, other, boxes)

    def values_with(self, layout: int) -> Mapping[str, Json]:
        """Returns this rank's values if the layout is its own; else those of the first rank that has it."""
        return self._reader.part(self._reader.first_rank(self._digests[layout])).values if layout else self.values

    def values_at(self, name: str) -> Mapping[str, Json]:
        """Returns the values of the one rank from which to take those at and below a name: this rank, if it has saved
        anything there, even only tensors; else the first of another layout that has values there.

        Looks first at the layouts with names nearest to this one, such as that of another stage of a pipeline, and at
        few enough that a name which nobody has saved costs few reads.
        """
        return self._nearest(name).values

    def below(self, name: str) -> list[str]:
        """Returns the names of `values_at(name)` below it, without it, in the order that they were saved in."""
        return self._nearest(name).below(name)

    def _nearest(self, name: str) -> RankValues[Json]:
        own = self._rank_values(0)
        if len(self._digests) == 1 or own.reach(name) or at_or_below(self._names(0), name):
            return own
        for above in (name, *reversed(_above(name))):
            found = self._elsewhere.get(above)
            if found is not None and found.reach(name):
                return found
        for other in map(self._rank_values, islice(self._by_nearness(name), LAYOUTS_ASKED)):
            if other.reach(name):
                self._elsewhere[name] = other
                return other
        return own

    def _rank_values(self, layout: int) -> RankValues[Json]:
        if layout not in self._rank_values_by_layout:
            self._rank_values_by_layout[layout] = RankValues(self.values_with(layout))
        return self._rank_values_by_layout[layout]

    def _by_nearness(self, name: str) -> Iterator[int]:
        """Yields the other layouts: first those with names below the longest path above a name. Looks at a layout only
        when it is asked for: for hundreds of layouts times thousands of names, that would take minutes."""
        left = list(range(1, len(self._digests)))
        for above in reversed(_above(name)):
            beside = []
            for layout in left:
                if any_below(self._names(layout), above):
                    yield layout
                else:
                    beside.append(layout)
            left = beside
        yield from left

    def _names(self, layout: int) -> list[str]:
        """Returns the names of tensors and objects in a layout, sorted."""
        if layout not in self._names_by_layout:
            found = self._reader.layouts[self._digests[layout]]
            self._names_by_layout[layout] = sorted([*found.index, *found.aliases, *found.objects])
        return self._names_by_layout[layout]

    def all_values(self) -> dict[str, Json]:
        """Returns every plain value as it is saved, this rank's own first.

        If one rank saved a value, and another saved tensors or entries under the same name, the first one's counts.
        """
        found: dict[str, Json] = {}
        above: set[str] = set()
        for layout in range(len(self._digests)):
            fit = {
                name: value
                for name, value in self.values_with(layout).items()
                if not layout
                or not (
                    name in above or self._is_held_before(name, layout) or not found.keys().isdisjoint(_above(name))
                )
            }
            found = {**fit, **found}
            above.update(*map(_above, fit))
        return found

    def _is_held_before(self, name: str, layout: int) -> bool:
        """Returns whether an earlier layout has a tensor or an object at a name or below, or a tensor above."""
        first = self.first_layouts
        if first.get(name, layout) < layout or any(first[n] < layout for n in names_below(self.names, name)):
            return True
        return any(first.get(above, layout) < layout and above in self.tensors for above in _above(name))

    @cached_property
    def first_layouts(self) -> dict[str, int]:
        """First layout that has a tensor or an object, by name. Omits tensors that other ranks have as their own."""
        found: dict[str, int] = {}
        for position, digest in enumerate(self._digests):
            layout = self._reader.layouts[digest]
            for name in chain(layout.index, layout.aliases, layout.objects):
                if name in self.tensors or name in self.objects:
                    found.setdefault(name, position)
        return found

    @cached_property
    def names(self) -> list[str]:
        """Names of all tensors and objects, sorted."""
        return sorted(self.first_layouts)

    def beginning_with(self, head: str, layouts: Collection[int]) -> list[str]:
        """Returns the names that begin with `head`, of all tensors and objects, and of the values in these layouts."""
        sources = [self.names, *(self._rank_values(layout).names for layout in sorted(layouts))]
        return [name for names in sources for name in beginning_with(names, head)]

    def value(self, path: str, depth: int = 0) -> object:
        """Returns this rank's value, else that of another rank. Raises StateMismatch if none has one."""
        near = self.values_at(path)
        if path in near:
            return values.decode(near[path], path, depth)
        for layout in range(len(self._digests)):
            found = self.values_with(layout)
            if path in found:
                return values.decode(found[path], path, depth)
        raise StateMismatch(f"{path}: the layout tells of a value that no part of step {self._reader.step} has")


def _above(name: str) -> list[str]:
    """Returns the paths above a name."""
    return [name[:at] for at, sign in enumerate(name) if sign == "/"]
