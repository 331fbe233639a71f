"""What is encoded, when, and what a save that fails leaves behind: with real codecs, slots and bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.persists import Arrays, OneRank, codecs_of, snapshot_of

from ckptlib.codecs import registry
from ckptlib.codecs.codec import Codec, Content
from ckptlib.codecs.planes import Planes
from ckptlib.errors import CorruptData, StoreError
from ckptlib.policy.codec import CodecRules
from ckptlib.stores import Store, open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import coder as module
from ckptlib.writer import frame_packs
from ckptlib.writer.coder import SAMPLED_EVERY, SAMPLES, Coder

MIB = 1 << 20
WIDTH = 64


def floats(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, WIDTH)).astype(np.float32)


def mib(num: int, seed: int = 0) -> np.ndarray:
    """Weights of so many MiB."""
    return floats(num * MIB // 4 // WIDTH, seed)


class Watched(Planes):
    """The real codec; knows how often it was called, and can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.fail_at: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise OSError("an encoder failed, as planned")
        self.gate.wait()
        return super().encode(raw, content)


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """What the coder takes for planes."""
    watched, find = Watched(), registry.find
    monkeypatch.setattr(registry, "find", lambda name: watched if name == "planes" else find(name))
    yield watched
    watched.gate.set()


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
        plan.write_text(json.dumps([{"op": "commit", "key": "packs/", "action": "error", "nth": nth, "once": True}]))
        with pytest.raises(StoreError, match="as planned"):
            job.save(arrays)
    assert len(job.parts()) == 1
    plan.write_text("[]")
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


# -- auto


def upload(coder: Coder, nbytes: int, seconds: float) -> None:
    """One that follows those before it."""
    began = max(coder._uploads_until, 0.0)
    coder.note_upload(nbytes, began, began + seconds)


def auto_saves(job: OneRank, arrays: dict[str, np.ndarray], num: int) -> list[list[str]]:
    """Codecs of chunks in each of some saves, before each of which all changes."""
    found = []
    for _ in range(num):
        for array in arrays.values():
            array += 0.001 * np.abs(array)
        part = job.save(arrays)
        job.check(part, arrays)
        found.append(codecs_of(part))
    return found


def test_auto_begins_raw_measures_and_encodes_for_a_slow_store(tmp_path: Path) -> None:
    store = open_store(f"latency+file://{tmp_path}/root?latency=0.001&bandwidth=1e7")  # far below what a busy host does
    first, second, third = auto_saves(OneRank(tmp_path, store, "auto"), {"w": mib(5)}, 3)
    assert {*first} == {"raw"}
    assert second.count("planes") == SAMPLES
    assert {*third} == {"planes"}


def test_auto_stays_raw_where_the_store_is_faster_than_encoding(tmp_path: Path) -> None:
    job = OneRank(tmp_path, MemoryStore(), "auto")
    arrays = {"w": mib(4)}
    assert {*auto_saves(job, arrays, 1)[0]} == {"raw"}
    upload(job.persister._coder, 1 << 50, 1.0)  # memory is not far from encoding on a busy host
    saves = [[], *auto_saves(job, arrays, SAMPLED_EVERY + 3)]
    sampled = [codecs.count("planes") for codecs in saves]
    assert sampled[1] == SAMPLES, "it has to see what encoding reaches"
    assert sampled[2 : 1 + SAMPLED_EVERY] == [0] * (SAMPLED_EVERY - 1)
    assert sampled[1 + SAMPLED_EVERY] == SAMPLES, "and looks again from time to time"


def test_auto_stays_raw_on_a_local_path_and_looks_at_no_tensor(tmp_path: Path, planes: Watched) -> None:
    saves = auto_saves(OneRank(tmp_path, LocalStore(str(tmp_path / "root")), "auto"), {"w": mib(8)}, 3)
    assert {codec for codecs in saves for codec in codecs} == {"raw"}
    assert planes.num_calls == 0
    assert not Coder(CodecRules.of("auto"), True).encodes
    assert not Coder(CodecRules.of("raw"), False).encodes
    assert not Coder(CodecRules.of({"model/*": "raw"}), True).encodes
    assert Coder(CodecRules.of({"model/*": "raw"}), False).encodes
    assert Coder(CodecRules.of({"model/*": "planes", "*": "raw"}), True).encodes


def test_auto_follows_a_store_whose_speed_changes(tmp_path: Path) -> None:
    job, arrays = OneRank(tmp_path, MemoryStore(), "auto"), {"w": mib(16)}
    coder = job.persister._coder
    auto_saves(job, arrays, 2)
    for nbytes, seconds, codec in [
        (1 << 30, 9e3, "planes"),
        (1 << 50, 0.001, "raw"),
        (1 << 40, 9e6, "planes"),
    ]:
        upload(coder, nbytes, seconds)
        assert {*auto_saves(job, arrays, 1)[0]} == {codec}


def test_uploads_beside_each_other_count_together(tmp_path: Path) -> None:
    job = OneRank(tmp_path, MemoryStore(), "auto")
    coder = job.persister._coder
    for began, ended in [(0.0, 4.0), (1.0, 3.0), (2.0, 6.0), (10.0, 12.0)]:  # 8 s in all
        coder.note_upload(8 * MIB, began, ended)
    assert coder._store.per_byte == pytest.approx(8.0 / (32 * MIB), rel=0.2)


def trial(arrays: Arrays, directory: Path, *uploads: tuple[int, float]) -> tuple[int, int]:
    """Chunks that 'auto' tries after these uploads, and all chunks. Encoding was seen to reach what it does here."""
    job = OneRank(directory, MemoryStore(), "auto")
    save, slot = job.slot(arrays)
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("auto"), False)
    chunks = range(len(snapshot.digests))
    upload(coder, 1 << 40, 1.0)
    assert len([*coder.encode(slot.body, snapshot, coder.candidates(snapshot, chunks)[0], None)]) == SAMPLES
    assert coder.candidates(snapshot, chunks)[0] == []
    for nbytes, seconds in uploads:
        upload(coder, nbytes, seconds)
    found = coder.candidates(snapshot, chunks)[0]
    slot.unlink()
    return len(found), len(chunks)


def test_packs_that_are_small_do_not_make_a_store_seem_slow(tmp_path: Path) -> None:
    """A request takes 30 ms however little it puts, and a pack may be a header and no more."""
    tried, _ = trial({"w": mib(16)}, tmp_path, *[(4096, 0.03)] * 1000, *[(2 * MIB, 5.0)] * 100, (0, 1.0))
    assert tried == 0


def test_packs_count_by_their_bytes(tmp_path: Path) -> None:
    tried, _ = trial({"w": mib(16)}, tmp_path, *[(1 << 44, 1.0), (5 * MIB, 0.2)] * 10)
    assert tried == 0, "one slow request among fast packs"
    tried, num = trial({"w": mib(16)}, tmp_path, *[(5 * MIB, 0.00001), (1 << 30, 5000.0)] * 3)
    assert tried == num, "one fast request among slow packs"


def test_what_saves_little_is_not_encoded_however_slow_the_store(tmp_path: Path) -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(8 * MIB), np.float32)
    tried, _ = trial({"w": noise}, tmp_path, (1 << 30, 1000.0))
    assert tried == 0


def test_threads_that_wait_for_a_core_count_as_slow(tmp_path: Path, planes: Watched) -> None:
    """What two threads reach together, on a host that is busy: not twice what each of them seems to."""
    job = OneRank(tmp_path, MemoryStore(), "auto")
    save, slot = job.slot({"w": mib(16)})
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("auto"), False)
    chunks = range(len(snapshot.digests))
    nbytes = SAMPLES * max(snapshot.table.nbytes)
    upload(coder, 1 << 30, (1 << 30) / nbytes)  # takes as long for the samples as a second
    planes.gate.clear()
    threading.Timer(1.5, planes.gate.set).start()  # all of them wait for that
    assert len([*coder.encode(slot.body, snapshot, coder.candidates(snapshot, chunks)[0], None)]) == SAMPLES
    assert coder.candidates(snapshot, chunks)[0] == []
    slot.unlink()


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
