"""Targets of a load that share a part of their memory, with each other or within themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from hypothesis import example, given
from hypothesis import strategies as st
from onerank import Root

import ckptlib
from ckptlib.format.box import Box
from ckptlib.loading.overlaps import set_apart
from ckptlib.reading.reader import Want


@pytest.fixture(autouse=True, scope="module")
def _close() -> Iterator[None]:
    yield
    close_sessions()


def laid(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two slices of a buffer that have ten elements in common, one that reads it otherwise, and all of it."""
    return {"low": flat[:20], "high": flat[10:30], "other": flat[4:8].view(torch.int16), "all": flat}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_so_comes_back(root: Root, dtype: torch.dtype) -> None:
    flat = torch.randn(40).to(dtype)
    flat[5] = torch.nan
    found = torch.zeros(40, dtype=dtype)
    root.move(laid(flat), laid(found))
    assert torch.equal(found.view(torch.uint8), flat.view(torch.uint8))


@pytest.mark.parametrize("name", ["low", "high", "other", "all"])
def test_other_values_for_one_place(root: Root, name: str) -> None:
    """Nothing tells which of the two is meant."""
    saved = {key: value.clone() for key, value in laid(torch.randn(40)).items()}
    saved[name][{"low": 19, "high": 0, "other": 3, "all": 29}[name]] += 1
    with pytest.raises(
        ckptlib.StateMismatch, match=r"its memory is in part that of \w+, \w+, \w+, and step .* other values"
    ):
        root.move(saved, laid(torch.zeros(40)))


def test_within_a_matrix(root: Root) -> None:
    """Columns and rows have elements in common; columns and other columns have not."""
    whole = torch.randn(6, 8)

    def parts(of: torch.Tensor, *names: str) -> dict[str, torch.Tensor]:
        found = {"left": of[:, :3], "right": of[:, 3:], "top": of[:2], "turned": of[:, 2:4].t()}
        return {name: found[name] for name in names}

    for names in (("left", "right"), ("left", "turned", "top")):
        found = torch.zeros(6, 8)
        root.move(parts(whole, *names), parts(found, *names))
        for name, value in parts(found, *names).items():
            assert torch.equal(value, parts(whole, *names)[name])
    saved = {name: value.clone() for name, value in parts(whole, "top", "left").items()}
    saved["left"][1, 2] += 1
    with pytest.raises(ckptlib.StateMismatch, match="its memory is in part that of"):
        root.move(saved, parts(torch.zeros(6, 8), "top", "left"))


def test_equal_names_and_a_parameter(root: Root) -> None:
    """One tensor under two names, and a view in a module of a buffer beside it."""
    flat = torch.randn(12)

    def state(flat: torch.Tensor) -> dict[str, Any]:
        layer = torch.nn.Linear(3, 2)
        layer.weight = torch.nn.Parameter(flat[:6].view(2, 3))
        layer.bias = torch.nn.Parameter(flat[6:8])
        return {"model": layer, "flat": flat, "same": flat}

    found = torch.zeros(12)
    with torch.inference_mode():
        root.move(state(flat), state(found))
    assert torch.equal(found, flat)


def repeated(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two expanded tensors, one of which another lies beside, and windows that slide over a signal."""
    return {"wide": flat[:3, None].expand(3, 4), "deep": flat[3:5].expand(2, 3, 2), "windows": flat[4:].unfold(0, 4, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_elements_in_one_place(root: Root, dtype: torch.dtype) -> None:
    flat = torch.randn(12).to(dtype)
    flat[1] = flat[2]
    found = torch.zeros(12, dtype=dtype)
    root.move(repeated(flat), repeated(found))
    assert torch.equal(found, flat)


@pytest.mark.parametrize("name", ["wide", "deep", "windows"])
def test_other_values_for_elements_in_one_place(root: Root, name: str) -> None:
    saved = {key: value.clone() for key, value in repeated(torch.randn(13)[:12]).items()}
    saved[name].view(-1)[-3] += 1
    with pytest.raises(ckptlib.StateMismatch, match=f"{name}: .*other values for them"):
        root.move({name: saved[name]}, {name: repeated(torch.zeros(12))[name]})


def test_an_expanded_buffer_of_a_module(root: Root) -> None:
    """It stays the view that it is of the one beside it."""

    class Scaled(torch.nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.register_buffer("scale", torch.arange(3.0) + start)
            self.register_buffer("grid", self.scale.expand(2, 3))

    module = Scaled(0.0)
    root.move({"model": Scaled(5.0)}, {"model": module})
    assert torch.equal(module.get_buffer("grid"), torch.tensor([[5.0, 6.0, 7.0]]).repeat(2, 1))
    assert module.get_buffer("grid").data_ptr() == module.get_buffer("scale").data_ptr()


PIECE = st.tuples(
    st.integers(0, 30), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=3), st.booleans()
)
"""The begin, each dim's size and step, and whether it is of another dtype."""


@given(drawn=st.lists(PIECE, min_size=2, max_size=4))
@example(
    drawn=[(1, [(3, 2), (3, 2)], False), (2, [], False)]
)  # as many elements as its span has places, in every other
def test_those_that_share(drawn: list[Any]) -> None:
    """All that share an element are set apart, and those that have one twice; nothing is where there is none."""
    base, places, wants, share = torch.zeros(100, dtype=torch.int32), [], [], set()
    for n, (begin, dims, short) in enumerate(drawn):
        of = base.view(torch.int16) if short else base
        piece = of.as_strided([size for size, _ in dims], [step for _, step in dims], begin)
        wants.append(Want(str(n), ((Box.whole(piece.shape), piece),)))
        each = 2 if short else 4
        indices = product(*(range(size) for size, _ in dims))
        firsts = [begin + sum(i * step for i, (_, step) in zip(at, dims, strict=True)) for at in indices]
        share |= {n} if len({*firsts}) < len(firsts) else set()
        places.append({first * each + i for first in firsts for i in range(each)})
    share |= {a for a in range(len(drawn)) if any(places[a] & places[b] for b in range(len(drawn)) if b != a)}
    read, apart = set_apart(wants)
    assert {each.into.name for each in apart} >= {str(n) for n in share}
    assert bool(apart) == bool(share)
    for n, want in enumerate(wants):
        assert (read[n] is want) == (want.name not in {each.into.name for each in apart})


class Far(torch.Tensor):
    """A tensor whose memory seems to begin where that of an Intel GPU does."""

    def data_ptr(self) -> int:
        return super().data_ptr() % 2**40 + 0xFF00_0000_0000_0000


def test_addresses_beyond_int64() -> None:
    flat = torch.zeros(9).as_subclass(Far)
    laid_out = {"low": flat[:5], "high": flat[4:], "alone": torch.zeros(3).as_subclass(Far)}
    _, apart = set_apart([Want(name, ((Box.whole(tuple(t.shape)), t),)) for name, t in laid_out.items()])
    assert {each.read.name: each.others for each in apart} == {"low": ("high",), "high": ("low",)}
