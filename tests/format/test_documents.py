"""The envelope: what it holds comes back, and nothing else is ever believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support import flips, of_version

from ckptlib.errors import CorruptData, FormatError, NewerFormat, UnsupportedState
from ckptlib.format import documents
from ckptlib.format.documents import (
    VERSION,
    Fields,
    as_written,
    decode,
    dump_body,
    encode,
    is_version_altered,
    seal,
)
from ckptlib.format.values import Json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # surrogates are no Unicode: the encoding of values keeps them out of documents
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc$\u00e9", max_size=3), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.text("abcd", max_size=3), JSON, max_size=5)

EXAMPLE = encode("manifest", {"step": 500, "names": ["a", "b"], "nothing": None})
BODY_AT = EXAMPLE.index(b'"body":') + len(b'"body":')
FIRST = encode("layout", {"step": 500, "names": ["a", "b"], "nothing": None})
"""Of a kind that is still written in version 1."""
of_both_versions = pytest.mark.parametrize("example", [FIRST, EXAMPLE], ids=["version 1", "version 2"])


def kind_of(example: bytes) -> str:
    return "manifest" if example is EXAMPLE else "layout"


@given(BODIES)
def test_what_is_encoded_comes_back_in_order(body: dict[str, Json]) -> None:
    fields = decode("part", encode("part", body), "here")
    for name, value in body.items():
        assert name in fields
        assert fields.raw(name) == value
    assert list(fields._value) == list(body)


def test_no_document_is_written_that_nobody_would_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", len(EXAMPLE))
    assert seal("manifest", EXAMPLE[BODY_AT:-2].decode()) == EXAMPLE
    with pytest.raises(UnsupportedState, match=f"the part would have .* has at most {len(EXAMPLE)}"):
        encode("part", {"values": "x" * len(EXAMPLE)})


@of_both_versions
def test_a_document_can_be_checked_by_hand(example: bytes) -> None:
    """With what the format's description says, and without this library."""
    envelope = json.loads(example)
    assert list(envelope) == ["ckptlib", "kind", "digest", "body"]
    assert envelope["kind"] == kind_of(example)
    body = example[example.index(b'"body":') + len(b'"body":') : -2]
    assert example[-2:] == b"}\n"
    covered = b"" if envelope["ckptlib"] == 1 else example[: example.index(b',"digest"')]
    assert envelope["digest"] == "xxh3:" + xxhash.xxh3_128_hexdigest(covered + body)
    assert json.loads(body) == envelope["body"]


@pytest.mark.parametrize(("kind", "version"), [("layout", 1), ("root", 1), ("manifest", 2), ("trash", 2)])
def test_bytes_never_change(kind: str, version: int) -> None:
    """Names of layouts and parts are digests of these bytes."""
    body = b'{"step":500,"names":["a","b"],"nothing":null}'
    head = b'{"ckptlib":%d,"kind":"%s"' % (version, kind.encode())
    digest = xxhash.xxh3_128_hexdigest(body if version == 1 else head + body).encode()
    expected = head + b',"digest":"xxh3:' + digest + b'","body":' + body + b"}\n"
    assert encode(kind, {"step": 500, "names": ["a", "b"], "nothing": None}) == expected
    assert dump_body({"b": 1, "a": [1.5, "\u00e9"]}) == '{"b":1,"a":[1.5,"\\u00e9"]}'


def test_only_what_readers_of_version_1_would_take_wrongly_is_of_version_2() -> None:
    versions = {kind: json.loads(encode(kind, {}))["ckptlib"] for kind in KINDS}
    assert versions == {kind: 2 if kind in ("generation", "part", "manifest", "trash") else 1 for kind in KINDS}


KINDS = ("root", "generation", "layout", "part", "failure", "manifest", "trash", "snapshot")
VERSION_AT = EXAMPLE.index(b":") + 1


@of_both_versions
def test_every_flipped_bit_is_found(example: bytes) -> None:
    body_at = example.index(b'"body":') + len(b'"body":')
    for position, data in flips(example):
        if position == VERSION_AT:
            continue  # the next test
        expected = CorruptData if position >= body_at else (CorruptData, FormatError)
        with pytest.raises(expected, match="here"):
            decode(kind_of(example), data, "here")


@of_both_versions
def test_a_document_is_of_the_version_that_its_digest_says(example: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One flipped bit in its number blocks nothing."""
    said = example[VERSION_AT : VERSION_AT + 1]
    altered = [data for position, data in flips(example) if position == VERSION_AT and data[position] != ord(",")]
    texts = {b"1", b"2", b"0", b"02", b"01", b"10", b"999999999", b"x"} - {said}
    altered += [example.replace(b":%s," % said, b":%s," % text, 1) for text in texts]
    for data in altered:
        caplog.clear()
        assert decode(kind_of(example), data, "here").integer("step") == 500
        assert "here: the version in it was altered" in caplog.text
        assert "for more that was: ckptlib verify URL --all" in caplog.text
        assert as_written(data, "here") == example
        assert is_version_altered(data)
    caplog.clear()
    assert as_written(example, "here") == example
    assert not is_version_altered(example)
    assert not caplog.text


@of_both_versions
def test_every_truncation_is_found(example: bytes) -> None:
    for length in range(len(example)):
        with pytest.raises((CorruptData, FormatError), match="here"):
            decode(kind_of(example), example[:length], "here")
    for tail in (b"\n", b"}", b"\0", example):
        with pytest.raises(CorruptData):
            decode(kind_of(example), example + tail, "here")


@given(st.binary(max_size=200))
def test_noise_is_no_document(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode("part", data, "here")


def test_a_newer_version_is_told_apart_from_damage() -> None:
    """Whoever is told to update ckptlib has a document that is whole."""
    for version in (VERSION + 1, 10, 999_999_999):
        newer = of_version(EXAMPLE, version)
        for kind in ("manifest", "part"):
            with pytest.raises(NewerFormat, match=f"here has format version {version};.*update ckptlib"):
                decode(kind, newer, "here")
        for _, data in flips(newer):
            with pytest.raises((CorruptData, FormatError), match="here") as caught:
                decode("manifest", data, "here")
            assert not isinstance(caught.value, NewerFormat)
        for length in range(len(newer)):
            with pytest.raises((CorruptData, FormatError)) as caught:
                decode("manifest", newer[:length], "here")
            assert not isinstance(caught.value, NewerFormat)
    with pytest.raises(CorruptData):
        decode("manifest", of_version(EXAMPLE, VERSION + 1).replace(b":3,", b":03,"), "here")


@pytest.mark.parametrize("version", [b"x", b"0", b"-1", b"03", b"1e3"])
def test_what_is_no_version_is_damage_whatever_its_digest(version: bytes) -> None:
    head, body = b'{"ckptlib":' + version + b',"kind":"manifest"', EXAMPLE[BODY_AT:-2]
    digest = xxhash.xxh3_128_hexdigest(head + body).encode()
    document = head + b',"digest":"xxh3:' + digest + b'","body":' + body + b"}\n"
    with pytest.raises(CorruptData):
        decode("manifest", document, "here")


def test_every_version_up_to_this_one_is_read() -> None:
    assert of_version(EXAMPLE, 2) == EXAMPLE
    for version in range(1, VERSION + 1):
        assert decode("manifest", of_version(EXAMPLE, version), "here").integer("step") == 500


def test_another_kind_or_another_digest_is_refused() -> None:
    with pytest.raises(FormatError, match="here is a manifest, expected a part"):
        decode("part", EXAMPLE, "here")
    sealed = EXAMPLE[: BODY_AT - len(b',"body":')]
    foreign = sealed.replace(b"xxh3:" + sealed[-33:-1], b"md5:" + hashlib.md5(EXAMPLE[BODY_AT:-2]).hexdigest().encode())
    with pytest.raises(FormatError, match="here has a digest by 'md5'"):
        decode("manifest", foreign + EXAMPLE[len(sealed) :], "here")


@pytest.mark.parametrize(
    "body",
    ["[]", "3", "null", '"x"', "", "{", "{}{}", '{"a":NaN}', '{"a":1e999}', '{"a":1,"a":2}', "[" * 100_000, "\x00"],
)
def test_a_body_that_is_no_object_is_refused(body: str) -> None:
    with pytest.raises(FormatError):
        decode("part", seal("part", body), "here")


def fields_of(value: object) -> Fields:
    return Fields({"x": value}, "here")  # type: ignore[dict-item]


READERS: dict[str, tuple[Callable[[Fields], object], list[object], list[object]]] = {
    "integer": (lambda f: f.integer("x", 1, 9), [1, 9], [0, 10, True, 1.0, "1", None, [1], 10**400]),
    "number": (lambda f: f.number("x"), [0, -1, 1.5], [True, "1", None, 10**400, -(10**400), []]),
    "text": (lambda f: f.text("x"), ["", "a"], [1, None, ["a"], {}]),
    "text like": (lambda f: f.text("x", "[ab]+"), ["a", "ab"], ["", "c", "a\n", "aC", 1]),
    "digest": (lambda f: f.digest("x"), ["0" * 32], ["0" * 31, "0" * 33, "F" * 32, "../" + "0" * 29, 0, "\u0660" * 32]),
    "integers": (lambda f: f.integers("x", 0, 3), [[], [0, 3]], [[4], [-1], [True], [1.0], ["1"], 1, None, {"0": 1}]),
    "items": (lambda f: f.items("x"), [[], [None, 1]], [{}, "ab", None, 1]),
    "texts": (lambda f: f.texts("x"), [[], ["a"]], [["a", 1], "ab", [None], None]),
    "mapping": (lambda f: f.mapping("x"), [{}, {"a": 1}], [[], "a", None, 1]),
}


@pytest.mark.parametrize("name", READERS)
def test_fields_are_read_strictly(name: str) -> None:
    read, good, bad = READERS[name]
    for value in good:
        found = read(fields_of(value))
        assert found == value
    for value in bad:
        with pytest.raises(FormatError, match="here: field 'x' is not "):
            read(fields_of(value))
    with pytest.raises(FormatError, match="here: field 'x' is missing"):
        read(Fields({"y": 1}, "here"))


def test_inner_fields_name_the_way() -> None:
    inner = Fields({"a": {"b": 1}}, "here").inner("a")
    assert inner.integer("b") == 1
    with pytest.raises(FormatError, match="here: a: field 'c' is missing"):
        inner.raw("c")
    with pytest.raises(FormatError, match="here: a: expected an object, got int"):
        Fields({"a": 1}, "here").inner("a")
    assert str(inner.fail("is odd")) == "here: a: is odd"
