"""Compares a saved place in the data with the data that is there now."""

from __future__ import annotations

from collections.abc import Mapping

from ckptlib.errors import StateMismatch


def checked_counts(state: Mapping[str, object], identity: Mapping[str, object], *counts: str) -> list[int]:
    """Returns the values of `counts`, which are integers from 0. Raises StateMismatch if one is not, or if `state`
    lacks a name of `counts` or `identity`."""
    missing = sorted({*counts, *identity} - state.keys())
    if missing:
        raise StateMismatch(
            f"the saved place in the data lacks {missing}: another kind of loader saved {sorted(state)}. Resume with "
            "that one. To begin the data anew, put this one into the state under another name: restore(strict=False)"
        )
    found = [value for count in counts if type(value := state[count]) is int and value >= 0]
    if len(found) < len(counts):
        raise StateMismatch(f"the saved place in the data: expected integers from 0 for {list(counts)}, got {state}")
    return found


def refuse_others(state: Mapping[str, object], identity: Mapping[str, object], why: str = "") -> None:
    """Raises StateMismatch if the data is not what it was when saved. `why`: a clause of its message."""
    for name, value in identity.items():
        if state[name] != value:
            raise StateMismatch(
                f"the data has {name} {value!r}, and the checkpoint was saved with {state[name]!r}: going on from its "
                f"place would train on some items twice and on others never{why}. Resume with {name} {state[name]!r}"
            )
