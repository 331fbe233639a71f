"""Whether elements of a tensor share memory, compared with a count of the places."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.box import Box
from ckptlib.loading.aliases import place, repeats

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=4)
"""Of each: its size and its step."""


@given(dims=DIMS)
def test_repeats(dims: list[tuple[int, int]]) -> None:
    sizes, steps = [size for size, _ in dims], [step for _, step in dims]
    tensor = torch.zeros(200).as_strided(sizes, steps)
    places = [sum(i * step for i, step in zip(at, steps, strict=True)) for at in product(*map(range, sizes))]
    assert repeats(tensor) == (len({*places}) < len(places))


def test_place() -> None:
    base = torch.zeros(4, 6)

    def of(tensor: torch.Tensor) -> object:
        return place([(Box.whole(tensor.shape), tensor)])

    assert of(base) == of(base.view(4, 6)) == of(torch.nn.Parameter(base).detach())
    others = [base.clone(), base[:2], base[1:], base.view(6, 4), base.view(torch.int32), base.view(2, 12).t()]
    assert len({of(base), *map(of, others)}) == 1 + len(others)
    complex_ = torch.zeros(3, dtype=torch.complex64)
    assert of(complex_) != of(complex_.conj())
