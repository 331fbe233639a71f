"""Codec "zstd", and decompression within bounds."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from chunks import CONTENTS, chunks, round_trip
from hypothesis import given, settings

from ckptlib.codecs import zstd
from ckptlib.codecs.codec import Content
from ckptlib.errors import FormatError

CODEC = zstd.Zstd()
PLAIN = b"step 500, " * 20


@settings(deadline=None)
@given(chunks(), CONTENTS)
def test_round_trip(raw: bytes, content: Content) -> None:
    round_trip(CODEC, raw, content)


def test_integers_are_worth_it_and_noise_is_not() -> None:
    numbers = np.random.default_rng(0).integers(0, 50_000, 100_000)
    frame = round_trip(CODEC, numbers.tobytes(), Content("int64", 1))
    assert frame is not None
    assert len(frame) < 0.4 * numbers.nbytes
    assert CODEC.encode(memoryview(np.random.default_rng(0).bytes(100_000)), Content("uint8", 1)) is None


def test_any_zstd_can_read_it() -> None:
    frame = CODEC.encode(memoryview(PLAIN), Content("", 1))
    assert frame is not None
    assert zstandard.ZstdDecompressor().decompress(frame) == PLAIN


def test_huffman_tells_its_size() -> None:
    assert zstd.inflate(memoryview(zstd.huffman(memoryview(PLAIN))), len(PLAIN)) == PLAIN


GOOD = zstandard.ZstdCompressor().compress(PLAIN)
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(PLAIN)
SUMMED = zstandard.ZstdCompressor(write_checksum=True).compress(PLAIN)
SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
FOREIGN = zstandard.ZstdCompressor(dict_data=zstandard.ZstdCompressionDict(PLAIN * 9)).compress(PLAIN)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "zstd frame"),
        (b"\x28\xb5\x2f", "zstd frame"),
        (PLAIN, "zstd frame"),
        (UNSIZED, "does not say"),
        (GOOD[:-1], "zstd frame"),
        (GOOD + b"x", "unused data"),
        (GOOD + GOOD, "unused data"),
        (GOOD + SKIPPABLE, "unused data"),
        (SKIPPABLE + GOOD, "200 bytes, and"),
        (SUMMED[:-1] + bytes([SUMMED[-1] ^ 1]), "checksum"),
        (zstandard.ZstdCompressor().compress(PLAIN + b"x"), "201 bytes"),
        (zstandard.ZstdCompressor().compress(b""), "0 bytes"),
        (GOOD[:5] + b"\xff" + GOOD[6:], "holds 255"),
    ],
)
def test_refuses(frame: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        zstd.inflate(memoryview(frame), len(PLAIN))
    with pytest.raises(FormatError, match=says):
        CODEC.decode(memoryview(frame), memoryview(bytearray(len(PLAIN))))
    assert zstd.inflate(memoryview(GOOD), len(PLAIN)) == PLAIN, "and goes on working"


def test_a_foreign_dictionary_gives_no_other_bytes() -> None:
    with pytest.raises(FormatError):
        zstd.inflate(memoryview(FOREIGN), len(PLAIN))
