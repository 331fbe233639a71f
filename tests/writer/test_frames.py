"""Codecs that are broken on purpose: the save commits, loads bit for bit, and says so. With real slots and stores."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers.broken_frames import Break, flipped, without_a_row
from helpers.persists import OneRank, codecs_of, num_summaries, snapshot_of
from typing_extensions import override

from ckptlib.codecs import registry
from ckptlib.codecs.codec import BaseCodec, Codec, Content
from ckptlib.codecs.lossy8 import Linear8
from ckptlib.codecs.patch import PatchCodec
from ckptlib.codecs.planes import Planes
from ckptlib.codecs.zstd import Zstd
from ckptlib.format.digests import XXH3
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.lossy import Lossy
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import frames
from ckptlib.writer.coder import SAMPLES, Coder

MIB = 1 << 20
MOMENT = "optim/state/0/exp_avg"
Use = Callable[[Codec | BaseCodec], None]


def weights(num_mib: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, (num_mib * MIB // 256, 64)).astype(np.float32)


WRONG: dict[str, Break] = {
    "one bit of a mantissa": lambda frame: flipped(frame, len(frame) - 9),
    "one bit of its head": lambda frame: flipped(frame, 0),
    "too short": lambda frame: frame[: len(frame) // 2],
    "too long": lambda frame: frame + b"\0",
    "nothing": lambda frame: b"",
    "longer than the chunk": lambda frame: frame + bytes(4 * MIB),
}


class BrokenPlanes(Planes):
    """Breaks the frame of its `nth` chunk, from 0; all of them: None."""

    def __init__(self, how: Break, nth: int | None = None) -> None:
        super().__init__()
        self._how, self._nth = how, nth
        self._calls = itertools.count()
        self.num_calls = 0

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        call, frame = next(self._calls), super().encode(raw, content)
        self.num_calls = max(self.num_calls, call + 1)
        return frame if frame is None or self._nth not in (None, call) else self._how(frame)


class Raises(Planes):
    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        raise IndexError("a bug, as planned")


class WantsMemory(Planes):
    """Finds no memory for its first chunk, where it encodes or where it decodes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where, self.num_met = where, 0

    def _take(self, where: str) -> None:
        if where == self._where and not self.num_met:
            self.num_met += 1
            raise MemoryError

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        self._take("encode")
        return super().encode(raw, content)

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        self._take("decode")
        super().decode(frame, out)


class LeavesOut(Planes):
    """Decodes half of the chunk, and leaves the rest as it finds it."""

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        whole = bytearray(len(out))
        super().decode(frame, memoryview(whole))
        half = len(out) // 2
        out[:half] = whole[:half]


class Slow(Planes):
    """Decodes at a few megabytes per second."""

    num_decoded = 0

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        time.sleep(0.5)
        self.num_decoded += 1
        super().decode(frame, out)


class Long(Zstd):
    """Loses nothing, but no part may say that a frame is longer than its chunk."""

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        return bytes(raw) + b"!"

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        out[:] = frame[: len(out)]


class BrokenZstd(Zstd):
    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        other = bytearray(raw)
        other[len(other) // 3] ^= 128
        return super().encode(memoryview(other), content)


class BrokenLinear8(Linear8):
    """Stores other codes than it has checked."""

    shift: ClassVar[int] = 100

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        frame = super().encode(raw, content)
        if frame is None:
            return None
        at = 16 + 4 * (len(raw) // 1024) + 5000
        code = bytes([(frame[at] + self.shift) % 255])
        return frame[:at] + code + frame[at + 1 :]


class BrokenBound(Linear8):
    """Says that it is closer than it is."""

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        frame = super().encode(raw, content)
        return None if frame is None else np.zeros(2).tobytes() + frame[16:]


class PatchWantsMemory(PatchCodec):
    """Finds no memory for its first check."""

    num_met = 0

    @override
    def decode(self, frame: memoryview, base: memoryview, out: memoryview) -> None:
        if not self.num_met:
            self.num_met += 1
            raise MemoryError
        super().decode(frame, base, out)


class BrokenPatch(PatchCodec):
    def __init__(self, how: Break) -> None:
        self._how = how

    @override
    def encode_by_summaries(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content
    ) -> bytes | None:
        frame = super().encode_by_summaries(raw, summary, base_summary, content)
        return None if frame is None else self._how(frame)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes the writer take this one for the codec of its name; a load takes the real one."""
    find = registry.find

    def use(codec: Codec | BaseCodec) -> None:
        monkeypatch.setattr(registry, "find", lambda name: codec if name == codec.name else find(name))

    return use


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# -- saves


@pytest.mark.parametrize("how", WRONG)
def test_wrong_frames_are_not_stored(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    job, codec = OneRank(tmp_path, MemoryStore(), "planes"), BrokenPlanes(WRONG[how])
    states = [{"layers.0.w": weights(6, seed), "ids": np.arange(MIB) + seed} for seed in range(2)]
    use(codec)
    parts = [job.save(states[0])]
    [error] = errors(caplog)
    assert "step 1: codec planes made a wrong frame of layers.0.w, chunk 1 of" in error
    calls = codec.num_calls
    parts.append(job.save(states[1]))
    assert codec.num_calls == calls, "it is not used again"
    assert len(errors(caplog)) == 1, "and this is said once"
    monkeypatch.undo()
    for part, state in zip(parts, states, strict=True):
        assert {*codecs_of(part)} == {"raw", "zstd"}
        job.check(part, state)


@pytest.mark.parametrize("codec", [Raises(), LeavesOut()], ids=["raises", "leaves half"])
def test_what_decodes_wrongly_is_not_stored(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture, codec: Codec
) -> None:
    use(codec)
    job, arrays = OneRank(tmp_path, MemoryStore(), "planes"), {"w": weights(6)}
    part = job.save(arrays)
    assert {*codecs_of(part)} == {"raw"}
    job.check(part, arrays)
    assert len(errors(caplog)) == 1
    encoding = job.persister._coder._encoding
    speed = encoding.nbytes, encoding.per_byte
    arrays["w"] += 1
    job.check(job.save(arrays), arrays)
    assert speed == (encoding.nbytes, encoding.per_byte), "what is not encoded tells nothing of the speed of encoders"


@pytest.mark.parametrize("where", ["encode", "decode"])
def test_want_of_memory_is_no_wrong_frame(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The codec was not trusted any more until the job ended, and the log asked for a report of a bug."""
    codec = WantsMemory(where)
    use(codec)
    job, arrays = OneRank(tmp_path, MemoryStore(), "planes"), {"w": weights(16)}
    part = job.save(arrays)
    assert codec.num_met == 1
    assert codecs_of(part).count("raw") == 1, "that chunk, and no other"
    job.check(part, arrays)
    arrays["w"] += 1
    part = job.save(arrays)
    assert {*codecs_of(part)} == {"planes"}
    job.check(part, arrays)
    assert errors(caplog) == []


def test_what_the_last_frame_decoded_to_makes_no_other_right() -> None:
    """The memory that frames are decoded into is used again."""
    raw, content = memoryview(weights(1).tobytes()), Content("float32", 64)
    assert frames.encode(Planes(), raw, content, XXH3) is not None
    with pytest.raises(frames.WrongFrame, match=rf"of {len(raw)} bytes come out wrong, the first at {len(raw) // 2}"):
        frames.encode(LeavesOut(), raw, content, XXH3)


def test_no_frame_is_longer_than_its_chunk() -> None:
    with pytest.raises(frames.WrongFrame, match="it has 4097 bytes, for a chunk of 4096"):
        frames.encode(Long(), memoryview(bytes(4096)), Content("int64", 1), XXH3)


def test_frames_that_were_right_are_stored_beside_one_that_was_not(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    job, arrays = OneRank(tmp_path, MemoryStore(), "planes"), {"w": weights(32)}
    use(BrokenPlanes(WRONG["one bit of a mantissa"], 3))
    part = job.save(arrays)
    assert codecs_of(part).count("planes") >= 3
    assert codecs_of(part).count("raw") >= 1
    job.check(part, arrays)
    assert len(errors(caplog)) == 1


def test_zstd_is_decoded_again_too(tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture) -> None:
    job, arrays = OneRank(tmp_path, MemoryStore(), "planes"), {"ids": np.arange(MIB), "w": weights(2)}
    use(BrokenZstd())
    part = job.save(arrays)
    assert {*codecs_of(part)} == {"raw", "planes"}
    job.check(part, arrays)
    [error] = errors(caplog)
    assert "codec zstd made a wrong frame of ids" in error


@pytest.mark.parametrize("codec", [BrokenLinear8(), BrokenBound()], ids=["another code", "a bound that is too small"])
def test_what_is_rounded_is_as_close_as_its_frame_says(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture, codec: Codec
) -> None:
    """Nothing at a load could tell: the digest is of what the frame decodes to."""
    job = OneRank(tmp_path, MemoryStore(), {"**": Lossy(bits=8)})
    arrays = {MOMENT: weights(6)}
    use(codec)
    part = job.save(arrays)
    assert {*codecs_of(part)} == {"raw"}
    job.check(part, arrays)
    [error] = errors(caplog)
    assert "codec lossy8-linear made a wrong frame of optim/state/0/exp_avg" in error


def test_rounded_numbers_are_stored_where_they_are_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = OneRank(tmp_path, MemoryStore(), {"**": Lossy(bits=8)})
    arrays = {MOMENT: weights(6)}
    arrays[MOMENT][7, 7], arrays[MOMENT][70] = np.nan, np.inf
    assert {*codecs_of(job.save(arrays))} == {"lossy8-linear"}
    assert errors(caplog) == []


PATCHES: dict[str, Break] = {
    "one bit of a row": lambda frame: flipped(frame, 30),
    "one bit of a gap": lambda frame: flipped(frame, len(frame) - 1),
    "a row less": without_a_row,
    "too short": lambda frame: frame[:-1],
}


@pytest.mark.parametrize("how", PATCHES)
def test_wrong_patches_are_stored_whole(
    tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    use(BrokenPatch(PATCHES[how]))
    job = OneRank(tmp_path, MemoryStore(), "planes")
    states = [{"table": weights(2)}]
    parts = [job.save(states[0])]
    for seed in range(1, 4):
        table = states[-1]["table"].copy()
        table[seed::500] = np.random.default_rng(seed).normal(size=table[seed::500].shape)
        states.append({"table": table})
        parts.append(job.save(states[-1]))
    monkeypatch.undo()
    for part, state in zip(parts, states, strict=True):
        assert {*codecs_of(part)} == {"planes"}
        job.check(part, state)
    [error] = errors(caplog)
    assert "step 2: codec patch made a wrong frame of table" in error
    assert num_summaries(job) == 0, "they serve nothing any more"


def test_want_of_memory_is_no_wrong_patch(tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture) -> None:
    codec = PatchWantsMemory()
    use(codec)
    job, table = OneRank(tmp_path, MemoryStore(), "planes"), weights(2)
    found = []
    for seed in range(6):
        table[seed::500] = np.random.default_rng(seed).normal(size=table[seed::500].shape)
        part = job.save({"table": table})
        job.check(part, {"table": table})
        found.append({*codecs_of(part)})
    assert codec.num_met == 1
    assert "planes" in found[1], "of that chunk"
    assert "patch" in found[2], "it is trusted as before"
    assert errors(caplog) == []


def test_auto_counts_what_it_takes_to_decode_again(tmp_path: Path, use: Use) -> None:
    """A codec that encodes fast and decodes slowly, for a store that lies between the two."""
    codec = Slow()
    use(codec)
    job, arrays = OneRank(tmp_path, MemoryStore(), "auto"), {"w": weights(16)}
    save, slot = job.slot(arrays)
    snapshot, coder = snapshot_of(save, slot), Coder(CodecRules.of("auto"), False)
    chunks = range(len(snapshot.digests))
    nbytes = SAMPLES * max(snapshot.table.nbytes)
    coder.note_upload(nbytes, 0.0, 1.0)  # the samples in a second
    assert len([*coder.encode(slot.body, snapshot, coder.candidates(snapshot, chunks)[0], None)]) == SAMPLES
    assert codec.num_decoded == SAMPLES
    assert coder.candidates(snapshot, chunks)[0] == []
    slot.unlink()
