"""Which tensors a user's pattern names: the same rule wherever a user gives patterns of names."""

from __future__ import annotations

from fnmatch import fnmatchcase


def covers(pattern: str, name: str) -> bool:
    """Whether `pattern` is the name, a path above it, or matches it as fnmatch does; its "*" matches "/", too."""
    return fnmatchcase(name, pattern) or name == pattern or name.startswith(f"{pattern}/")
