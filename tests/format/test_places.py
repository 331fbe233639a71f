"""Where chunks lie: runs written out by another hand, and nothing hostile believed."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError
from ckptlib.format.documents import Fields
from ckptlib.format.places import MAX_CODED_BYTES, Base, Coding, Loss, Places, decode_places, encode_places

DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
CODECS = st.sampled_from(["planes", "patch", "zstd", "z", "0-9"])
BOUNDS = st.floats(0, 1e300)
LOSSES = st.builds(Loss, DIGESTS, BOUNDS, BOUNDS)


@st.composite
def codings(draw: st.DrawFn, nbytes: int) -> Coding:
    stored = draw(st.integers(1, nbytes))
    base = None
    if draw(st.booleans()):
        codec = draw(st.none() | CODECS)
        size = nbytes if codec is None else draw(st.integers(1, nbytes))
        base = Base(draw(st.integers(0, 9)), draw(st.integers(0, 2**62)), size, codec, draw(DIGESTS))
    return Coding(draw(CODECS), stored, base, draw(st.none() | LOSSES))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Places, list[int]]:
    """Chunks, most of them right behind the one before, and their sizes."""
    nbytes = draw(st.lists(st.integers(1, 5000) | st.sampled_from([MAX_CODED_BYTES, 2**50]), max_size=12))
    found = {
        chunk: draw(codings(size))
        for chunk, size in enumerate(nbytes)
        if size <= MAX_CODED_BYTES and draw(st.integers(0, 2)) == 0
    }
    packs: list[int] = []
    offsets: list[int] = []
    for chunk in range(len(nbytes)):
        if chunk and draw(st.integers(0, 3)):
            before = found[chunk - 1].stored if chunk - 1 in found else nbytes[chunk - 1]
            packs.append(packs[-1])
            offsets.append(offsets[-1] + before)
        else:
            packs.append(draw(st.integers(0, 9)))
            offsets.append(draw(st.integers(0, 2**60)))
    return Places(tuple(packs), tuple(offsets), found), nbytes


def written_out(part: dict[str, Any], nbytes: Sequence[int]) -> list[tuple[object, ...]]:
    """Per chunk: pack, offset, bytes there, codec, base, and what is lost; as FORMAT.md tells it."""
    places = part["places"]
    names = [None, *places.get("codecs", [])]
    codec = [names[number] for number in places.get("codec", [0] * len(nbytes))]
    stored = places.get("stored", list(nbytes))
    bases, lossy = part.get("bases", {"chunk": []}), part.get("lossy", {"chunk": []})
    found: list[tuple[object, ...]] = []
    for pack, start, count in places["runs"]:
        offset = start
        for _ in range(count):
            chunk = len(found)
            base, raw = None, None
            if chunk in bases["chunk"]:
                at = bases["chunk"].index(chunk)
                columns = [bases[name][at] for name in ("pack", "offset", "stored")]
                base = (*columns, names[bases["codec"][at]], bases["digests"][32 * at : 32 * at + 32])
            if chunk in lossy["chunk"]:
                at = lossy["chunk"].index(chunk)
                raw = (lossy["digests"][32 * at : 32 * at + 32], lossy["absolute"][at], lossy["relative"][at])
            found.append((pack, offset, stored[chunk], codec[chunk], base, raw))
            offset += stored[chunk]
    return found


@given(placed())
def test_there_and_back(case: tuple[Places, list[int]]) -> None:
    places, nbytes = case
    part = json.loads(json.dumps(encode_places(places, nbytes)))
    assert decode_places(Fields(part, "here"), nbytes) == places
    expected = []
    for chunk, size in enumerate(nbytes):
        at, coding = (places.packs[chunk], places.offsets[chunk]), places.codings.get(chunk)
        told = (size, None, None, None)
        if coding is not None:
            base = None if coding.base is None else tuple(coding.base)
            loss = None if coding.loss is None else tuple(coding.loss)
            told = (coding.stored, coding.codec, base, loss)  # type: ignore[assignment]
        expected.append((*at, *told))
    assert written_out(part, nbytes) == expected


@given(placed())
def test_chunks_that_follow_one_another_are_one_run(case: tuple[Places, list[int]]) -> None:
    places, nbytes = case
    stored = places.stored(nbytes)
    breaks = sum(
        chunk == 0
        or (places.packs[chunk], places.offsets[chunk])
        != (places.packs[chunk - 1], places.offsets[chunk - 1] + stored[chunk - 1])
        for chunk in range(len(nbytes))
    )
    part = encode_places(places, nbytes)
    assert len(part["places"]["runs"]) == breaks  # type: ignore[index, call-overload, arg-type]
    assert ("codec" in part["places"]) == bool(places.codings)  # type: ignore[operator]


def test_raw_chunks_take_a_few_bytes_a_run() -> None:
    """100,000 chunks of 256 KiB, every tenth of them new: 3.4 bytes a chunk."""
    num, size = 100_000, 1 << 18
    packs = tuple(int(chunk % 10 == 0) for chunk in range(num))
    offsets = tuple(4096 + size * (chunk // 10 if chunk % 10 == 0 else chunk) for chunk in range(num))
    text = json.dumps(encode_places(Places(packs, offsets, {}), [size] * num), separators=(",", ":"))
    assert len(text) < 4 * num
    assert decode_places(Fields(json.loads(text), "here"), [size] * num) == Places(packs, offsets, {})


# -- hostile parts

NBYTES = [100, 200, 300, MAX_CODED_BYTES + 1]
GOOD: dict[str, Any] = {
    "places": {
        "runs": [[0, 4096, 2], [1, 0, 2]],
        "codecs": ["patch", "planes"],
        "codec": [0, 1, 2, 0],
        "stored": [100, 20, 300, MAX_CODED_BYTES + 1],
    },
    "bases": {"chunk": [1], "pack": [2], "offset": [4096], "stored": [50], "codec": [2], "digests": "a" * 32},
    "lossy": {"chunk": [2], "absolute": [0.5], "relative": [0.0], "digests": "b" * 32},
}


LOSSY = Coding("planes", 300, None, Loss("b" * 32, 0.5, 0.0))


def test_the_good_one_is_read() -> None:
    assert decode_places(Fields(GOOD, "here"), NBYTES) == Places(
        (0, 0, 1, 1),
        (4096, 4196, 0, 300),
        {1: Coding("patch", 20, Base(2, 4096, 50, "planes", "a" * 32)), 2: LOSSY},
    )


def changed(field: str, **columns: object) -> dict[str, object]:
    return {**GOOD, field: {name: v for name, v in {**GOOD[field], **columns}.items() if v is not ...}}


TWO_LOSSES = {"absolute": [0.0] * 2, "relative": [0.0] * 2, "digests": "b" * 64}
HOSTILE = {
    "no runs": changed("places", runs=...),
    "too few chunks": changed("places", runs=[[0, 4096, 3]]),
    "too many chunks": changed("places", runs=[[0, 4096, 2], [1, 0, 3]]),
    "2**60 chunks": changed("places", runs=[[0, 0, 2**60]]),
    "2**60 chunks twice": changed("places", runs=[[0, 0, 2**60], [0, 0, -(2**60)], [0, 0, 4]]),
    "many runs of all": changed("places", runs=[[0, 0, 4]] * 1000),
    "no chunks": changed("places", runs=[[0, 4096, 0], [0, 4096, 2], [1, 0, 2]]),
    "pack -1": changed("places", runs=[[-1, 4096, 4]]),
    "pack 2**40": changed("places", runs=[[2**40, 4096, 4]]),
    "offset -1": changed("places", runs=[[0, -1, 4]]),
    "offset 2**63": changed("places", runs=[[0, 2**63, 4]]),
    "a run of two": changed("places", runs=[[0, 4096], [1, 0, 2]]),
    "a run of four": changed("places", runs=[[0, 4096, 2, 0], [1, 0, 2]]),
    "floats": changed("places", runs=[[0, 4096.0, 4]]),
    "bools": changed("places", runs=[[0, 4096, True], [0, 4196, 3]]),
    "codec 3": changed("places", codec=[0, 1, 3, 0]),
    "codec -1": changed("places", codec=[0, 1, -1, 0]),
    "few codecs": changed("places", codec=[0, 1, 2]),
    "no names": changed("places", codecs=...),
    "a name that is none": changed("places", codecs=["patch", "../planes"]),
    "a long name": changed("places", codecs=["patch", "p" * 41]),
    "a name of nothing": changed("places", codecs=["patch", ""]),
    "no sizes": changed("places", stored=...),
    "few sizes": changed("places", stored=[100, 20, 300]),
    "stored in nothing": changed("places", stored=[100, 0, 300, MAX_CODED_BYTES + 1]),
    "stored in more": changed("places", stored=[100, 201, 300, MAX_CODED_BYTES + 1]),
    "raw in less": changed("places", stored=[99, 20, 300, MAX_CODED_BYTES + 1]),
    "raw in more": changed("places", stored=[101, 20, 300, MAX_CODED_BYTES + 1]),
    "a coded chunk that is too large": changed("places", codec=[0, 1, 2, 2], stored=[100, 20, 300, 1]),
    "a base of a raw chunk": changed("bases", chunk=[0]),
    "a base of no chunk": changed("bases", chunk=[4]),
    "a base of chunk -1": changed("bases", chunk=[-1]),
    "two bases of a chunk": {
        **GOOD,
        "bases": {k: v * 2 for k, v in GOOD["bases"].items()},
    },
    "a base too few": changed("bases", pack=[]),
    "a base of pack -1": changed("bases", pack=[-1]),
    "a base of pack 2**40": changed("bases", pack=[2**40]),
    "a base at -1": changed("bases", offset=[-1]),
    "a base at 2**63": changed("bases", offset=[2**63]),
    "a base of nothing": changed("bases", stored=[0]),
    "a base that is larger": changed("bases", stored=[201]),
    "a raw base that is smaller": changed("bases", stored=[50], codec=[0]),
    "a raw base that is larger": changed("bases", stored=[201], codec=[0]),
    "a base of codec 3": changed("bases", codec=[3]),
    "a base without a digest": changed("bases", digests=""),
    "a base of half a digest": changed("bases", digests="a" * 16),
    "a base of another digest": changed("bases", digests="G" * 32),
    "a loss of a raw chunk": changed("lossy", chunk=[0]),
    "a loss of no chunk": changed("lossy", chunk=[4]),
    "two losses of a chunk": {**GOOD, "lossy": {**TWO_LOSSES, "chunk": [2, 2]}},
    "losses out of order": {**GOOD, "lossy": {**TWO_LOSSES, "chunk": [2, 1]}},
    "a loss without a bound": changed("lossy", absolute=...),
    "a loss of too few bounds": changed("lossy", relative=[]),
    "a loss of too many bounds": changed("lossy", relative=[0.0, 0.0]),
    "a loss of less than nothing": changed("lossy", absolute=[-0.5]),
    "a loss that is no number": changed("lossy", absolute=[True]),
    "a loss beyond all numbers": changed("lossy", absolute=[10**400]),
    "a loss without a digest": changed("lossy", digests=""),
    "places of nothing": {**GOOD, "places": []},
    "bases of nothing": {**GOOD, "bases": None},
    "losses of nothing": {**GOOD, "lossy": 3},
}


@pytest.mark.parametrize("part", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_place_of_each_chunk_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="here"):
        decode_places(Fields(part, "here"), NBYTES)


ODD = st.sampled_from([None, True, -1, 0, 1, 2, 3, 2**60, 2**62, 2**63, 10**400, 1.5, "", "planes", "f" * 32, [], {}])


@given(st.data())
def test_any_value_in_any_field_is_taken_or_refused(data: st.DataObject) -> None:
    """What is taken is as many places as there are chunks; never another exception than ours."""
    field = data.draw(st.sampled_from(sorted(GOOD)))
    column = data.draw(st.sampled_from(sorted(GOOD[field])))
    value = data.draw(ODD | st.lists(ODD, max_size=5) | st.lists(st.lists(ODD, max_size=4), max_size=4))
    try:
        places = decode_places(Fields(changed(field, **{column: value}), "here"), NBYTES)
    except FormatError:
        return
    assert len(places.packs) == len(places.offsets) == len(NBYTES)
    assert all(places.codings[chunk].stored <= NBYTES[chunk] for chunk in places.codings)


@pytest.mark.parametrize(
    "runs",
    [[[0, 0, 2**60]], [[0, 0, 2**60]] * 1000, [[0, 0, 100_000]] * 1000, [[0, 0, 99_999], [0, 0, 2**62]]],
)
def test_a_few_bytes_that_tell_of_a_billion_chunks_take_no_memory(runs: list[list[int]]) -> None:
    nbytes = [1] * 100_000
    fields = Fields({"places": {"runs": runs}}, "here")  # type: ignore[dict-item]
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(FormatError, match="here: places: "):
            decode_places(fields, nbytes)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        assert time.process_time() - began < 1
    finally:
        tracemalloc.stop()
