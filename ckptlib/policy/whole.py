"""Checks whole numbers that users give, at once: the writer process would find a wrong one too late."""

from __future__ import annotations


def check_whole(where: str, value: object) -> None:
    """Raises TypeError for a bool, and for anything but an int. `where`: how the user has written it, such as
    "Keep(last=1.5)"."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where}: expected a whole number, not a {type(value).__name__}")
