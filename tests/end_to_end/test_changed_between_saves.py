"""A save after each way in which a model or an optimizer may change holds what torch's `state_dict()` has."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.changed_states import CHANGES, bits, expected, make_state

import ckptlib


@pytest.mark.slow
def test_a_save_holds_what_there_is(tmp_path: Path) -> None:
    step = 0
    for name, change in CHANGES.items():
        state = make_state()
        for number in range(4):
            if number == 3:
                change(state)
            step += 1
            ckptlib.save(tmp_path, state, step)
        tensors, values = expected(state)
        with ckptlib.open(tmp_path, step) as saved:
            names = [name for name in [*saved.keys()] if not name.startswith("@rng/")]
            found = {key: bits(tensor) for key, tensor in saved.get_tensors(names).items()}
            rest = {key: repr(value) for key, value in saved.values.items()}
        assert found == {key: bits(tensor) for key, tensor in tensors.items()}, name
        assert rest == values, name
