"""Plain values in mappings that cannot be changed: a load that would leave them as they are says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from onerank import Root

import ckptlib
from ckptlib import PerRank, StateMismatch

MAKE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "directly": lambda epoch: {"at": MappingProxyType({"epoch": epoch})},
    "in a tuple": lambda epoch: {"at": MappingProxyType({"epoch": (0, epoch)})},
    "per rank": lambda epoch: {"at": MappingProxyType({"epoch": PerRank(epoch)})},
}


@pytest.fixture(autouse=True)
def _close(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "root" not in request.fixturenames:
        close_sessions()


@pytest.mark.parametrize("kind", MAKE)
def test_another_value_is_a_mismatch(root: Root, kind: str) -> None:
    root.save({**MAKE[kind](3), "w": torch.ones(1)})
    w = torch.zeros(1)
    with pytest.raises(
        StateMismatch, match=r"at/epoch: is (0|\(0, 0\)), the checkpoint has (3|\(0, 3\)), and the mapping around it"
    ):
        root.load({**MAKE[kind](0), "w": w})
    assert not w.any(), "nothing was filled"
    root.load({**MAKE[kind](0), "w": w}, only="w")
    assert w.all()


@pytest.mark.parametrize("kind", MAKE)
def test_the_same_value_and_a_changeable_one_beside_it(root: Root, kind: str) -> None:
    root.save({**MAKE[kind](3), "below": MappingProxyType({"d": {"n": 5}}), "w": torch.ones(1)})
    state = {**MAKE[kind](3), "below": MappingProxyType({"d": {"n": 0}}), "w": torch.zeros(1)}
    root.load(state)
    assert state["below"]["d"] == {"n": 5}
    assert state["w"].all()


@pytest.mark.parametrize("random", [False, True])
def test_the_state_itself(tmp_path: Path, random: bool) -> None:
    ckptlib.save(tmp_path, {"epoch": 3, "w": torch.ones(1)}, 1)
    with pytest.raises(StateMismatch, match="epoch: is 0, the checkpoint has 3"):
        ckptlib.load(tmp_path, MappingProxyType({"epoch": 0, "w": torch.zeros(1)}), 1, random=random)
    with ckptlib.Checkpointer(tmp_path, MappingProxyType({"epoch": 3, "w": torch.zeros(1)}), every=1) as ckpt:
        assert ckpt.restore().step == 1
