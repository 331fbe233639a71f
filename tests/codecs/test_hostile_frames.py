"""Frames that are torn, changed or made up: FormatError, whatever they say, and no memory for what they claim."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from chunks import gaussian, moments
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.planes import Planes
from ckptlib.errors import FormatError

CODEC = Planes()
SPARSE = (np.arange(5000) % 7 * np.float64(0.5)).tobytes()
FRAMES = {
    name: (CODEC.encode(memoryview(raw), content), len(raw))
    for name, raw, content in (
        ("weights", gaussian("float32", 3000), Content("float32", 100)),
        ("moments", moments(200, 80), Content("float32", 80, 17)),
        ("bfloat16", gaussian("bfloat16", 3000) + b"\x01", Content("bfloat16", 1)),
        ("sparse", SPARSE, Content("float64", 1)),
        ("small", gaussian("float8_e4m3fn", 3000), Content("float8_e4m3fn", 1)),
    )
}


def decode(frame: bytes, nbytes: int) -> bool:
    """Whether it was taken for a frame of so many bytes; raises what is no FormatError."""
    out = bytearray(nbytes + 8)
    try:
        CODEC.decode(memoryview(frame), memoryview(out)[:nbytes])
    except FormatError:
        return False
    finally:
        assert out[nbytes:] == bytes(8), "wrote behind its end"
    return True


@pytest.mark.parametrize("name", FRAMES)
def test_torn_or_of_another_length(name: str) -> None:
    frame, nbytes = FRAMES[name]
    assert frame is not None
    assert decode(frame, nbytes)
    for cut in {*range(64), *range(64, len(frame), 97), len(frame) - 1}:
        assert not decode(frame[:cut], nbytes)
    assert not decode(frame + b"\0", nbytes)
    assert not decode(frame + frame, nbytes)
    for other in (0, 1, nbytes - 1, nbytes + 1, nbytes - 8, nbytes + 8, 2 * nbytes):
        assert not decode(frame, other)


@settings(deadline=None)
@given(st.sampled_from(sorted(FRAMES)), st.integers(0, 2**32 - 1))
def test_mutated(name: str, seed: int) -> None:
    """Ten at once. What is not noticed decodes to other bytes, which their digest tells."""
    good, nbytes = FRAMES[name]
    assert good is not None
    chance = random.Random(seed)
    for _ in range(10):
        frame = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(frame)) if chance.random() < 0.5 else chance.randrange(60)
            kind = chance.randrange(4)
            if kind == 0:
                frame[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                frame[at] = chance.choice((0, 1, 2, 3, 127, 128, 255))
            elif kind == 2:
                del frame[at : at + chance.randint(1, 9)]
            else:
                frame[at:at] = chance.randbytes(chance.randint(1, 9))
        decode(bytes(frame), nbytes)


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3000))
def test_made_up(frame: bytes, nbytes: int) -> None:
    decode(frame, nbytes)


def head(kind: int = 0, row: int = 0, first: int = 0) -> bytes:
    return struct.pack("<BHH", kind, row, first)


def plane(flag: int, body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<BI", flag, len(body) if length is None else length) + body


def zeros(nbytes: int, **more: bool) -> bytes:
    return zstandard.ZstdCompressor(**more).compress(bytes(nbytes))


def pairs(nbytes: int, strays: bytes, symbols: bytes) -> bytes:
    return plane(2, struct.pack("<BI", 7, nbytes) + strays + zstandard.ZstdCompressor().compress(symbols))


N = 1000
REST = plane(0, bytes(N)) + plane(0, bytes(2 * N))
NONE, ROWS, BOTH = b"\0", b"\1", b"\2"


def test_what_is_made_by_hand_decodes() -> None:
    """Or the refusals below would prove nothing."""
    for good in (
        head() + NONE + plane(0, bytes(N)) + REST,
        head() + NONE + plane(1, zeros(N)) + REST,
        head() + NONE + plane(3, bytes(7 * N // 8)) + REST,
        head() + NONE + pairs(0, b"", bytes(N // 2)) + REST,
        head() + NONE + pairs(1, b"\7", b"\x0f" + bytes(N // 2 - 1)) + REST,
        head(0, 100, 99) + ROWS + plane(1, zeros(11)) + plane(0, bytes(N)) + REST,
        head(0, 64) + BOTH + plane(0, bytes(32)) + plane(1, zeros(64)) + plane(0, bytes(N)) + REST,
    ):
        assert decode(good, 4 * N)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        head(4) + NONE + plane(0, bytes(N)) + REST,
        head(0, 63) + NONE + plane(0, bytes(N)) + REST,
        head(0, 16385) + NONE + plane(0, bytes(N)) + REST,
        head(0, 100, 100) + NONE + plane(0, bytes(N)) + REST,
        head(0, 0, 1) + NONE + plane(0, bytes(N)) + REST,
        head() + ROWS + plane(0, bytes(N)) + plane(0, bytes(N)) + REST,
        head(0, 64) + b"\3" + plane(0, bytes(16)) + plane(0, bytes(N)) + REST,
        head(0, 64) + BOTH + plane(0, bytes(16)) + plane(1, zeros(64)) + plane(0, bytes(N)) + REST,
        head(0, 64) + ROWS + plane(0, bytes(15)) + plane(0, bytes(N)) + REST,
        head(0, 64) + ROWS + pairs(0, b"", bytes(8)) + plane(0, bytes(N)) + REST,
        head(0, 64) + BOTH + plane(0, bytes(32)) + plane(1, zeros(65)) + plane(0, bytes(N)) + REST,
        head() + NONE + plane(3, bytes(N)) + REST,
        head() + NONE + plane(3, bytes(7 * N // 8 - 1)) + REST,
        head() + NONE + plane(4, bytes(N)) + REST,
        head() + NONE + plane(0, bytes(N), 2**32 - 1) + REST,
        head() + NONE + plane(0, bytes(N - 1)) + REST,
        head() + NONE + plane(0, bytes(N + 1)) + REST,
        head() + NONE + plane(1, zeros(N - 1)) + REST,
        head() + NONE + plane(1, zeros(N + 1)) + REST,
        head() + NONE + plane(1, zeros(N, write_content_size=False)) + REST,
        head() + NONE + plane(1, zeros(N) + zeros(N)) + REST,
        head() + NONE + plane(1, zeros(N) + b"\0") + REST,
        head() + NONE + plane(1, b"") + REST,
        head() + NONE + pairs(1, b"", bytes(N // 2)) + REST,
        head() + NONE + pairs(0, b"", b"\x0f" + bytes(N // 2 - 1)) + REST,
        head() + NONE + pairs(1, b"\7", bytes(N // 2)) + REST,
        head() + NONE + pairs(2**32 - 1, b"\7", bytes(N // 2)) + REST,
        head() + NONE + pairs(0, b"", bytes(N // 2 + 1)) + REST,
        head() + NONE + plane(2, b"") + REST,
        head() + NONE + plane(2, b"\7\0\0\0\0") + REST,
        head() + NONE + plane(0, bytes(N)) + REST + b"\0",
    ],
)
def test_refuses(frame: bytes) -> None:
    assert not decode(frame, 4 * N)


BOUNDED = """
import resource, struct, sys
from ckptlib.codecs import registry
from ckptlib.errors import FormatError
names = sys.argv[1].split(",")
codecs = [registry.find(name) for name in names]
for codec in codecs:  # what they need is there before the limit
    codec.decode(codec.encode(memoryview(bytes(100_000)), registry_content), memoryview(bytearray(100_000)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))
for line in sys.stdin:
    name, frame = line.split()
    try:
        registry.find(name).decode(memoryview(bytes.fromhex(frame)), memoryview(bytearray(100_000)))
    except FormatError as error:
        print(error)
    else:
        raise SystemExit(f"{line}: decoded")
""".replace("registry_content", "__import__('ckptlib.codecs.codec').codecs.codec.Content('float32', 1)")


def test_memory_is_not_taken_for_what_a_frame_claims() -> None:
    """2^60 bytes, and every smaller claim: as the content of a frame, as its window, and as a length."""
    claims = []
    for power in (20, 24, 27, 28, 30, 31, 32, 40, 50, 60, 63):
        content = b"\x28\xb5\x2f\xfd" + b"\xe0" + (1 << power).to_bytes(8, "little") + b"\x01\x00\x00"
        window = min(31, max(0, power - 10)) << 3
        windowed = b"\x28\xb5\x2f\xfd" + b"\xc0" + bytes([window]) + (25_000).to_bytes(8, "little") + b"\x03\x00\x00A"
        for frame in (content, content[:-2], windowed, windowed[:-2]):
            claims += [("zstd", frame), ("planes", head() + NONE + plane(1, frame))]
            claims.append(("planes", head() + NONE + plane(2, struct.pack("<BI", 0, 0) + frame)))
        claims.append(("planes", head() + NONE + plane(power % 3, b"", min(1 << power, 2**32 - 1))))
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, "planes,zstd"],
        input="".join(f"{name} {frame.hex()}\n" for name, frame in claims),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(claims)
    assert "alloc" not in done.stdout.lower(), "refused only because memory ran out"
