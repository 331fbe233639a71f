"""What the tests of imports share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.formats import format_of

WRITTEN = Path(__file__).parent / "written"


def read(source: Path) -> Foreign:
    """All that a source has, not saved."""
    known = format_of(source)
    foreign = Foreign(known.name)
    known.read(source, foreign)
    return foreign


def whole(foreign: Foreign) -> dict[str, torch.Tensor]:
    """Its tensors, of their boxes."""
    found = {}
    for name, leaf in foreign.leaves.items():
        tensor = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))
        for box, piece in leaf.pieces:
            tensor[box.slices()] = piece
        found[name] = tensor
    return found


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first, second = first.detach().contiguous().flatten(), second.detach().contiguous().flatten()
    return not first.numel() or torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def assert_same_state(first: Mapping[str, object], second: Mapping[str, object]) -> None:
    """Two nested states, bit for bit."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        other = second[key]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert same(value, other), key
        elif isinstance(value, Mapping):
            assert isinstance(other, Mapping)
            assert_same_state(value, other)
        else:
            assert value == other, key


def refuses(source: Path, root: Path, match: str) -> None:
    """With an error of ckptlib's, before the root has anything in it."""
    with pytest.raises(ckptlib.CkptError, match=match):
        ckptlib.convert(source, root)
    assert not root.exists() or not list(root.rglob("*.json"))
