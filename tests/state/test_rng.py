"""Draws go on bit for bit where they stopped."""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onerank import opened

from ckptlib.errors import FormatError, StateMismatch, UnsupportedState
from ckptlib.state import rng
from ckptlib.state.rng import LoadedRng, RngState, capture, derive, restore

HOST = {"python", "numpy", "torch"}


@pytest.fixture(autouse=True)
def _generators_of_others() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draws() -> list[object]:
    """A bit of everything, odd numbers of normals included: generators keep the second one of each pair."""
    dropped = torch.nn.functional.dropout(torch.ones(33), 0.5, training=True)
    return [
        [random.random(), random.gauss(0, 1), random.getrandbits(70), random.sample(range(99), 5)],
        [np.random.rand(3).tolist(), np.random.normal(size=3).tolist(), np.random.permutation(9).tolist()],
        [torch.rand(5).tolist(), torch.randn(3).tolist(), torch.randn(40).tolist(), torch.randperm(9).tolist()],
        dropped.tolist(),
    ]


def disturb() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.normal()


@pytest.mark.parametrize("before", [0, 1, 2, 700])
def test_draws_go_on(before: int) -> None:
    for _ in range(before):
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    state = capture()
    expected = [draws(), draws()]
    disturb()
    restore(state)
    assert [draws(), draws()] == expected


def test_a_pending_gauss_is_kept() -> None:
    random.seed(5)
    np.random.seed(5)
    random.gauss(0, 1), np.random.normal()
    assert random.getstate()[2] is not None
    assert np.random.get_state(legacy=False)["has_gauss"] == 1
    state = capture()
    expected = random.gauss(0, 1), np.random.normal()
    disturb()
    restore(state)
    assert (random.gauss(0, 1), np.random.normal()) == expected


def test_capture_draws_nothing_and_is_a_copy() -> None:
    state = capture()
    kept = {name: value.clone() for name, value in state.items()}
    draws()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    restore(state)
    again = capture()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_what_it_holds() -> None:
    state = capture()
    assert state.keys() >= HOST
    for value in state.values():
        assert (value.dtype, value.ndim, value.device.type) == (torch.uint8, 1, "cpu")
    python = struct.unpack("<I625IBd", state["python"].numpy().tobytes())
    version, words, gauss = random.getstate()
    assert python == (version, *words, gauss is not None, gauss or 0.0)
    numpy = struct.unpack("<624IIId", state["numpy"].numpy().tobytes())
    _, key, *rest = np.random.get_state()
    assert numpy == (*key.tolist(), *rest)


def test_a_member_gives_the_same_tensors_with_the_newest_state() -> None:
    member = RngState()
    first = member.state_dict()
    before = plain(first)
    draws()
    second = member.state_dict()
    assert all(second[name] is tensor for name, tensor in first.items())
    assert plain(second) == plain(capture()) != before


def test_as_a_member_of_the_state() -> None:
    member = RngState()
    state = member.state_dict()
    expected = draws()
    RngState().load_state_dict(state)
    assert draws() == expected


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        state = capture()
        restore(state)
        derive(state, 1)
    assert state["torch"].device.type == "cpu"


# -- derived states --


def plain(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in state.items()}


def test_derived_states_differ_by_rank_and_by_source() -> None:
    state = capture()
    draws()
    other = capture()
    derived = [plain(s) for s in (state, derive(state, 0), derive(state, 1), derive(state, 2), derive(other, 1))]
    for name in HOST:
        assert all(a[name] != b[name] for i, a in enumerate(derived) for b in derived[:i])


def test_derived_states_are_deterministic_and_usable() -> None:
    state = capture()
    first = derive(state, 7)
    draws()
    assert plain(derive(state, 7)) == plain(first)
    restore(first)
    expected = draws()
    restore(first)
    assert draws() == expected
    restore(derive(state, 8))
    assert draws() != expected


def test_torch_seeds_of_many_ranks_do_not_collide() -> None:
    state = capture()
    firsts = set()
    for rank in range(300):
        torch.set_rng_state(derive(state, rank)["torch"])
        firsts.add(tuple(torch.randint(2**31, (4,)).tolist()))
    assert len(firsts) == 300


def test_one_rank_speaks_for_all_that_derive_theirs(caplog: pytest.LogCaptureFixture) -> None:
    """A job that grows from 512 ranks to 1,024 would print 512 lines."""
    state = capture()
    loaded = [LoadedRng(rank, 2) for rank in range(5)]
    for generators in loaded:
        generators.load_state_dict(dict(state))
    assert len({str(plain(generators.loaded())) for generators in loaded}) == 1 + 3
    [text] = caplog.messages
    assert "no RNG state for ranks 2 and up" in text


def test_derive_does_not_touch_the_generators() -> None:
    state = capture()
    expected = draws()
    restore(state)
    derive(state, 3)
    assert draws() == expected


# -- refusals --


def without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("name", sorted(HOST))
def test_a_missing_generator_is_named(name: str) -> None:
    with pytest.raises(StateMismatch, match=name):
        restore(without(capture(), name))


@pytest.mark.parametrize("name", sorted(HOST))
@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda t: t[:-1],
        lambda t: torch.cat([t, t[:1]]),
        lambda t: t[:0],
        lambda t: t.to(torch.int16),
        lambda t: t.reshape(1, -1),
        lambda t: t.to("meta"),
        lambda t: t.tolist(),
        lambda t: torch.full_like(t, 255),
    ],
    ids=["zeros", "short", "long", "empty", "dtype", "2-d", "meta", "list", "garbage"],
)
def test_what_is_no_state_is_refused_and_nothing_is_set(name: str, change: Callable[[torch.Tensor], object]) -> None:
    good = capture()
    draws()
    before = plain(capture())
    with pytest.raises(FormatError, match=f"random state of {name}"):
        restore({**good, name: change(good[name])})
    assert plain(capture()) == before


def test_positions_beyond_the_words_are_refused() -> None:
    state = capture()
    for name, offset in [("python", 4 + 4 * 624), ("numpy", 4 * 624)]:
        bad = state[name].clone()
        bad[offset : offset + 4] = torch.tensor(list(struct.pack("<I", 625)), dtype=torch.uint8)
        with pytest.raises(FormatError, match=name):
            restore({**state, name: bad})


@given(st.binary(min_size=2512, max_size=2513))
def test_any_bytes_are_a_state_or_a_format_error(data: bytes) -> None:
    good = capture()
    value = torch.tensor(list(data), dtype=torch.uint8)
    for name in ("python", "numpy"):
        try:
            restore({**good, name: value})
        except FormatError:
            continue
        assert len(capture()[name]) == len(data)


def test_devices_that_are_not_here_are_skipped_loudly(caplog: pytest.LogCaptureFixture) -> None:
    state = capture()
    expected = draws()
    foreign = {"cuda:99": state["torch"][:16], "xyz": state["torch"][:16]}
    with caplog.at_level(logging.WARNING):
        restore({**state, **foreign})
        derived = derive({**state, **foreign}, 1)
    assert "cuda:99" in caplog.text
    assert "xyz" in caplog.text
    assert not derived.keys() & foreign.keys()
    assert draws() == expected


def test_a_device_that_is_not_here_is_skipped_wherever_new_tensors_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its state is loaded all the same: a rank beyond the saved ones derives its own of all that there is."""
    with opened(tmp_path) as root:
        foreign = torch.arange(16, dtype=torch.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(rng, "capture", lambda: {**capture(), "cuda:99": foreign})
            root.save({"a": 0})
        expected = draws()
        with caplog.at_level(logging.WARNING), torch.device("meta"):
            root.load({"a": 0}, random=True)
        assert "random state of cuda:99 skipped" in caplog.text
        assert draws() == expected


def test_another_bit_generator_in_numpy_is_refused() -> None:
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UnsupportedState, match="PCG64"):
            capture()
    finally:
        np.random.set_bit_generator(original)


@pytest.mark.accelerator
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's generator")
def test_cuda_draws_go_on_on_the_current_device() -> None:
    def draw() -> list[float]:
        return [*torch.randn(5, device="cuda").tolist(), *torch.rand(5, device="cuda").tolist()]

    draw()
    state = capture()
    assert {"cuda"} <= state.keys() - HOST
    expected = draw()
    derived = derive(state, 1)
    torch.cuda.manual_seed(1)
    restore(state)
    assert draw() == expected
    restore(derived)
    assert draw() != expected
    with pytest.raises(FormatError, match="cuda"):
        restore({**state, "cuda": state["cuda"][:-1]})
