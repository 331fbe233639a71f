"""The envelope of every JSON document of a checkpoint, and strict reading of its body.

    {"ckptlib":2,"kind":"manifest","digest":"xxh3:<32 hex>","body":{...}}

In version 1 the digest covers the exact bytes of the body. A document whose body matches such a digest is of version 1
whatever its number says: one flipped bit there must not pass for a future format. From version 2 on the digest covers
version, kind and body. So a newer document that is whole can be told from a damaged one, for which nobody has to update
ckptlib. Unknown fields are ignored; a higher version is refused. No I/O.

A document says version 2 only if readers of version 1 would misread it: those that may name bytes of other saves. Root,
layouts and slot documents are still of version 1.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping

from ckptlib.errors import CorruptData, FormatError, NewerFormat, UnsupportedState
from ckptlib.format.digests import ALGORITHMS, HEX_WIDTH, XXH3, digester
from ckptlib.format.tagged_values import MAX_DEPTH, brief
from ckptlib.format.values import Json, loads

log = logging.getLogger(__name__)

VERSION = 2
"""The newest version that this ckptlib reads."""

_WRITTEN = {"generation": 2, "part": 2, "manifest": 2, "trash": 2}
"""Version that is written, by kind; 1 for all other kinds."""

MAX_BYTES = 2**30
"""The most bytes of a document. Documents of 10,000 ranks or 100,000 tensors have ten million."""

MAX_NESTING = 4 * MAX_DEPTH
"""Levels of lists and objects in values: a dict whose keys are not strings takes four per level."""

_HEAD = re.compile(rb'(\{"ckptlib":([^,]{1,9}),"kind":"([a-z]+)"),"digest":"([a-z0-9]+):([0-9a-f]{32})","body":')


def dump_body(body: Mapping[str, Json]) -> str:
    """Returns compact JSON; the keys keep their order."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def seal(kind: str, body: str) -> bytes:
    """Returns the document of this kind around a body that is JSON text already.

    Raises UnsupportedState if it is larger than readers accept.
    """
    version = _WRITTEN.get(kind, 1)
    head, data = f'{{"ckptlib":{version},"kind":"{kind}"', body.encode()
    digest = digester(XXH3)(data if version == 1 else head.encode() + data)
    document = f'{head},"digest":"{XXH3}:{digest}","body":'.encode() + data + b"}\n"
    if len(document) > MAX_BYTES:
        raise UnsupportedState(
            f"the {kind} would have {len(document):,} bytes; a document has at most {MAX_BYTES:,}. Values that large "
            "are better kept as tensors"
        )
    return document


def encode(kind: str, body: Mapping[str, Json]) -> bytes:
    """Returns the document of this kind."""
    return seal(kind, dump_body(body))


def as_written(data: bytes, where: str) -> bytes:
    """Returns the document. If only its version was altered, restores that, and logs a warning that names it."""
    before = _before_alteration(data)
    if before is None:
        return data
    log.warning(
        "%s: the version in it was altered after it was written: %r was %r, by its digest, and it is read as such. "
        "See what altered it; for more that was: ckptlib verify URL --all",
        where,
        data[:24].partition(b",")[0].decode(errors="replace"),
        before[:24].partition(b",")[0].decode(),
    )
    return before


def is_version_altered(data: bytes) -> bool:
    """Returns whether a document is as it was written, except for its version."""
    return _before_alteration(data) is not None


def _before_alteration(data: bytes) -> bytes | None:
    match = _HEAD.match(data)
    if match is None or _is_whole(match, data):
        return None
    candidates = (b'{"ckptlib":%d' % version + data[match.end(2) :] for version in range(1, VERSION + 1))
    return next((found for found in candidates if _is_whole(_HEAD.match(found), found)), None)


def _is_whole(match: re.Match[bytes] | None, data: bytes) -> bool:
    """Returns whether the digest in a document is that of a document of the version that it claims.

    A document whose digest covers the body alone is of version 1 only.
    """
    if match is None or data[-2:] != b"}\n" or (algorithm := match[4].decode()) not in ALGORITHMS:
        return False
    if re.fullmatch(b"[1-9][0-9]*", match[2]) is None:
        return False
    covered = b"" if match[2] == b"1" else match[1]
    body = memoryview(data)[match.end() : -2]
    return digester(algorithm)(covered + body if covered else body) == match[5].decode()


def decode(kind: str, data: bytes, where: str) -> Fields:
    """Returns the body of a document of this kind, verified. Raises what `body_of` raises."""
    return Fields(loads(body_of(kind, data, where)), where)


def body_of(kind: str, data: bytes, where: str) -> bytes:
    """Returns the text of the body of a document of this kind, verified.

    Raises NewerFormat if it is whole and newer, CorruptData if the digest does not match, and FormatError for anything
    else. `where` names the object in messages.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"{where} has {len(data):,} bytes; a document has at most {MAX_BYTES:,}")
    data = as_written(data, where)
    match = _HEAD.match(data)
    if match is None:
        raise FormatError(f"{where} is not a document of ckptlib: it begins with {data[:40]!r}")
    algorithm, digest = match[4].decode(), match[5].decode()
    if algorithm not in ALGORITHMS:
        raise FormatError(f"{where} has a digest by {algorithm!r}, which is not one of {', '.join(ALGORITHMS)}")
    if not _is_whole(match, data):
        said = match[2].decode(errors="replace")
        raise CorruptData(
            f"{where} does not match its digest {algorithm}:{digest}, neither as one of version {said!r}, which it "
            f"says it is, nor as one of version 1 to {VERSION}: it was cut or altered after it was written"
        )
    if int(match[2]) > VERSION:
        raise NewerFormat(
            f"{where} has format version {match[2].decode()}; this ckptlib reads up to {VERSION}: update ckptlib"
        )
    if (found := match[3].decode()) != kind:
        raise FormatError(f"{where} is a {found}, expected a {kind}")
    return data[match.end() : -2]


class Fields:
    """Reads one JSON object field by field; every miss raises a FormatError that names the document and the field."""

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{where}: expected an object, got {type(value).__name__}")
        self._value = value
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def get(self, name: str) -> Json:
        """Returns the field, or None if it is missing or null."""
        return self._value.get(name)

    def raw(self, name: str) -> Json:
        if name not in self._value:
            raise FormatError(f"{self._where}: field {name!r} is missing")
        return self._value[name]

    def _wrong(self, name: str, expected: str) -> FormatError:
        return FormatError(f"{self._where}: field {name!r} is not {expected}: {brief(self._value[name])}")

    def integer(self, name: str, low: int = 0, high: int = 2**62) -> int:
        value = self.raw(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str) -> float:
        value = self.raw(name)
        if type(value) is int and abs(value) <= 2**62:
            return float(value)
        if type(value) is not float:
            raise self._wrong(name, "a number")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self.items(name)
        if not all(type(v) in (int, float) and abs(v) <= 2**1000 for v in value):  # type: ignore[arg-type]
            raise self._wrong(name, "a list of numbers")
        return [float(v) for v in value]  # type: ignore[arg-type]

    def text(self, name: str, pattern: str | None = None) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or (pattern is not None and re.fullmatch(pattern, value) is None):
            raise self._wrong(name, "a string" + (f" like {pattern}" if pattern else ""))
        return value

    def digest(self, name: str) -> str:
        return self.text(name, f"[0-9a-f]{{{HEX_WIDTH}}}")

    def digests(self, num: int) -> list[str]:
        """Returns the digests of `num` chunks, from one text."""
        text = self.text("digests", "[0-9a-f]*")
        if len(text) != HEX_WIDTH * num:
            raise self.fail(f"{len(text)} hex digits of digests for {num} chunks")
        return [text[i : i + HEX_WIDTH] for i in range(0, len(text), HEX_WIDTH)]

    def algorithm(self, name: str) -> str:
        """Returns the name of a digest algorithm."""
        found = self.text(name)
        if found not in ALGORITHMS:
            raise self.fail(f"digest algorithm {brief(found)} is not one of {', '.join(ALGORITHMS)}; update ckptlib")
        return found

    def integers(self, name: str, low: int = 0, high: int = 2**62) -> list[int]:
        value = self.raw(name)
        if isinstance(value, list) and not {*map(type, value)} - {int}:
            numbers: list[int] = value  # type: ignore[assignment]
            if low <= min(numbers, default=low) and max(numbers, default=high) <= high:
                return numbers
        raise self._wrong(name, f"a list of integers in [{low}, {high}]")

    def items(self, name: str) -> list[Json]:
        value = self.raw(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def texts(self, name: str, pattern: str = ".*") -> list[str]:
        value = self.items(name)
        wrong = {*map(type, value)} - {str}  # by columns: there may be a name for each of thousands of ranks
        if wrong or (pattern != ".*" and not all(map(re.compile(pattern, re.DOTALL).fullmatch, value))):  # type: ignore[arg-type]
            raise self._wrong(name, "a list of strings" + (f" like {pattern}" if pattern != ".*" else ""))
        return value  # type: ignore[return-value]

    def mapping(self, name: str) -> dict[str, Json]:
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def tree(self, name: str) -> dict[str, Json]:
        """Returns an object of any values, nested no deeper than what ckptlib writes."""
        value = self.mapping(name)
        level: list[Json] = [value]
        for _ in range(MAX_NESTING):
            level = [
                inner
                for outer in level
                for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[union-attr]
                if type(inner) is dict or type(inner) is list
            ]
            if not level:
                return value
        raise self.fail(f"field {name!r} is nested deeper than {MAX_NESTING} levels")

    def strings(self, name: str) -> dict[str, str]:
        """Returns an object whose values are strings."""
        value = self.mapping(name)
        if not all(isinstance(item, str) for item in value.values()):
            raise self._wrong(name, "an object of strings")
        return value  # type: ignore[return-value]

    def flag(self, name: str) -> bool:
        """Returns a flag, which is written only if it is true."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(name, "true or false")

    def inner(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self._where}: {name}")

    def fail(self, message: str) -> FormatError:
        """Returns an error about this document, for the caller to raise."""
        return FormatError(f"{self._where}: {message}")
