"""Frames that hypothesis draws: what is within its bound, or gives the chunk back, is taken, and nothing else."""

from __future__ import annotations

import numpy as np
from helpers.broken_frames import Break, without_a_row
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs import registry
from ckptlib.codecs.codec import Codec, Content
from ckptlib.codecs.patch import PatchCodec
from ckptlib.errors import FormatError
from ckptlib.format.digests import XXH3
from ckptlib.writer import frames

# -- rounded


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_the_lossy_codecs_make_is_within_their_bounds(data: st.DataObject) -> None:
    """Of any numbers: denormal, huge, not finite, and such as a rounding error of the bound itself would show in."""
    codec = registry.find(data.draw(st.sampled_from(["lossy8-linear", "lossy8-log", "lossy-bfloat16"])))
    assert isinstance(codec, Codec)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = np.exp2(random.normal(0, data.draw(st.sampled_from([0.01, 1, 40])), data.draw(st.integers(1, 3000))))
    numbers = np.clip(values, 0, 3e38).astype(np.float32) * random.choice(np.array([1, -1], np.float32), len(values))
    for at in data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=3)):
        numbers.view(np.uint32)[at] = data.draw(st.integers(0, 2**32 - 1))
    if codec.name == "lossy8-log":
        numbers = np.abs(numbers)
    raw = memoryview(numbers.tobytes())
    found = frames.encode(codec, raw, Content("float32", 1), XXH3)
    assert found is None or found[1] is not None


# -- patches


ROW = 64


@st.composite
def tables(draw: st.DrawFn) -> tuple[bytes, bytes, Content]:
    """A base, and what has become of it: a few rows and edges are others, some of them by one bit."""
    content = Content("uint8", ROW, draw(st.integers(0, ROW - 1)))
    nbytes = draw(st.integers(20 * ROW, 40 * ROW))
    base = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, nbytes, dtype=np.uint8)
    raw = base.copy()
    for at in draw(st.lists(st.integers(0, nbytes - 1), max_size=6)):
        raw[at : at + draw(st.sampled_from([1, ROW]))] ^= draw(st.integers(1, 255))
    return base.tobytes(), raw.tobytes(), content


@st.composite
def alterations(draw: st.DrawFn) -> Break:
    """Bits, bytes, ends; and rows that are left out or told twice."""

    def alter(frame: bytes) -> bytes:
        found = bytearray(frame)
        for _ in range(draw(st.integers(1, 3))):
            how = draw(st.sampled_from(["flip", "flip", "head", "gap", "cut", "add", "row", "double"]))
            at = draw(st.integers(0, max(len(found) - 1, 0)))
            if not found or how == "add":
                found += draw(st.binary(max_size=3))
            elif how == "flip":
                found[at] ^= 1 << draw(st.integers(0, 7))
            elif how == "head":
                found[at % min(24, len(found))] = draw(st.integers(0, 255))
            elif how == "gap":
                found[-1 - at % min(6, len(found))] = draw(st.integers(0, 40))
            elif how == "cut":
                del found[at:]
            elif how == "row" and len(found) > 24 + ROW and found[12] and not found[0]:
                found = bytearray(without_a_row(bytes(found)))
            elif how == "double" and len(found) > 24 + ROW:
                found[24:24] = found[24 : 24 + ROW]
                found[12] = (found[12] + 1) % 256
                found.append(0)
        return bytes(found)

    return alter


@settings(max_examples=1500, deadline=None)
@given(tables(), st.one_of(st.just(bytes), alterations()))
def test_a_patch_is_taken_if_and_only_if_it_gives_the_chunk_back(
    table: tuple[bytes, bytes, Content], how: Break
) -> None:
    """Judged by decoding it against the base, of which the check knows a summary."""
    base, raw, content = table
    codec = PatchCodec()
    summaries = [codec.summarize(memoryview(data), content) for data in (raw, base)]
    assert summaries[0] is not None
    assert summaries[1] is not None
    views = memoryview(summaries[0]), memoryview(summaries[1])
    honest = codec.encode_by_summaries(memoryview(raw), *views, content)
    if honest is None:
        return
    frame = how(honest)
    try:
        frames.check_patch(codec, memoryview(raw), frame, *views, content)
        taken = True
    except frames.WrongFrame:
        taken = False
    out = bytearray(len(raw))
    try:
        codec.decode(memoryview(frame), memoryview(base), memoryview(out))
        right = out == raw and 0 < len(frame) <= len(raw)
    except FormatError:
        right = False
    assert taken == right
    assert taken or frame != honest
