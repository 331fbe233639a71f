"""The names of a state that a load was asked for, their names in the checkpoint, and which of them either side may
lack: `only=`, `map=` and `optional=`.

Pure: knows neither the state nor the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from ckptlib.policy.patterns import Patterns, patterns_of

Rename = Mapping[str, str] | Callable[[str], str] | None
Only = str | Sequence[str] | None


class Selection:
    """The selection, and the entries of it that no name of the state has matched yet."""

    def __init__(self, only: Only, rename: Rename, optional: str | Sequence[str] = ()) -> None:
        self.patterns = None if only is None else patterns_of("only", only)
        self._asked, self._optional = Patterns(self.patterns or ()), Patterns(patterns_of("optional", optional))
        self._met: set[str] = set()
        """Names of the state that were looked up, one of which a pattern or an entry may have been meant for."""
        self._rename = {} if rename is None or callable(rename) else rename
        self._function = rename if callable(rename) else None
        self._idle_patterns = set(self.patterns or ())
        self._idle_keys = set(self._rename)

    def wanted(self, path: str, *, whole: bool = False) -> bool:
        """Returns whether to load a path of the state. `whole`: all of it or nothing, so that `path/*` matches it."""
        if self.patterns is None:
            return True
        self._met.add(path)
        met = self._asked.covering(path) | (self._asked.covering(f"{path}/") if whole else set())
        self._idle_patterns -= met
        return bool(met)

    def named(self, name: str) -> str:
        """Returns its name in the checkpoint. In a dict, the longest entry counts that is the name or above it."""
        if self._function is not None:
            return self._function(name)
        head = name if self._rename else ""
        if head:
            self._met.add(name)
        while head:
            if head in self._rename:
                self._idle_keys.discard(head)
                return self._rename[head] + name[len(head) :]
            head = head.rpartition("/")[0]
        return name

    def idle(self) -> list[str]:
        """Returns the entries of `only` and `map` that no name of the state has matched, once all were looked up."""
        keys = {key for key in self._idle_keys if self.patterns is None or self._asked.covering(key)}
        return sorted(self._idle_patterns | keys)

    def why_idle(self, asked: str) -> str | None:
        """Returns advice with the name that an idle entry was probably meant for; None if nothing begins like it."""
        met = sorted(self._met)
        at = bisect_left(met, asked)
        if at == len(met) or not met[at].startswith(asked):
            return None
        how = (
            f"give a function, map=lambda name: {self._rename[asked]!r} + name[{len(asked)}:] if "
            f"name.startswith({asked!r}) else name"
            if asked in self._rename
            else f"give a pattern, only={asked + '*'!r}"
        )
        return (
            f"{asked}: not in the state; it is how {met[at]!r} begins, but it stands for whole names and for what is "
            f"below it after a '/'. For a beginning, {how}"
        )

    def is_optional(self, name: str) -> bool:
        """Returns whether either side may lack this name, of the state or of the checkpoint."""
        return bool(self._optional.covering(name))

    def is_asked_for(self, path: str) -> bool:
        """Returns whether the user asked for this path of the state itself, not for all of it."""
        return self.patterns is not None or self.named(path) != path

    def expects(self, saved_name: str) -> bool:
        """Returns whether a name of the checkpoint that was not taken should have been.

        In a partial load, a name that the state fills from elsewhere is excused.
        """
        return self.patterns is None or (
            bool(self._asked.covering(saved_name)) and self.named(saved_name) == saved_name
        )


def check_selection(only: object, rename: object, optional: object) -> None:
    """Raises TypeError for an argument of another type."""
    if only is not None:
        patterns_of("only", only)
    patterns_of("optional", optional)
    if rename is None or callable(rename):
        return
    if not isinstance(rename, Mapping) or not all(isinstance(name, str) for pair in rename.items() for name in pair):
        raise TypeError(
            f"map={rename!r}: expected a function, or a dict from names in the state to names in the checkpoint, such "
            "as {'model': 'net'}"
        )
