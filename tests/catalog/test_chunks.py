"""Chunks wherever they lie, and whatever they are stored as; and none believed that is not what its part says."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from ckptlib.catalog.chunks import UNSEEN_BYTES, read_chunk
from ckptlib.codecs import registry
from ckptlib.codecs.codec import BaseCodec, Codec, Content
from ckptlib.errors import CorruptData, FormatError, ObjectNotFound, StoreError
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.part import Pack, Part
from ckptlib.format.places import Base, Coding
from ckptlib.format.table import Table
from ckptlib.stores.memory import MemoryStore

SAVE = SaveId(2, GenerationId(1, "0" * 8))
OLD = SaveId(1, SAVE.generation)


class Turned(Codec):
    """The bytes from last to first, behind one that says so."""

    name = "turned"

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes:
        return b"t" + bytes(raw)[::-1].lstrip(b"\0")

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        if frame[:1] != b"t" or len(frame) - 1 > len(out):
            raise FormatError(f"a frame of {len(frame)} bytes is not of {len(out)}")
        out[:] = bytes(frame[1:]).rjust(len(out), b"\0")[::-1]


class Changed(BaseCodec):
    """What to add to each byte of the base; zeros at the end are left out."""

    name = "changed"

    @override
    def encode(self, raw: memoryview, base: memoryview, content: Content) -> bytes:
        return b"c" + bytes((a - b) % 256 for a, b in zip(raw, base, strict=True)).rstrip(b"\0")

    @override
    def decode(self, frame: memoryview, base: memoryview, out: memoryview) -> None:
        if frame[:1] != b"c" or len(frame) - 1 > len(out):
            raise FormatError(f"a frame of {len(frame)} bytes is not of {len(out)}")
        added = bytes(frame[1:]).ljust(len(out), b"\0")
        out[:] = bytes((a + b) % 256 for a, b in zip(added, base, strict=True))


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registry.find.cache_clear()
    monkeypatch.setattr(registry, "_MAKERS", {"turned": Turned, "changed": Changed})
    yield
    registry.find.cache_clear()


RAW = bytes(range(100)) + bytes(20)
BASE = bytes(range(90)) + b"base" + bytes(26)
NOTE = Content("uint8", 1)
TURNED, BASE_TURNED = Turned().encode(memoryview(RAW), NOTE), Turned().encode(memoryview(BASE), NOTE)
CHANGED = Changed().encode(memoryview(RAW), memoryview(BASE), NOTE)
NEW = b"head" + RAW + TURNED + CHANGED + CHANGED
EARLIER = b"header" + BASE + BASE_TURNED + RAW
AT = (
    4,
    4 + len(RAW),
    4 + len(RAW) + len(TURNED),
    4 + len(RAW) + len(TURNED) + len(CHANGED),
    6 + len(BASE + BASE_TURNED),
)
PACKS = (Pack(SAVE.pack_key(0, "a" * 8, 0), len(NEW), 2.0), Pack(OLD.pack_key(0, "b" * 8, 0), len(EARLIER), 1.0))


def digest(data: bytes) -> str:
    return digester(XXH3)(data)


CODINGS = {
    1: Coding("turned", len(TURNED)),
    2: Coding("changed", len(CHANGED), Base(1, 6, len(BASE), None, digest(BASE))),
    3: Coding("changed", len(CHANGED), Base(1, 6 + len(BASE), len(BASE_TURNED), "turned", digest(BASE))),
}
PART = Part(
    save=SAVE,
    rank=0,
    world_size=1,
    attempt="a" * 8,
    table=Table("0" * 32, (0,) * 5, (Box((0,), (len(RAW),)),) * 5, (1,) * 5, (0, 0, 0, 0, 1), AT, (len(RAW),) * 5),
    packs=PACKS,
    algorithm=XXH3,
    digests=(digest(RAW),) * 5,
    values={},
    metrics={},
    created=2.0,
    codings=CODINGS,
)
"""The same bytes five times: as they are, as a frame, against a base, against a base that is a frame, and elsewhere."""


def store_with(new: bytes = NEW, earlier: bytes = EARLIER) -> MemoryStore:
    store = MemoryStore()
    store.put(PACKS[0].key, new)
    store.put(PACKS[1].key, earlier)
    return store


def with_coding(chunk: int, coding: Coding) -> Part:
    return replace(PART, codings={**CODINGS, chunk: coding})


@pytest.mark.parametrize("chunk", range(5))
def test_every_sort_of_chunk_is_read(chunk: int) -> None:
    assert Part.decode(*PART.encode()) == PART
    assert bytes(read_chunk(store_with().get_into, PART, chunk)) == RAW


def test_a_codec_that_is_not_known_says_what_to_do() -> None:
    part = with_coding(1, Coding("of-tomorrow", len(TURNED)))
    with pytest.raises(FormatError, match=r"codec 'of-tomorrow' is not one of raw, turned, changed; update ckptlib"):
        read_chunk(store_with().get_into, part, 1)


def test_a_base_that_was_altered_is_found() -> None:
    at = EARLIER.index(b"base")
    earlier = EARLIER[:at] + b"BASE" + EARLIER[at + 4 :]
    with pytest.raises(CorruptData, match=f"{PACKS[1].key} .6:.120., which later chunks are stored as changes of"):
        read_chunk(store_with(earlier=earlier).get_into, PART, 2)
    assert bytes(read_chunk(store_with(earlier=earlier).get_into, PART, 3)) == RAW


def test_a_base_that_is_gone_is_told() -> None:
    store = store_with()
    store.delete(PACKS[1].key)
    with pytest.raises(ObjectNotFound, match=PACKS[1].key):
        read_chunk(store.get_into, PART, 2)
    assert bytes(read_chunk(store.get_into, PART, 1)) == RAW


def test_a_base_has_no_base() -> None:
    """No chain, and so no cycle."""
    base = CODINGS[3].base
    assert base is not None
    part = with_coding(3, Coding("changed", len(CHANGED), base._replace(codec="changed")))
    with pytest.raises(FormatError, match="codec 'changed' has no base"):
        read_chunk(store_with().get_into, part, 3)


def test_a_base_is_for_a_codec_that_takes_one() -> None:
    with pytest.raises(FormatError, match="codec 'changed' has no base"):
        read_chunk(store_with().get_into, with_coding(2, Coding("changed", len(CHANGED))), 2)
    with pytest.raises(FormatError, match="codec 'turned' takes no base"):
        read_chunk(store_with().get_into, with_coding(1, Coding("turned", len(TURNED), CODINGS[2].base)), 1)


@given(st.integers(0, len(NEW) - 1), st.integers(0, len(EARLIER) - 1), st.integers(0, 255), st.integers(0, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_found_here_or_by_the_digest(new: int, earlier: int, byte: int, chunk: int) -> None:
    """Never another exception than ours, and never more bytes than the chunk has."""
    store = store_with(
        NEW[:new] + bytes([byte]) + NEW[new + 1 :], EARLIER[:earlier] + bytes([byte]) + EARLIER[earlier + 1 :]
    )
    try:
        found = bytes(read_chunk(store.get_into, PART, chunk))
    except (CorruptData, FormatError):
        return
    assert len(found) == len(RAW)
    if found != RAW:
        assert digest(found) != PART.digests[chunk]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_coding_ends_in_bytes_or_in_an_error_of_ours(data: st.DataObject) -> None:
    number = st.integers(0, 300)
    names = st.sampled_from(["turned", "changed", "of-tomorrow"])
    base = st.builds(Base, st.integers(0, 1), number, st.integers(1, 120), st.none() | names, st.just(digest(BASE)))
    coding = data.draw(st.builds(Coding, names, st.integers(1, 120), st.none() | base))
    table = PART.table.placed((0, data.draw(st.integers(0, 1)), 0, 0, 1), (4, data.draw(number), *AT[2:]))
    part = replace(with_coding(1, coding), table=table)
    with contextlib.suppress(CorruptData, FormatError, StoreError):
        assert len(read_chunk(store_with().get_into, part, 1)) == len(RAW)


@pytest.mark.parametrize("nbytes", [UNSEEN_BYTES + 1, 2**50, 2**61])
def test_memory_is_taken_for_what_is_there(nbytes: int) -> None:
    table = replace(PART.table, nbytes=(nbytes,) * 5)
    part = replace(PART, table=table, codings={})
    store = store_with()
    tracemalloc.start()
    try:
        with pytest.raises((CorruptData, FormatError, StoreError)):
            read_chunk(store.get_into, part, 0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
