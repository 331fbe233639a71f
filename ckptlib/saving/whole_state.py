"""The names under which everything is saved: the user's state, and ckptlib's own entries beside it."""

from __future__ import annotations

from collections.abc import Mapping

RNG = "@rng"
"""Where the random generators are kept, beside the user's own names."""


def whole_state(state: object, generators: object) -> dict[object, object]:
    """Raises TypeError for a state that is no dict, ValueError for one that uses ckptlib's own name."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state must be a dict of what to save, such as {{'model': model, 'optim': optim}}; got "
            f"{type(state).__name__}"
        )
    if RNG in state:
        raise ValueError(f"{RNG!r} is reserved for ckptlib; rename that entry of the state")
    return {**state, RNG: generators}
