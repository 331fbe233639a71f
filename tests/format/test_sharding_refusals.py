"""Names of placements, and layouts that are refused: for what they are, or since torch reads them in two ways."""

from __future__ import annotations

import itertools
import re

import pytest
from helpers.meshes import Shape, coordinates, placements_of
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.sharding import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    coordinates_touching,
    decode,
    encode,
    pieces,
    shape_local,
)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Replicate(), "R"),
        (Shard(0), "S0"),
        (Shard(12), "S12"),
        (StridedShard(0, 2), "SS0x2"),
        (StridedShard(3, 10), "SS3x10"),
    ],
)
def test_names_of_placements(placement: Placement, text: str) -> None:
    assert encode(placement) == text
    assert decode(text) == placement


@given(
    st.one_of(
        st.just(Replicate()),
        st.builds(Shard, st.integers(0, 10**9 - 1)),
        st.builds(StridedShard, st.integers(0, 99), st.integers(1, 10**9 - 1)),
    )
)
def test_names_come_back(placement: Placement) -> None:
    assert decode(encode(placement)) == placement


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r",
        "R0",
        "S",
        "S-1",
        "S01",
        "S+1",
        "S1 ",
        " S1",
        "S1\n",
        "S\u0661",
        "SS0",
        "SS0x",
        "SS0x0",
        "SS0x02",
        "SS0X2",
        "P",
        "S" + "9" * 5000,
    ],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(FormatError, match="not a placement"):
        decode(text)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "coordinate", "message"),
    [
        ((4,), (2,), (Shard(1),), (0,), "no such dim"),
        ((), (2,), (Shard(0),), (0,), "no such dim"),
        ((4,), (2, 2), (Shard(0),), (0, 0), "one per axis"),
        ((4,), (2,), (Shard(0),), (2,), "not in a mesh"),
        ((4,), (2,), (Shard(0),), (-1,), "not in a mesh"),
        ((4,), (2,), (Shard(0),), (0, 0), "not in a mesh"),
        ((4,), (0,), (Shard(0),), (0,), "not a tensor on a mesh"),
        ((-4,), (2,), (Shard(0),), (0,), "not a tensor on a mesh"),
    ],
)
def test_what_is_no_layout_is_refused(
    shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...], coordinate: Shape, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pieces(shape, mesh_shape, placements, coordinate)
    with pytest.raises(ValueError, match=message):
        shape_local(shape, mesh_shape, placements, coordinate)


def test_what_is_no_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="dim >= 0"):
        Shard(-1)
    with pytest.raises(ValueError, match="dim >= 0"):
        StridedShard(-1, 2)
    with pytest.raises(ValueError, match="split_factor >= 1"):
        StridedShard(0, 0)


def test_a_box_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside"):
        coordinates_touching((4,), (2,), (Shard(0),), Box((2,), (3,)))


def test_two_readings_are_refused_on_every_coordinate_alike_and_the_advice_helps() -> None:
    """50257 rows (GPT-2's tokens), tensor parallel by 2: FSDP over 8 leaves the two halves cut at different places."""
    mesh_shape, placements = (8, 2), (StridedShard(0, 2), Shard(0))
    for coordinate in coordinates(mesh_shape):
        with pytest.raises(UnsupportedState, match=re.escape("size 50257, sharded as SS0x2 over 8, then S0 over 2")):
            pieces((50257, 64), mesh_shape, placements, coordinate)
    with pytest.raises(UnsupportedState, match=re.escape("multiple of 2 (50258)")):
        coordinates_touching((50257, 64), mesh_shape, placements, Box.whole((50257, 64)))
    assert shape_local((50258, 64), mesh_shape, placements, (7, 1)) == (25129 - 7 * 3142, 64)


def test_padding_as_advised_always_helps() -> None:
    num_refused = 0
    for mesh_shape in [(3, 2), (4, 2), (2, 3, 2), (4, 2, 3)]:
        for size, placements in itertools.product(range(40), placements_of(1, mesh_shape)):
            try:
                shape_local((size,), mesh_shape, placements, (0,) * len(mesh_shape))
            except UnsupportedState as error:
                padded = re.search(r"multiple of \d+ \((\d+)\)", str(error))
                if padded is not None:
                    num_refused += 1
                    shape_local((int(padded[1]),), mesh_shape, placements, (0,) * len(mesh_shape))
    assert num_refused > 0


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 4)], ids=str)
def test_fsdp_over_two_is_never_refused(mesh_shape: Shape) -> None:
    for size in range(200):
        shape_local((size,), mesh_shape, (StridedShard(0, mesh_shape[1]), Shard(0)), (1, 1))


def test_split_factors_that_no_axes_make_are_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"SS0x3 over 2, then S0 over 2 ranks: no order .* Redistribute"):
        pieces((12,), (2, 2), (StridedShard(0, 3), Shard(0)), (0, 0))
    assert shape_local((12,), (2, 2), (StridedShard(0, 3), Replicate()), (0, 0)) == (6,)
    assert shape_local((12,), (2, 1), (StridedShard(0, 3), Shard(0)), (0, 0)) == (6,)
