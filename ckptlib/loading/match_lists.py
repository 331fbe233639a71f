"""Lists of plain values, such as losses so far: a load makes them as long as they were when they were saved."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import count, takewhile

from ckptlib.format.paths import join
from ckptlib.loading.load_plan import LoadPlan, Setter


class ListTargets:
    """Adds lists of plain values to a plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._saved = plan.saved

    @cached_property
    def _names(self) -> list[str]:
        """All that were saved, sorted."""
        return sorted({*self._saved.tensors, *self._saved.objects, *self._saved.values})

    def add(self, node: list[object], path: str) -> int:
        """Has a list get the values that it lacks, and lose those that were not saved.

        Returns how many of its entries stay, to be filled. The length stays where the saved list held anything but
        plain values, and where it was empty, as which it was saved whole.
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
        """Has a tuple that was saved with another length be replaced. Returns whether one was."""
        saved = self._entries(path)
        if given is None or not saved or len(saved) == len(node):
            return False
        value = tuple(map(self._plan.take_value, saved))
        self._plan.then(lambda: given(value))
        return True

    def _entries(self, path: str) -> list[str]:
        """The paths of a list's saved entries; none where it held anything but plain values."""
        plan, values = self._plan, self._saved.values
        paths = (join(path, i) for i in count())
        saved = [*takewhile(lambda entry: plan.wanted(entry) and plan.named(entry) in values, paths)]
        return [] if self._goes_on(plan.named(join(path, len(saved)))) else saved

    def _goes_on(self, name: str) -> bool:
        """Whether anything was saved under this name, or below it."""
        for prefix in (name, f"{name}/"):
            at = bisect_left(self._names, prefix)
            if at < len(self._names) and (self._names[at] == name or self._names[at].startswith(f"{name}/")):
                return True
        return False
