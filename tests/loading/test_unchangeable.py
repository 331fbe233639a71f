"""Plain values in mappings that cannot be changed: a load that would leave them as they are says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions

import ckptlib
from ckptlib import PerRank, StateMismatch

MAKE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "directly": lambda epoch: {"at": MappingProxyType({"epoch": epoch})},
    "in a tuple": lambda epoch: {"at": MappingProxyType({"epoch": (0, epoch)})},
    "per rank": lambda epoch: {"at": MappingProxyType({"epoch": PerRank(epoch)})},
}


@pytest.fixture(autouse=True)
def _close() -> Any:
    yield
    close_sessions()


@pytest.mark.parametrize("kind", MAKE)
def test_another_value_is_a_mismatch(tmp_path: Path, kind: str) -> None:
    ckptlib.save(tmp_path, {**MAKE[kind](3), "w": torch.ones(1)}, 1)
    w = torch.zeros(1)
    with pytest.raises(
        StateMismatch, match=r"at/epoch: is (0|\(0, 0\)), the checkpoint has (3|\(0, 3\)), and the mapping around it"
    ):
        ckptlib.load(tmp_path, {**MAKE[kind](0), "w": w}, 1)
    assert not w.any(), "nothing was filled"
    ckptlib.load(tmp_path, {**MAKE[kind](0), "w": w}, 1, only="w")
    assert w.all()


@pytest.mark.parametrize("kind", MAKE)
def test_the_same_value_and_a_changeable_one_beside_it(tmp_path: Path, kind: str) -> None:
    ckptlib.save(tmp_path, {**MAKE[kind](3), "below": MappingProxyType({"d": {"n": 5}}), "w": torch.ones(1)}, 1)
    state = {**MAKE[kind](3), "below": MappingProxyType({"d": {"n": 0}}), "w": torch.zeros(1)}
    ckptlib.load(tmp_path, state, 1)
    assert state["below"]["d"] == {"n": 5}
    assert state["w"].all()


@pytest.mark.parametrize("random", [False, True])
def test_the_state_itself(tmp_path: Path, random: bool) -> None:
    ckptlib.save(tmp_path, {"epoch": 3, "w": torch.ones(1)}, 1)
    with pytest.raises(StateMismatch, match="epoch: is 0, the checkpoint has 3"):
        ckptlib.load(tmp_path, MappingProxyType({"epoch": 0, "w": torch.zeros(1)}), 1, random=random)
    with ckptlib.Checkpointer(tmp_path, MappingProxyType({"epoch": 3, "w": torch.zeros(1)}), every=1) as ckpt:
        assert ckpt.restore().step == 1
