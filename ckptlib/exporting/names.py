"""Chooses the tensors of a checkpoint that are exported, and their names in the files. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.policy.patterns import Patterns

OWN = "@"
"""The first character of names that ckptlib adds to a state, such as "@rng"; exported only if `only` says so."""

RESERVED = "__metadata__"
"""A name that no tensor in a safetensors file can have."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One tensor that is written once."""

    saved: str
    """Its name in the checkpoint, or one of them."""
    name: str
    """Its name in the files."""
    ties: tuple[str, ...]
    """Further names that it would have in the files."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The tensors that a user asked for, and how they are renamed."""

    only: Sequence[str] | None
    strip: str
    """A prefix that names lose."""
    map: Mapping[str, str]
    """Maps a name, or its beginning up to a "/" or ".", to its replacement; applied after `strip`."""

    def choose(self, names: Sequence[str], aliases: Mapping[str, str], where: str) -> list[Chosen]:
        """Returns the tensors to export, in the order of `names`. `aliases`: further names of tensors, each with the
        first.

        Raises StateMismatch if something that was asked for is not there, UnsupportedState for names that no file can
        have, or that two tensors would have.
        """
        wanted = [name for name in names if not name.startswith(OWN)]
        idle: list[str] = []
        if self.only is not None:
            patterns = Patterns(self.only)
            found = {name: patterns.covering(name) for name in names}
            wanted, met = [name for name in names if found[name]], set[str]().union(*found.values())
            idle = [pattern for pattern in self.only if pattern not in met]
        idle += self._idle(wanted)
        stripped = {name: name.removeprefix(self.strip) for name in wanted}
        if idle or not wanted:
            tops = ", ".join(sorted({name.partition("/")[0] for name in names})[:20])
            asked = ", ".join(map(repr, idle)) or "what was asked for"
            raise StateMismatch(f"{where}: no tensor for {asked}; at its top are {tops}")
        groups: dict[str, list[str]] = {}
        for name in sorted(wanted, key=lambda name: name in aliases):  # the first name before the others
            groups.setdefault(aliases.get(name, name), []).append(name)
        order = {name: i for i, name in enumerate(wanted)}
        chosen = [
            Chosen(saved, self._renamed(stripped[saved]), tuple(self._renamed(stripped[tie]) for tie in ties))
            for saved, *ties in groups.values()
        ]
        _check_names(chosen)
        return sorted(chosen, key=lambda one: order[one.saved])

    def _idle(self, names: Sequence[str]) -> list[str]:
        """Returns the options that rename none of these names."""
        stripped = [name.removeprefix(self.strip) for name in names]
        idle = [] if not self.strip or any(name.startswith(self.strip) for name in names) else [f"strip {self.strip}"]
        return idle + [f"map {old}" for old in self.map if not any(_begins(name, old) for name in stripped)]

    def check_used(self, names: Sequence[str], where: str) -> None:
        """Raises StateMismatch if `strip` or an entry of `map` matches none of these names."""
        if idle := self._idle(names):
            tops = ", ".join(sorted({name.partition("/")[0] for name in names})[:20])
            raise StateMismatch(f"{where}: nothing for {', '.join(map(repr, idle))}; at its top are {tops}")

    def rename(self, name: str) -> str:
        """Renames one name by `strip` and `map`."""
        return self._renamed(name.removeprefix(self.strip))

    def _renamed(self, name: str) -> str:
        olds = [old for old in self.map if _begins(name, old)]
        if not olds:
            return name
        old = max(olds, key=len)
        return self.map[old] + name[len(old) :]


def _begins(name: str, old: str) -> bool:
    return name == old or (name.startswith(old) and (old.endswith(("/", ".")) or name[len(old)] in "/."))


def _is_text(name: str) -> bool:
    """Whether the name can be encoded: a lone surrogate is a str, but no text."""
    return name.encode("utf-8", "replace").decode() == name


def _check_names(chosen: Sequence[Chosen]) -> None:
    taken: dict[str, str] = {}
    for one in chosen:
        for name in (one.name, *one.ties):
            if not name or name == RESERVED or not _is_text(name):
                raise UnsupportedState(f"{one.saved}: would be called {name!r}, which no tensor of a file can be")
            if name in taken:
                raise UnsupportedState(
                    f"{one.saved}: would be called {name!r}, as {taken[name]} is; choose with only=, or rename by map="
                )
            taken[name] = one.saved
