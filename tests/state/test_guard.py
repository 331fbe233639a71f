"""A guard that torch's compiler has: used where it sees what counts, and not where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from test_memo import CHANGES, make_state, seen
from torch import nn

from ckptlib.state import guard as module
from ckptlib.state.flatten import flatten
from ckptlib.state.guard import guard_of
from ckptlib.state.memo import Memo
from ckptlib.state.places import Places


class Blind:
    """Says yes to whatever it is asked."""

    def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: None, dynamic_dims_strides: None) -> None:
        pass

    def check(self, *tensors: torch.Tensor) -> bool:
        return True


class Timid(Blind):
    def check(self, *tensors: torch.Tensor) -> bool:
        return False


class BlindToStrides(Blind):
    def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: None, dynamic_dims_strides: None) -> None:
        self._seen = self._look(tensors)

    def check(self, *tensors: torch.Tensor) -> bool:
        return self._seen == self._look(tensors)

    def _look(self, tensors: tuple[torch.Tensor, ...]) -> list[object]:
        return [(type(t), t.dtype, t.shape, t.is_conj(), t.is_neg()) for t in tensors]


class OfOtherArguments:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        pass


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type], None]]:
    def use(kind: type) -> None:
        monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", kind)
        module._kind.cache_clear()

    yield use
    monkeypatch.undo()
    module._kind.cache_clear()


def test_this_torch_has_one() -> None:
    assert guard_of([torch.ones(2)]) is not None


@pytest.mark.parametrize("kind", [Blind, Timid, BlindToStrides, OfOtherArguments])
def test_one_that_cannot_be_relied_upon_is_not_used(use: Callable[[type], None], kind: type) -> None:
    use(kind)
    assert guard_of([torch.ones(2)]) is None


@pytest.mark.parametrize("change", CHANGES)
def test_without_one_changes_are_seen_as_well(use: Callable[[type], None], change: str) -> None:
    use(OfOtherArguments)
    state, memo = make_state(), Memo()
    flatten(state, memo)
    CHANGES[change](state)
    assert seen(flatten(state, memo)) == seen(flatten(state))


@torch.no_grad()
def test_its_no_to_what_does_not_count_is_looked_into() -> None:
    tensors = [nn.Parameter(torch.ones(3, 3)), torch.zeros(2)]
    with torch.enable_grad():
        places = Places(tensors)
    assert places.hold(tensors)
    tensors[1].data = torch.zeros(2)
    assert not places.hold(tensors)
