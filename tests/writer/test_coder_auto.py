"""What 'auto' encodes: on stores that are slow, fast, or change, and on a busy host."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from helpers.persists import Arrays, OneRank, codecs_of, num_summaries, snapshot_of
from helpers.watched_planes import MIB, Watched, mib
from helpers.writers import WAIT_S

from ckptlib.policy.codec import CodecRules
from ckptlib.slots.snapshot import check_body
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import persist
from ckptlib.writer.coder import FIRST_PAUSE, SAMPLED_EVERY, SAMPLES, Coder


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
    store = open_store(f"latency+file://{tmp_path}/root?latency=0.001&bandwidth=4e6")  # far below what a busy host does
    first, second, third = auto_saves(OneRank(tmp_path, store, "auto"), {"w": mib(5)}, 3)
    assert {*first} == {"raw"}
    assert second.count("planes") == SAMPLES
    assert {*third} == {"planes"}


def test_auto_stays_raw_where_the_store_is_faster_than_encoding(tmp_path: Path) -> None:
    job = OneRank(tmp_path, MemoryStore(), "auto")
    arrays = {"w": mib(4)}
    assert {*auto_saves(job, arrays, 1)[0]} == {"raw"}
    upload(job.persister._coder, 1 << 50, 1.0)  # memory is not far from encoding on a busy host
    saves = [[], *auto_saves(job, arrays, 3 * SAMPLED_EVERY + 1)]
    looked = [number for number, codecs in enumerate(saves) if "planes" in codecs]
    assert {saves[number].count("planes") for number in looked} == {SAMPLES}
    assert looked == [1, 3, 7, 15, 31, 47], "it has to see what encoding reaches, and looks again more and more rarely"


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


@pytest.mark.parametrize(
    "uploads",
    [[(0.0, 4.0), (1.0, 3.0), (2.0, 6.0), (10.0, 12.0)], [(0.0, 8.0), (0.0, 1.0), (0.0, 7.0), (6.0, 8.0)]],
)
def test_uploads_beside_each_other_count_together(tmp_path: Path, uploads: list[tuple[float, float]]) -> None:
    """8 s in all, in whatever order they end."""
    job = OneRank(tmp_path, MemoryStore(), "auto")
    coder = job.persister._coder
    for began, ended in uploads:
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


def sampled(arrays: Arrays, directory: Path, chunk_s: float) -> list[int]:
    """Chunks that 'auto' encodes after it has sampled some, for a store that takes so long for each."""
    job = OneRank(directory, MemoryStore(), "auto")
    save, slot = job.slot(arrays)
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("auto"), False)
    chunks = range(len(snapshot.digests))
    upload(coder, 1 << 30, chunk_s * (1 << 30) / max(snapshot.table.nbytes))
    assert len([*coder.encode(slot.body, snapshot, coder.candidates(snapshot, chunks)[0], None)]) == SAMPLES
    found = coder.candidates(snapshot, chunks)[0]
    slot.unlink()
    return found


def test_an_encoder_that_waits_for_a_core_counts_as_slow(tmp_path: Path, planes: Watched) -> None:
    """On a host that is busy it is not what it reaches alone that counts."""
    planes.stalls = {2: 0.6, 3: 0.6, 4: 0.6}
    assert sampled({"w": mib(16)}, tmp_path, 0.3) == []


@pytest.mark.slow
def test_samples_are_not_taken_beside_the_check_of_the_slot(
    tmp_path: Path, planes: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would seem to take three times as long as the chunks of a whole save, which hides little of its check."""
    store = open_store(f"latency+file://{tmp_path}/root?latency=0.001&bandwidth=4e6")
    patience_s, began_beside = 0.5, list[bool]()

    def check(*arguments: object, **more: object) -> None:
        """Takes so long, or until something is encoded."""
        before, deadline = planes.num_calls, time.monotonic() + patience_s
        while planes.num_calls == before and time.monotonic() < deadline:
            time.sleep(0.01)
        began_beside.append(planes.num_calls > before)
        check_body(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(persist, "check_body", check)
    job, arrays = OneRank(tmp_path, store, "auto"), {"w": mib(5)}
    auto_saves(job, arrays, 2)
    assert planes.num_calls == SAMPLES
    patience_s = WAIT_S
    auto_saves(job, arrays, 1)
    assert began_beside == [False, False, True]


@pytest.mark.slow
def test_samples_are_not_summarized_for_patches(tmp_path: Path) -> None:
    """That took a third of their time, and of few chunks of a whole save: a store of 0.3 GB/s got raw chunks for it."""
    store = open_store(f"latency+file://{tmp_path}/root?latency=0.001&bandwidth=4e6")
    job, arrays = OneRank(tmp_path, store, "auto"), {"w": mib(5)}
    auto_saves(job, arrays, 2)
    assert num_summaries(job) == 0
    auto_saves(job, arrays, 1)
    assert num_summaries(job) > 0


def test_beside_samples_others_are_patched_as_ever(tmp_path: Path) -> None:
    """A table that the user has named, beside other weights of the same kind, which are looked at again."""
    job = OneRank(tmp_path, MemoryStore(), {"table/*": "planes", "**": "auto"})
    arrays = {"table/weight": mib(1), "dense/weight": mib(5)}
    found = []
    for _ in range(1 + FIRST_PAUSE):
        arrays["table/weight"][3] += 1
        arrays["dense/weight"] += 1
        part = job.save(arrays)
        job.check(part, arrays)
        found.append(codecs_of(part))
        upload(job.persister._coder, 1 << 50, 1.0)  # no encoder is faster
    assert found[2].count("planes") == found[1].count("planes") + SAMPLES, "what is left of the table, and samples"
    assert [codecs.count("patch") for codecs in found] == [0, 1, 1]


def test_the_time_that_the_first_chunk_takes_does_not_count(tmp_path: Path, planes: Watched) -> None:
    """Memory that is kept is made then. It would keep a run raw on a store that is half as fast as encoding."""
    planes.stalls = {1: 2.0}
    assert len(sampled({"w": mib(16)}, tmp_path, 0.4)) >= SAMPLES
