"""Frames that the store takes as they are made: one pack, whose header is known last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers.persists import OneRank
from typing_extensions import Buffer, override

from ckptlib.errors import StoreError
from ckptlib.stores import LateHead
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify import verify_save
from ckptlib.writer import frame_packs, packs

MIB = 1 << 20


def floats(num_mib: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_mib * MIB // 4).astype(np.float32)


def noise(num_mib: int) -> np.ndarray:
    """No codec makes it smaller."""
    return np.random.default_rng(9).integers(0, 2**32, num_mib * MIB // 4, dtype=np.uint32).view(np.float32)


class Streams(MemoryStore):
    """Tells what it was given with a late head; fails at a piece, if it is to."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[str] = []
        self.fail_at: int | None = None

    @override
    def put(self, key: str, head: Buffer | LateHead, pieces: Iterable[Buffer] = (), **how: Any) -> None:
        if isinstance(head, LateHead):
            self.late.append(key)
            pieces = self._taken(pieces)
        super().put(key, head, pieces, **how)

    def _taken(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        for n, piece in enumerate(pieces):
            if n == self.fail_at:
                raise StoreError("no more, as planned")
            yield piece


def test_however_much_is_encoded_it_is_one_object(tmp_path: Path) -> None:
    store = Streams()
    job, arrays = OneRank(tmp_path, store, "planes"), {"w": floats(40), "v": floats(3, 1), "noise": noise(9)}
    part = job.save(arrays)
    assert len(store.late) == 1
    assert {part.packs[part.table.packs[chunk]].key for chunk in part.codings} == {*store.late}
    assert len(part.codings) > 20
    job.check(part, arrays)
    frames = safetensors.numpy.load(store.get(store.late[0]))
    found = sorted(frame.nbytes for name, frame in frames.items() if not name.startswith("@"))
    assert found == sorted(coding.stored for coding in part.codings.values())


def test_where_no_chunk_becomes_a_frame_no_such_object_is_put(tmp_path: Path) -> None:
    store = Streams()
    job, arrays = OneRank(tmp_path, store, "planes"), {"noise": noise(9)}
    part = job.save(arrays)
    assert store.late == []
    assert not part.codings
    job.check(part, arrays)


def test_an_object_is_cut_after_what_the_store_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_packs, "FRAMES_BYTES", MIB)
    store = Streams()
    store.late_nbytes = 33 * MIB
    job, arrays = OneRank(tmp_path, store, "planes"), {"w": floats(100), "noise": noise(3)}
    part = job.save(arrays)
    assert len(store.late) == 3
    job.check(part, arrays)


@pytest.mark.parametrize("piece", [0, 1, 7])
def test_a_save_whose_frames_the_store_does_not_take_fails_and_the_next_one_is_whole(
    tmp_path: Path, piece: int
) -> None:
    store = Streams()
    job, arrays = OneRank(tmp_path, store, "planes"), {"w": floats(20)}
    job.check(job.save(arrays), arrays)
    arrays["w"] += 1
    store.fail_at = piece
    with pytest.raises(StoreError, match="as planned"):
        job.save(arrays)
    assert len(job.parts()) == 1
    assert {*store.late[1:]}.isdisjoint(entry.key for entry in store.scan("packs/"))
    store.fail_at = None
    job.check(job.save(arrays), arrays)


@pytest.mark.parametrize("late_nbytes", [1 << 40, 1], ids=["a stream", "side by side"])
def test_however_many_chunks_are_coded_no_header_is_longer_than_readers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_nbytes: int
) -> None:
    longest = 8 * 1024
    monkeypatch.setattr(packs, "HEAD_BUDGET_BYTES", longest)
    store = Streams()
    store.late_nbytes = late_nbytes
    job, random = OneRank(tmp_path, store, "planes"), np.random.default_rng(5)
    arrays = {f"layers.{i}": np.full(20_000, i, np.float32) for i in range(100)}
    arrays |= {f"layers.{i}": random.integers(0, 2**32, 20_000, np.uint32).view(np.float32) for i in (3, 60, 99)}
    part = job.save(arrays)
    assert len(part.codings) == 97
    names: list[str] = []
    for pack in part.packs:
        data = store.get(pack.key)
        assert 8 + int.from_bytes(data[:8], "little") <= longest
        names += (name for name in safetensors.numpy.load(data) if not name.startswith("@"))
    assert sorted(names) == sorted(f"{name}@0" for name in arrays)
    job.check(part, arrays)
    assert not [*verify_save(job.catalog, part.save)]
