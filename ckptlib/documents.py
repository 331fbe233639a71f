"""The envelope that every JSON document of a checkpoint travels in, and strict reading of what is inside.

    {"ckptlib":1,"kind":"manifest","digest":"xxh3:<32 hex>","body":{...}}

The digest covers the exact bytes of the body, so one flipped bit anywhere is found before a field is believed.
Unknown fields are ignored; a higher version is refused. No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from ckptlib.digests import ALGORITHMS, HEX_WIDTH, XXH3, digester
from ckptlib.errors import CorruptData, FormatError, NewerFormat
from ckptlib.values import Json, loads

VERSION = 1

_HEAD = re.compile(rb'\{"ckptlib":(\d{1,9}),"kind":"([a-z]+)","digest":"([a-z0-9]+):([0-9a-f]{32})","body":')


def dump_body(body: Mapping[str, Json]) -> str:
    """Compact JSON; the keys keep their order."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def seal(kind: str, body: str) -> bytes:
    """The document of this kind around a body that is JSON text already."""
    digest = digester(XXH3)(body.encode())
    return f'{{"ckptlib":{VERSION},"kind":"{kind}","digest":"{XXH3}:{digest}","body":{body}}}\n'.encode()


def encode(kind: str, body: Mapping[str, Json]) -> bytes:
    """The document of this kind."""
    return seal(kind, dump_body(body))


def decode(kind: str, data: bytes, where: str) -> Fields:
    """The body of a document of this kind, verified.

    Raises NewerFormat, CorruptData when the digest does not match, FormatError for the rest. `where` names the object.
    """
    match = _HEAD.match(data)
    if match is None:
        raise FormatError(f"{where} is not a document of ckptlib: it begins with {data[:40]!r}")
    version, found_kind, algorithm, expected = (group.decode() for group in match.groups())
    if int(version) < 1:
        raise FormatError(f"{where} has format version {version}; the first one was 1")
    if int(version) > VERSION:
        raise NewerFormat(f"{where} has format version {version}; this ckptlib reads up to {VERSION}: update ckptlib")
    if algorithm not in ALGORITHMS:
        raise FormatError(f"{where} has a digest by {algorithm!r}, which is not one of {', '.join(ALGORITHMS)}")
    body, tail = data[match.end() : -2], data[-2:]
    if tail != b"}\n" or digester(algorithm)(body) != expected:
        raise CorruptData(
            f"{where} does not match its digest {algorithm}:{expected}: it was cut or altered after it was written"
        )
    if found_kind != kind:
        raise FormatError(f"{where} is a {found_kind}, expected a {kind}")
    return Fields(loads(body), where)


class Fields:
    """One JSON object, read field by field; every miss is a FormatError that names the document and the field."""

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{where}: expected an object, got {type(value).__name__}")
        self._value = value
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def raw(self, name: str) -> Json:
        if name not in self._value:
            raise FormatError(f"{self._where}: field {name!r} is missing")
        return self._value[name]

    def _wrong(self, name: str, expected: str) -> FormatError:
        return FormatError(f"{self._where}: field {name!r} is not {expected}: {str(self._value[name])[:80]}")

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

    def text(self, name: str, pattern: str | None = None) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or (pattern is not None and re.fullmatch(pattern, value) is None):
            raise self._wrong(name, "a string" + (f" like {pattern}" if pattern else ""))
        return value

    def digest(self, name: str) -> str:
        return self.text(name, f"[0-9a-f]{{{HEX_WIDTH}}}")

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

    def texts(self, name: str) -> list[str]:
        value = self.items(name)
        if not all(isinstance(v, str) for v in value):
            raise self._wrong(name, "a list of strings")
        return value  # type: ignore[return-value]

    def mapping(self, name: str) -> dict[str, Json]:
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def inner(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self._where}: {name}")

    def fail(self, message: str) -> FormatError:
        """An error about this document, for the caller to raise."""
        return FormatError(f"{self._where}: {message}")
