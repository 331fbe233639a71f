"""Lists of plain values, such as losses so far: a load makes them as long as they were when they were saved."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

from ckptlib.format.paths import join
from ckptlib.format.values import Json
from ckptlib.loading.load_plan import LoadPlan, Setter
from ckptlib.reading.rank_values import any_below


class ListTargets:
    """Adds lists of plain values to a plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._saved = plan.saved

    def add(self, node: list[object], path: str) -> int:
        """Plans to give a list the values that it lacks, and to remove those that were not saved.

        Returns how many of its entries stay, to be filled. The length stays as it is if the saved list held anything
        but plain values, or was empty, since an empty list is saved whole.
        """
        plan, saved = self._plan, self._entries(path)
        if not saved:
            return len(node)
        more = [plan.take_value(entry) for entry in saved[len(node) :]]

        def resize() -> None:
            node[len(saved) :] = more

        plan.then(resize)
        return min(len(node), len(saved))

    def add_tuple(self, node: tuple[object, ...], path: str, given: Setter) -> bool:
        """Plans to replace a tuple that was saved with another length. Returns whether it was."""
        saved = self._entries(path)
        if given is None or not saved or len(saved) == len(node):
            return False
        value = tuple(map(self._plan.take_value, saved))
        self._plan.then(lambda: given(value))
        return True

    def _entries(self, path: str) -> list[str]:
        """Returns the paths of a list's saved entries; none if it held anything but plain values."""
        plan, values = self._plan, self._saved.values_at(self._plan.named(path))
        paths = (join(path, i) for i in count())
        saved = [*takewhile(lambda entry: plan.wanted(entry) and plan.named(entry) in values, paths)]
        return [] if self._goes_on(plan.named(join(path, len(saved))), values) else saved

    def _goes_on(self, name: str, values: Mapping[str, Json]) -> bool:
        """Returns whether anything was saved under this name, or below it."""
        saved = self._saved
        at_it = name in values or name in saved.tensors or name in saved.objects
        return at_it or any_below(saved.names, name) or bool(saved.below(name))
