"""Values that one rank has saved, such as its plain values, by name, and searches below a name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Generic, TypeVar

Value = TypeVar("Value")


def any_below(names: Sequence[str], name: str) -> bool:
    """Returns whether any of the sorted names is below `name`."""
    at = bisect_left(names, f"{name}/")
    return at < len(names) and names[at].startswith(f"{name}/")


def at_or_below(names: Sequence[str], name: str) -> bool:
    """Returns whether any of the sorted names is `name`, or below it."""
    at = bisect_left(names, name)
    return names[at : at + 1] == [name] or any_below(names, name)


def names_below(names: Sequence[str], name: str) -> Iterator[str]:
    """Yields the sorted names that are below `name`."""
    return beginning_with(names, f"{name}/")


def beginning_with(names: Sequence[str], head: str) -> Iterator[str]:
    """Yields the sorted names that begin with `head`. Looks at no others: there may be thousands of heads, too."""
    positions = range(bisect_left(names, head), len(names))  # islice() would pass over all that come before
    return takewhile(lambda found: found.startswith(head), map(names.__getitem__, positions))


class RankValues(Generic[Value]):
    """The values of one rank by name."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def reach(self, name: str) -> bool:
        """Returns whether there is a value at a name or below it."""
        return name in self.values or any_below(self.names, name)

    def below(self, name: str) -> list[str]:
        """Returns the names below a name, without it, in the order that they were saved in."""
        found = sorted(names_below(self.names, name), key=self._positions.__getitem__)
        return [saved[len(name) + 1 :] for saved in found]

    @cached_property
    def names(self) -> list[str]:
        """The names, sorted."""
        return sorted(self.values)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.values)}
