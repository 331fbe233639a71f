"""Reads what a store holds by FORMAT.md alone: from manifest to parts, chunks and tensors, every digest checked.

Frames are decoded by ckptlib's own codecs, which have tests of their own: what comes out is compared with a digest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ckptlib.codecs import registry

Get = Callable[[str], bytes]
"""All bytes of an object; raises for one that is not there."""

_HEAD = re.compile(rb'(\{"ckptlib":[12],"kind":"[a-z]+"),"digest":"xxh3:([0-9a-f]{32})","body":')
xxh3 = xxhash.xxh3_128_hexdigest


class Frame(NamedTuple):
    """What a chunk is stored as."""

    codec: str
    nbytes: int
    """Of the chunk."""
    base: Chunk | None
    base_digest: str


class Chunk(NamedTuple):
    """Where one lies."""

    pack: str
    offset: int
    nbytes: int
    frame: Frame | None = None
    """None: it is its own bytes."""


def body_of(data: bytes, key: str) -> Any:
    """Of a document, whose digest is right."""
    head = _HEAD.match(data)
    assert head is not None, f"{key}: no document: {data[:60]!r}"
    body = data[head.end() : -2]
    covered = body if b'"ckptlib":1' in head[1] else head[1] + body
    assert xxh3(covered) == head[2].decode(), f"{key}: does not match its digest"
    return json.loads(body)


def parts_of(get: Get, manifest: bytes) -> list[Any]:
    """The bodies of the parts that a manifest names, by rank."""
    found = []
    for key in body_of(manifest, "manifest")["parts"]:
        data = get(key)
        assert xxh3(data) in key, f"{key}: does not match the digest in its name"
        found.append(body_of(data, key))
    return found


def chunks_of(part: Any) -> list[Chunk]:
    """In the order of its table."""
    sizes, places, found = part["table"]["chunks"]["nbytes"], part["places"], list[Chunk]()
    stored, codecs = places.get("stored", sizes), [None, *places.get("codecs", [])]
    frames = [codecs[number] for number in places.get("codec", [0] * len(sizes))]
    bases = _bases_of(part, codecs)
    for pack, offset, count in places["runs"]:
        for _ in range(count):
            at = len(found)
            base, digest = bases.get(at, (None, ""))
            frame = None if frames[at] is None else Frame(frames[at], sizes[at], base, digest)
            assert base is None or frame is not None
            found.append(Chunk(part["packs"][pack][0], offset, stored[at], frame))
            offset += stored[at]
    assert len(found) == len(sizes) == len(stored) == len(frames)
    return found


def _bases_of(part: Any, codecs: list[str | None]) -> dict[int, tuple[Chunk, str]]:
    """By position of the chunk: its base, and the digest of that."""
    bases, found = part.get("bases", {"chunk": [], "digests": ""}), dict[int, tuple[Chunk, str]]()
    for at, chunk in enumerate(bases["chunk"]):
        pack, offset, stored, number = (bases[column][at] for column in ("pack", "offset", "stored", "codec"))
        codec, nbytes = codecs[number], part["table"]["chunks"]["nbytes"][chunk]
        frame = None if codec is None else Frame(codec, nbytes, None, "")
        base = Chunk(part["packs"][pack][0], offset, stored, frame)
        found[chunk] = base, bases["digests"][32 * at : 32 * at + 32]
    return found


def tensors_of(get: Get, manifest: bytes) -> dict[str, np.ndarray]:
    """All that a step holds; raises or asserts where anything of it is lost or altered."""
    found: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for part in parts_of(get, manifest):
        key = f"layouts/{part['table']['layout']}.json"
        data = get(key)
        assert xxh3(data) == part["table"]["layout"], f"{key}: does not match the digest in its name"
        layout = body_of(data, key)
        for name, dtype, shape, _ in layout["tensors"]:
            found.setdefault(name, np.zeros(shape, dtype))
            filled.setdefault(name, np.zeros(shape, bool))
        for name, box, elements in _shards(get, part, layout):
            found[name][box] = elements
            filled[name][box] = True
    lost = [name for name, mask in filled.items() if not mask.all()]
    assert not lost, f"no part has all of {lost}"
    return found


def _shards(get: Get, part: Any, layout: Any) -> Iterator[tuple[str, tuple[slice, ...], np.ndarray]]:
    shards, digests = part["table"]["shards"], re.findall(".{32}", part["digests"])
    chunks = list(zip(chunks_of(part), digests, strict=True))
    at, data, first = 0, b"", 0
    for tensor, offset, shape, count in zip(*map(shards.get, ("tensor", "offset", "shape", "chunks")), strict=True):
        if count:
            data, at = b"".join(_read(get, *row) for row in chunks[first : first + count]), 0
            first += count
        name, dtype = layout["tensors"][tensor][:2]
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        elements = np.frombuffer(data[at : at + nbytes], dtype).reshape(shape)
        at += nbytes
        yield name, tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), elements


def _read(get: Get, chunk: Chunk, digest: str) -> bytes:
    data = get(chunk.pack)[chunk.offset : chunk.offset + chunk.nbytes]
    assert len(data) == chunk.nbytes, f"{chunk}: the pack ends early"
    if chunk.frame is not None:
        base = chunk.frame.base
        data = _decoded(chunk.frame.codec, data, chunk.frame.nbytes, base and _read(get, base, chunk.frame.base_digest))
    assert xxh3(data) == digest, f"{chunk}: does not match its digest"
    return data


@lru_cache(maxsize=2048)
def _decoded(codec: str, frame: bytes, nbytes: int, base: bytes | None) -> bytes:
    out = bytearray(nbytes)
    registry.decode(codec, memoryview(frame), memoryview(out), None if base is None else memoryview(base))
    return bytes(out)
