"""The plain values that one rank has saved, by name; found by the names above them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice, takewhile

from ckptlib.format.values import Json


def any_below(names: Sequence[str], name: str) -> bool:
    """Whether any of the sorted names is below one."""
    at = bisect_left(names, f"{name}/")
    return at < len(names) and names[at].startswith(f"{name}/")


def at_or_below(names: Sequence[str], name: str) -> bool:
    """Whether any of the sorted names is one, or below it."""
    at = bisect_left(names, name)
    return names[at : at + 1] == [name] or any_below(names, name)


class RankValues:
    """Of one rank."""

    def __init__(self, values: Mapping[str, Json]) -> None:
        self.values = values

    def reach(self, name: str) -> bool:
        """Whether there is a value at a name or below it."""
        return name in self.values or any_below(self._names, name)

    def below(self, name: str) -> list[str]:
        """The names below a name, without it, in the order that they were saved in."""
        head, names = f"{name}/", self._names
        found = takewhile(lambda saved: saved.startswith(head), islice(names, bisect_left(names, head), None))
        return [saved[len(head) :] for saved in sorted(found, key=self._positions.__getitem__)]

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.values)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.values)}
