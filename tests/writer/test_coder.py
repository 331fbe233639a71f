"""What is encoded, when, and what a save that fails leaves behind: with real codecs, slots and bytes."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.persists import OneRank, codecs_of, snapshot_of
from helpers.watched_planes import MIB, Watched, mib

from ckptlib.codecs import registry
from ckptlib.codecs.codec import Codec
from ckptlib.errors import CorruptData, StoreError
from ckptlib.policy.codec import CodecRules
from ckptlib.stores import Store, open_store
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import write_plan
from ckptlib.writer import coder as module
from ckptlib.writer import frame_packs
from ckptlib.writer.coder import Coder

# -- encoding


def test_chunks_come_in_their_order_and_decode_to_what_they_were(tmp_path: Path) -> None:
    job = OneRank(tmp_path, MemoryStore(), "planes")
    arrays = {"a": mib(8), "ids": np.arange(400_000), "noise": np.random.default_rng(3).bytes(MIB)}
    arrays["noise"] = np.frombuffer(arrays["noise"], np.uint8)
    save, slot = job.slot(arrays)
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("planes"), False)
    coded, raw = coder.candidates(snapshot, range(len(snapshot.digests)))
    assert (coded, raw) == ([*range(len(snapshot.digests))], [])
    reverse = coded[::-1]
    found = [*coder.encode(slot.body, snapshot, reverse, None)]
    assert [encoded.chunk for encoded in found] == reverse
    for encoded in found:
        start, nbytes = snapshot.table.offsets[encoded.chunk], snapshot.table.nbytes[encoded.chunk]
        if encoded.frame is None:
            assert encoded.coding is None
            continue
        assert encoded.coding is not None
        assert encoded.coding.stored == len(encoded.frame) < nbytes
        codec, out = registry.find(encoded.coding.codec), bytearray(nbytes)
        assert isinstance(codec, Codec)
        codec.decode(memoryview(encoded.frame), memoryview(out))
        assert out == slot.body[start : start + nbytes]
    assert {e.coding.codec for e in found if e.coding is not None} == {"planes", "zstd"}
    assert any(e.frame is None for e in found), "noise stays as it is"
    slot.unlink()


def test_a_state_of_other_tensors_is_encoded_by_what_it_is_now(tmp_path: Path) -> None:
    job = OneRank(tmp_path, MemoryStore(), "planes")
    ids = np.arange(400_000)
    for arrays, codecs in [
        ({"a": mib(4)}, {"planes"}),
        ({"ids": ids}, {"zstd"}),
        ({"a": mib(8), "ids": ids}, {"planes", "zstd"}),
    ]:
        part = job.save(arrays)
        assert {*codecs_of(part)} == codecs
        job.check(part, arrays)


def test_so_much_is_encoded_ahead_and_no_more(tmp_path: Path, planes: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough that the next pack is encoded while one is put; and memory is bounded."""
    job = OneRank(tmp_path, MemoryStore(), "planes")
    save, slot = job.slot({"w": mib(16)})
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("planes"), False)
    coded, _ = coder.candidates(snapshot, range(len(snapshot.digests)))
    largest = max(snapshot.table.nbytes)
    monkeypatch.setattr(module, "AHEAD_BYTES", 3 * largest)
    asked = 0
    with closing(coder.encode(slot.body, snapshot, coded, None)) as encoding:
        for _ in encoding:
            asked += 1
            assert planes.num_calls <= asked + 3, "it is submitted when it is asked for"
    assert asked == planes.num_calls == len(coded) > 4
    slot.unlink()


def test_closed_it_reads_the_slot_no_more(tmp_path: Path, planes: Watched) -> None:
    job = OneRank(tmp_path, MemoryStore(), "planes")
    save, slot = job.slot({"w": mib(64)})
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("planes"), False)
    coded, _ = coder.candidates(snapshot, range(len(snapshot.digests)))
    with closing(coder.encode(slot.body, snapshot, coded, None)) as encoding:
        next(encoding)
        planes.gate.clear()  # those under way take their time
        threading.Timer(0.1, planes.gate.set).start()
    calls = planes.num_calls
    slot.unlink()
    slot.close()  # raises BufferError while anything of it is in use
    with ThreadPoolExecutor(1) as executor:
        executor.submit(planes.gate.wait).result()
    assert planes.num_calls == calls < len(coded)


@pytest.mark.parametrize("fail_at", [1, 3, 8])
def test_an_error_in_an_encoder_surfaces_and_no_part_is_put(tmp_path: Path, planes: Watched, fail_at: int) -> None:
    job = OneRank(tmp_path, MemoryStore(), "planes")
    arrays = {"w": mib(8)}
    planes.fail_at = fail_at
    with pytest.raises(OSError, match="as planned"):
        job.save(arrays)
    assert job.parts() == []
    job.check(job.save(arrays), arrays)


# -- what a save that failed leaves


class FailsOnce(MemoryStore):
    """Refuses one put of a key with this word in it."""

    word: str | None = None

    def put(self, key: str, *args: Any, **kwargs: Any) -> None:
        if self.word is not None and self.word in key:
            self.word = None
            raise StoreError(f"{key}: refused, as planned")
        super().put(key, *args, **kwargs)


def sparse_job(directory: Path, store: Store) -> tuple[OneRank, dict[str, np.ndarray]]:
    """After two saves, the second of which is patches."""
    job, arrays = OneRank(directory, store, "planes"), {"table": mib(1)}
    job.save(arrays)
    arrays["table"][::500] += 1
    assert {*codecs_of(job.save(arrays))} == {"patch"}
    arrays["table"][::400] += 1
    return job, arrays


def test_nothing_is_patched_after_a_save_whose_part_was_not_put(tmp_path: Path) -> None:
    store = FailsOnce("failing")
    job, arrays = sparse_job(tmp_path, store)
    store.word = "parts/"
    with pytest.raises(StoreError, match="as planned"):
        job.save(arrays)
    assert len(job.parts()) == 2
    _goes_on_whole(job, arrays)


def test_packs_that_are_put_at_once_all_come_and_one_that_fails_surfaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_packs, "FRAMES_BYTES", MIB)
    monkeypatch.setattr(frame_packs, "FIRST_FRAMES_BYTES", MIB)
    plan = tmp_path / "plan.json"
    store = open_store(f"fault+file://{tmp_path}/root?plan={plan}")
    job, arrays = OneRank(tmp_path, store, "planes"), {"w": mib(8)}
    part = job.save(arrays)
    assert len(part.packs) > 3
    job.check(part, arrays)
    arrays["w"] += 1
    for nth in (0, 1, 3):
        write_plan(plan, [{"op": "commit", "key": "packs/", "action": "error", "nth": nth, "once": True}])
        with pytest.raises(StoreError, match="as planned"):
            job.save(arrays)
    assert len(job.parts()) == 1
    write_plan(plan, [])
    job.check(job.save(arrays), arrays)


def test_nothing_is_patched_after_a_slot_that_was_not_what_was_sealed(tmp_path: Path) -> None:
    job, arrays = sparse_job(tmp_path, MemoryStore())
    save, slot = job.slot(arrays)
    slot.body[12345] ^= 1
    with pytest.raises(CorruptData, match="changed in memory after it was sealed"):
        job.persister.persist(slot, save)
    slot.unlink()
    assert len(job.parts()) == 2
    _goes_on_whole(job, arrays)


def _goes_on_whole(job: OneRank, arrays: dict[str, np.ndarray]) -> None:
    whole = job.save(arrays)
    assert "patch" not in codecs_of(whole)
    job.check(whole, arrays)
    arrays["table"][::300] += 1
    again = job.save(arrays)
    assert {*codecs_of(again)} == {"patch"}
    job.check(again, arrays)


def test_a_save_that_is_never_committed_is_no_base(tmp_path: Path) -> None:
    job, arrays = sparse_job(tmp_path, MemoryStore())
    lost = job.save(arrays, commit=False)
    for _ in range(8):
        arrays["table"][np.random.default_rng(job.step).integers(0, len(arrays["table"]), 9)] += 1
        part = job.save(arrays)
        assert not any(pack.key.startswith(lost.save.packs_prefix) for pack in part.packs)
        job.check(part, arrays)
    assert "patch" in codecs_of(part)


def test_a_writer_that_starts_knows_no_base_and_stores_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    job, arrays = sparse_job(tmp_path, store)
    job.persister = OneRank.persister_of(store, "planes")
    _goes_on_whole(job, arrays)


def test_what_is_to_be_refreshed_is_not_a_base_either(tmp_path: Path) -> None:
    """Somebody who asks for fresh bytes does not trust the old ones: they must not be needed by what comes after."""
    job, arrays = sparse_job(tmp_path, MemoryStore())
    old = {entry.key for entry in job.store.scan("packs")}
    job.store.put(job.catalog.saves()[-1].refresh_key, b"")
    part = job.save(arrays)
    assert not old & {pack.key for pack in part.packs}
    job.check(part, arrays)


def test_patches_outlive_the_step_of_their_keyframe(tmp_path: Path) -> None:
    """Retention drops the step; its pack is needed as much as before, and is not written again."""
    job, arrays = sparse_job(tmp_path, MemoryStore())
    part = job.save(arrays)
    job.store.delete(job.catalog.saves()[0].manifest_key)
    arrays["table"][0] += 1  # in the first chunk: the others are taken over
    after = job.save(arrays)
    assert after.nbytes_put < part.nbytes_put
    assert {*codecs_of(after)} == {"patch"}
    job.check(after, arrays)


# -- raw


def test_raw_loads_no_compressor() -> None:
    script = """
import sys, ckptlib.writer.process
from ckptlib.policy.codec import CodecRules
from ckptlib.writer.coder import Coder
coder = Coder(CodecRules.of("raw"), False)
coder.note_upload(1 << 30, 0.0, 1.0)
assert coder.candidates(None, range(5)) == ([], [0, 1, 2, 3, 4])
assert [*coder.encode(None, None, [], None)] == []
loaded = {name for name in sys.modules if name == "zstandard" or name.startswith("ckptlib.codecs")}
modules = ("codec", "choice", "registry", "keyframes")
assert loaded <= {"ckptlib.codecs", *("ckptlib.codecs." + name for name in modules)}, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
