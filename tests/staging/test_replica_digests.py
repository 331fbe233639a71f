"""What a rank digests of what others hold: the same on ranks that hold the same, another one where they do not.

Ranks are pairs of lists of tensors here: what is claimed is about what is read, not about how ranks talk.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.stage import last_reading
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from ckptlib.devices import accelerator
from ckptlib.format.check import alike
from ckptlib.staging.replica_digests import SAMPLE_BYTES, Replica, ReplicaDigests, Way
from ckptlib.staging.tensor_digests import digest_there, digests_of

BOTH = (0, 1)
LARGE = 40_000
"""Elements of float32: more than goes through the buffer."""


class Rank:
    def __init__(self, rank: int, tensors: dict[str, torch.Tensor], way: Way = Way.WHOLE, late: bool = False) -> None:
        self.rank, self.tensors = rank, tensors
        self.way, self.late = way, late
        self.digests: ReplicaDigests | None = None

    def look(self) -> None:
        replicas = [Replica(BOTH, name, t, self.late, self.way) for name, t in sorted(self.tensors.items())]
        self.digests = ReplicaDigests(replicas, self.digests)

    def read(self, number: int, whole: bool = False) -> tuple[object, frozenset[str]]:
        if self.digests is None:
            self.look()
        assert self.digests is not None
        reading = self.digests.begin(number, whole)
        reading.read_late()
        return reading.finish(self.rank), reading.moved


def agree(ranks: list[Rank], number: int, whole: bool = False) -> bool:
    return alike([rank.read(number, whole)[0] for rank in ranks])  # type: ignore[misc]


def pair(make: Callable[[int], dict[str, torch.Tensor]], way: Way = Way.WHOLE, late: bool = False) -> list[Rank]:
    return [Rank(rank, make(rank), way, late) for rank in BOTH]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "large": torch.randn(LARGE),
        "small": torch.randn(7),
        "scalar": torch.tensor(3.0),
        "bytes": torch.arange(97, dtype=torch.uint8),
        "half": torch.randn(1001).bfloat16(),
        "strided": torch.randn(300, 200).t(),
        "few strided": torch.randn(3, 2).t(),
        "complex": torch.randn(9, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", Way)
def test_the_same_tensors_agree_at_every_save(way: Way, late: bool) -> None:
    ranks = pair(lambda rank: tensors(), way, late)
    assert all(agree(ranks, number, whole) for number in range(1, 30) for whole in (False, True))


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("whole", [False, True])
def test_one_bit_of_what_is_digested_whole_is_found(name: str, whole: bool) -> None:
    def make(rank: int) -> dict[str, torch.Tensor]:
        found = tensors()
        if rank:
            data = found[name].numpy(force=True).copy() if name != "half" else None
            if data is None:
                found[name] = found[name].clone()
                found[name].view(torch.uint8)[-1] ^= 1
            else:
                data.reshape(-1).view(np.uint8)[-1] ^= 1
                found[name] = torch.from_numpy(data)
        return found

    ranks = pair(make, Way.SAMPLED if whole else Way.WHOLE)
    assert not agree(ranks, 1, whole)


def test_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    base = torch.randn(300, 200)
    ranks = pair(
        lambda rank: {
            "a": base if rank else base.t().contiguous().t(),
            "b": base[:3] if rank else base[:3].t().contiguous().t(),
        }
    )
    assert agree(ranks, 1)


@pytest.mark.parametrize("nbytes", [SAMPLE_BYTES + 1, 4 * LARGE])
def test_every_place_is_sampled_sooner_or_later(nbytes: int) -> None:
    """Tensors that differ at one end or the other: whichever window is drawn, it is the same on both ranks."""
    found = []
    for end in (0, -1):
        ranks = pair(lambda rank: {"w": torch.zeros(nbytes, dtype=torch.uint8)}, Way.SAMPLED)
        ranks[1].tensors["w"][end] = 1
        found += [agree(ranks, number) for number in range(1, 3000)]
        if nbytes < 1000:
            assert not all(found)
    assert any(found)  # a sample is no proof
    ranks = pair(lambda rank: {"w": torch.full((LARGE,), float(rank))}, Way.SAMPLED)
    assert not any(agree(ranks, number) for number in range(1, 50))


def test_places_are_new_at_each_save_and_alike() -> None:
    ranks = pair(lambda rank: {f"w{i}": torch.zeros(LARGE) for i in range(3)}, Way.SAMPLED)
    places = []
    for number in range(1, 20):
        readings = []
        for rank in ranks:
            rank.read(number)
            assert rank.digests is not None
            reading = last_reading(rank.digests)
            assert reading is not None
            readings.append(reading.places)
        assert readings[0] == readings[1]
        places += readings[0]
    assert len({*places}) == len(places)


def test_frozen_parameters_that_move_are_found() -> None:
    ranks = pair(lambda rank: {"ema": torch.zeros(LARGE), "base": torch.zeros(LARGE)}, Way.FROZEN)
    for number in range(1, 6):
        read = [rank.read(number) for rank in ranks]
        assert alike([check for check, _ in read])  # type: ignore[misc]
        assert all(moved == (frozenset({"ema"}) if number > 3 else frozenset()) for _, moved in read)
        if number >= 3:
            for rank in ranks:
                rank.tensors["ema"] += 1
        if number == 4:
            for rank in ranks:
                rank.look()  # the state was looked at anew: what was seen before still counts


def test_one_rank_that_moves_alone_is_a_difference() -> None:
    ranks = pair(lambda rank: {"base": torch.zeros(LARGE)}, Way.FROZEN)
    assert agree(ranks, 1)
    ranks[1].tensors["base"] += 1
    assert not agree(ranks, 2)


def test_a_frozen_tensor_that_moved_where_this_save_does_not_look_is_a_difference() -> None:
    """On one rank alone, in the window of the save before: a patch of a table, say."""
    ranks = pair(lambda rank: {"base": torch.zeros(LARGE)}, Way.FROZEN)
    assert agree(ranks, 1)
    assert ranks[1].digests is not None
    seen = last_reading(ranks[1].digests)
    assert seen is not None
    (place,) = seen.places
    ranks[1].tensors["base"].view(torch.uint8)[place] = 1
    assert not agree(ranks, 2)


@pytest.mark.parametrize("byte", [0, 5000, -1])
def test_small_frozen_tensors_are_digested_whole(byte: int) -> None:
    ranks = pair(lambda rank: {"base": torch.zeros(2500), "scale": torch.ones(())}, Way.FROZEN)
    ranks[1].tensors["base"].view(torch.uint8)[byte] = 1
    assert not any(agree(ranks, number) for number in range(1, 9))


def test_what_is_frozen_is_not_compared_to_another_tensor() -> None:
    """Where a state has others from now on, it is no change of any."""
    [rank] = pair(lambda rank: {"a": torch.zeros(LARGE), "b": torch.ones(LARGE)}, Way.FROZEN)[:1]
    rank.read(1)
    del rank.tensors["a"]
    rank.look()
    assert rank.read(2)[1] == frozenset()
    rank.tensors["0"] = torch.full((LARGE,), 2.0)
    rank.look()
    assert rank.read(3)[1] == frozenset()


def test_what_is_late_is_read_late() -> None:
    ranks = pair(lambda rank: {"w": torch.zeros(LARGE)}, Way.WHOLE, late=True)
    found = []
    for rank in ranks:
        rank.look()
        assert rank.digests is not None
        reading = rank.digests.begin(1, whole=False)
        assert reading.late
        rank.tensors["w"] += rank.rank  # in between, as nothing but a torn writer would
        reading.read_late()
        found.append(reading.finish(rank.rank))
    assert not alike(found)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are taken for those of a device, which has the memory of the host."""
    monkeypatch.setattr(accelerator, "device_of", lambda tensor: torch.device("cpu", 0))


@pytest.mark.parametrize("way", Way)
def test_on_a_device_the_same_tensors_agree(on_a_device: None, way: Way) -> None:
    ranks = pair(lambda rank: tensors(), way)
    assert all(agree(ranks, number, whole) for number in range(1, 10) for whole in (False, True))


@pytest.mark.parametrize("name", ["large", "small", "scalar", "bytes", "strided"])
@pytest.mark.parametrize("whole", [False, True])
def test_on_a_device_one_bit_is_found(on_a_device: None, name: str, whole: bool) -> None:
    def make(rank: int) -> dict[str, torch.Tensor]:
        found = tensors()
        if rank:
            data = found[name].numpy(force=True).copy()
            data.reshape(-1).view(np.uint8)[-1] ^= 1
            found[name] = torch.from_numpy(data)
        return found

    assert not agree(pair(make, Way.SAMPLED if whole else Way.WHOLE), 1, whole)


def test_on_a_device_frozen_parameters_that_move_are_found(on_a_device: None) -> None:
    ranks = pair(lambda rank: {"ema": torch.zeros(LARGE), "base": torch.zeros(LARGE)}, Way.FROZEN)
    for number in range(1, 4):
        read = [rank.read(number) for rank in ranks]
        assert alike([check for check, _ in read])  # type: ignore[misc]
        assert all(moved == (frozenset({"ema"}) if number == 3 else frozenset()) for _, moved in read)
        if number == 2:
            for rank in ranks:
                rank.tensors["ema"] += 1


def test_on_a_device_a_snapshot_that_came_to_nothing_moves_no_frozen_parameter(on_a_device: None) -> None:
    """What it read never came to the host, so the next one of this rank alone seemed to find other bytes."""
    ranks = pair(lambda rank: {"base": torch.ones(LARGE)}, Way.FROZEN)
    assert agree(ranks, 1)
    assert ranks[0].digests is not None
    ranks[0].digests.begin(2, whole=False)
    ranks[1].read(2)
    read = [rank.read(3) for rank in ranks]
    assert alike([check for check, _ in read])  # type: ignore[misc]
    assert [moved for _, moved in read] == [frozenset(), frozenset()]


def test_digests_of_a_device_and_of_the_host_tell_the_same_tensors_apart(on_a_device: None) -> None:
    first = torch.randn(3, 1000)
    same, other = first.clone(), first.clone()
    other[2, 999] += 1
    one, two, three = digests_of([first, same, other])
    assert one == two != three


def test_thousands_of_small_tensors_pass_the_buffer() -> None:
    def make(rank: int) -> dict[str, torch.Tensor]:
        return {f"{i:05}": torch.full((2000,), float(i)) for i in range(1000)}  # 8 MB: several times the buffer

    ranks = pair(make)
    assert agree(ranks, 1)
    ranks[1].tensors["00517"][1999] = -1
    assert not agree(ranks, 2)


# -- digests made by torch


def oracle(data: bytes) -> int:
    """Multilinear hashing by Python's integers, from the definition."""
    data += b"\0" * (-len(data) % 4)
    words = np.frombuffer(data, np.int32).tolist()
    row = 1 << 20
    weights = np.random.Philox(key=1).random_raw(min(row, max(len(words), 1))).tolist()
    sums = [
        sum(w * k for w, k in zip(words[i : i + row], weights, strict=False)) % 2**64
        for i in range(0, len(words), row)
        if len(words) - i >= row
    ]
    tail = words[len(words) // row * row :]
    sums.append(sum(w * k for w, k in zip(tail, weights, strict=False)) % 2**64)
    signed = [s - 2**64 if s >= 2**63 else s for s in sums]
    halves = [s & 0xFFFFFFFF for s in signed] + [s >> 32 for s in signed]
    more = np.random.Philox(key=2).random_raw(len(halves)).tolist()
    return sum(h * k for h, k in zip(halves, more, strict=True)) % 2**64


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 4097, (1 << 22) + 4, (1 << 22) * 5 + 7])
def test_a_digest_by_torch_is_what_its_definition_says(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    assert int(digest_there(data)) % 2**64 == oracle(data.numpy().tobytes())


def test_sign_flips_in_pairs_change_a_digest_by_torch() -> None:
    torch.manual_seed(1)
    data = torch.randn(5000)
    found = {int(digest_there(data))}
    for i in range(200):
        flipped = data.clone()
        flipped[i] *= -1
        flipped[i + 1000] *= -1
        found.add(int(digest_there(flipped)))
    assert len(found) == 201


def test_digests_of_views_and_odd_places() -> None:
    data = torch.arange(10_000, dtype=torch.int16)
    assert int(digest_there(data[1:])) == int(digest_there(data[1:].clone()))
    table = torch.randn(30, 40)
    assert digests_of([table.t()]) == digests_of([table.t().contiguous()])
    assert int(digest_there(table.t())) == int(digest_there(table.t().contiguous()))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="before torch 2.8")
def test_digests_of_what_torch_does_not_transpose() -> None:
    """It has no kernel for float4 matrices of 60 x 60 and more."""
    raw = torch.randint(0, 256, (90, 80), dtype=torch.uint8)
    assert digests_of([raw.view(torch.float4_e2m1fn_x2).t()]) == digests_of([raw.t().contiguous()])


def test_a_tensor_can_be_resized_after_its_digest() -> None:
    """numpy's view of it would forbid that for good."""
    tensors = [torch.ones(4), torch.empty(0)]
    assert len({*digests_of(tensors)}) == 2
    for tensor in tensors:
        tensor.resize_(64)
        tensor.untyped_storage().resize_(1024)


def test_a_reading_that_is_over_keeps_no_tensor() -> None:
    """Others keep the reading until all ranks have voted."""
    tensor = torch.zeros(LARGE)
    digests = ReplicaDigests([Replica(BOTH, "t", tensor, False, Way.SAMPLED)])
    reading = digests.begin(1, False)
    reading.finish(0)
    reading.let_go()
    digests.let_go()
    memory = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert memory.expired()
    assert reading.moved == frozenset()


def test_what_was_let_go_is_compared_to_all_the_same() -> None:
    """Tensors that were made for one save die with it; frozen ones beside them are watched."""
    frozen = torch.ones(LARGE)
    first = ReplicaDigests([Replica(BOTH, "frozen", frozen.clone(), False, Way.FROZEN)])
    reading = first.begin(1, whole=False)
    reading.finish(0)
    kept = weakref.ref(first._replicas[0].tensor)
    del reading
    first.let_go()
    gc.collect()
    assert kept() is None
    frozen += 1
    again = ReplicaDigests([Replica(BOTH, "frozen", frozen, False, Way.FROZEN)], first).begin(2, whole=False)
    again.finish(0)
    assert again.moved == {"frozen"}


class Told(tuple[int, ...]):
    """Ranks that know how often they were put into words."""

    num = 0

    @override
    def __repr__(self) -> str:
        Told.num += 1
        return super().__repr__()


def test_ranks_are_put_into_words_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them, and the training waits while places are drawn, at each save."""
    monkeypatch.setattr(Told, "num", 0)
    replicas = [
        Replica(Told((3, 4, 5)), name, torch.randn(size), late=False, way=Way.SAMPLED)
        for name, size in (("large", LARGE), ("small", 1000))
    ]
    digests = ReplicaDigests(replicas)
    for number in range(1, 5):
        digests.begin(number, whole=False)
    assert 0 < Told.num <= 2, "for large tensors and for small ones"
