"""The rule by which a user's pattern names tensors, wherever a user gives patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def covers(pattern: str, name: str) -> bool:
    """Returns whether `pattern` is the name, a path above it, or matches it by fnmatch; its "*" matches "/", too."""
    return fnmatchcase(name, pattern) or name == pattern or name.startswith(f"{pattern}/")


_SIGNS = frozenset("*?[")
"""Without these characters, fnmatch takes a pattern for a name."""


class Patterns:
    """Several patterns. Thousands of them may be plain names, which are looked up."""

    def __init__(self, patterns: Iterable[str]) -> None:
        given = [*patterns]
        self._names = {pattern for pattern in given if _SIGNS.isdisjoint(pattern)}
        self._others = {pattern for pattern in given if pattern not in self._names}

    def covering(self, name: str) -> set[str]:
        """Returns the patterns that cover a name."""
        found = {pattern for pattern in self._others if covers(pattern, name)}
        if self._names:
            found.update(self._names.intersection((name, *(name[:at] for at, sign in enumerate(name) if sign == "/"))))
        return found


def patterns_of(option: str, given: object) -> list[str]:
    """Returns the names or patterns given for an option, one or several. Raises TypeError for anything but texts, and
    for an iterator, which can be read only once: a load may be tried again."""
    patterns: list[object] = [given] if isinstance(given, str) or not isinstance(given, Collection) else [*given]
    texts = [pattern for pattern in patterns if isinstance(pattern, str)]
    if len(texts) < len(patterns):
        raise TypeError(
            f"{option}={given!r}: expected names or patterns, such as {option}='model/*' or {option}=['model', 'optim']"
        )
    return texts
