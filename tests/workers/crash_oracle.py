"""Reads a root with json, xxhash, numpy and safetensors alone, and is content with nothing less than all of it.

It shares no code with ckptlib, so that neither can excuse the other.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import xxhash
from helpers.forked_writers import process_name

DTYPES = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "bfloat16": np.uint16}
"""bfloat16 as uint16."""


LATER = ("generation", "part", "manifest", "trash")
"""Kinds of documents of version 2."""


@dataclass(frozen=True)
class Step:
    """One step that has a manifest."""

    name: str
    number: int
    generation: int
    tensors: dict[str, np.ndarray]
    """bfloat16 as uint16."""


def read_document(path: Path) -> dict[str, Any]:
    """The body, when the envelope's digest is that of the exact bytes."""
    data = path.read_bytes()
    envelope = json.loads(data)
    start = data.index(b'"body":') + len(b'"body":')
    assert envelope["ckptlib"] == (2 if envelope["kind"] in LATER else 1), path
    covered = data[: data.index(b',"digest":')] if envelope["kind"] in LATER else b""
    assert envelope["digest"] == "xxh3:" + xxhash.xxh3_128_hexdigest(covered + data[start:-2]), path
    return envelope["body"]


def read_root(root: Path) -> list[Step]:
    """Every step that is listed, each read in full; ascending by number and generation."""
    directory = root / "steps"
    names = sorted(p.name for p in directory.glob("*.json")) if directory.exists() else []
    return [_read_step(root, name.removesuffix(".json")) for name in names]


def _read_step(root: Path, name: str) -> Step:
    manifest = read_document(root / "steps" / f"{name}.json")
    assert manifest["save"] == name
    assert len(manifest["parts"]) == manifest["world_size"]
    tensors: dict[str, np.ndarray] = {}
    covered: dict[str, np.ndarray] = {}
    uses: set[str] = set()
    nbytes = [_read_part(root, key, tensors, covered, uses) for key in manifest["parts"]]
    assert [sum(column) for column in zip(*nbytes, strict=True)] == [manifest["nbytes"], manifest["nbytes_state"]]
    assert sorted(uses) == [*manifest["uses"]]
    for tensor, mask in covered.items():
        assert mask.all(), f"{name}: {tensor} has elements that no chunk holds"
    return Step(name, manifest["step"], int(name.split("-")[1]), tensors)


def _read_part(
    root: Path, key: str, tensors: dict[str, np.ndarray], covered: dict[str, np.ndarray], uses: set[str]
) -> tuple[int, int]:
    """Bytes of its own packs, and of all its chunks. Adds the sets of other packs that it uses."""
    data = (root / key).read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) in key
    part = read_document(root / key)
    layout_path = root / "layouts" / f"{part['table']['layout']}.json"
    assert xxhash.xxh3_128_hexdigest(layout_path.read_bytes()) == part["table"]["layout"]
    rows = read_document(layout_path)["tensors"]
    packs = [(root / pack_key).read_bytes() for pack_key, _, _ in part["packs"]]
    assert [len(pack) for pack in packs] == [nbytes for _, nbytes, _ in part["packs"]]
    sets = [pack_key.split("/")[1] + "-carried" * ("-carried-" in pack_key) for pack_key, _, _ in part["packs"]]
    own = [found.startswith(part["save"]) for found in sets]
    put = sum(len(pack) for pack, mine in zip(packs, own, strict=True) if mine)
    used = sorted({found for found, mine in zip(sets, own, strict=True) if not mine})
    assert part["uses"] == used
    assert key.endswith(f"-{xxhash.xxh3_128_hexdigest(' '.join(used).encode())[:16]}-{put:016x}.json")
    uses.update(used)
    places = _places(part)
    pieces = [packs[pack][offset : offset + nbytes] for pack, offset, nbytes in places]
    digests = [part["digests"][i : i + 32] for i in range(0, len(part["digests"]), 32)]
    assert [xxhash.xxh3_128_hexdigest(piece) for piece in pieces] == digests, key
    shards = part["table"]["shards"]
    columns = (shards["tensor"], shards["offset"], shards["shape"], shards["chunks"])
    first, rest, end = 0, b"", (0, 0)
    told: list[tuple[int, int, int]] = []
    for index, offset, shape, count in zip(*columns, strict=True):
        name, dtype, whole, _ = rows[index]
        target = tensors.setdefault(name, np.zeros(whole, DTYPES[dtype]))
        box = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        if count:  # else it lies in what is left of the chunk before it
            assert not rest, "a chunk holds more than its shards"
            rest, end = b"".join(pieces[first : first + count]), places[first][:2]
        data, rest = rest[: target[box].nbytes], rest[target[box].nbytes :]
        told += places[first : first + count] if count > 1 else [(*end, len(data))]
        end = (end[0], end[1] + len(data))
        target[box] = np.frombuffer(data, DTYPES[dtype]).reshape(shape)
        covered.setdefault(name, np.zeros(whole, bool))[box] = True
        first += count
    assert (first, rest) == (len(pieces), b"")
    _check_packs(packs, told, own)
    return put, sum(nbytes for _, _, nbytes in places)


def _places(part: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Of each chunk: its pack, where it is in that, and its bytes."""
    found: list[tuple[int, int, int]] = []
    sizes = part["table"]["chunks"]["nbytes"]
    assert [*part["places"]] == ["runs"], "frames"
    for pack, start, count in part["places"]["runs"]:
        for _ in range(count):
            found.append((pack, start, sizes[len(found)]))
            start += found[-1][2]
    assert len(found) == len(sizes)
    return found


def _check_packs(packs: list[bytes], places: list[tuple[int, int, int]], own: list[bool]) -> None:
    """Each pack is a file of safetensors, and what its header tells is what the rows tell; of another save's, which may
    have more, at least that."""
    for number, pack in enumerate(packs):
        safetensors.deserialize(pack)
        head = 8 + int.from_bytes(pack[:8], "little")
        entries = {n: e["data_offsets"] for n, e in json.loads(pack[8:head]).items() if n != "__metadata__"}
        told = sorted((head + a, b - a) for n, (a, b) in entries.items() if not n.startswith("@slack"))
        wanted = sorted((offset, nbytes) for p, offset, nbytes in places if p == number)
        assert told == wanted if own[number] else {*wanted} <= {*told}


def failed_parts(root: Path) -> list[str]:
    """What ranks have said about saves of theirs that failed."""
    return [read_document(path)["error"] for path in sorted(root.glob("parts/*/*-failed-*.json"))]


def slots_of(root: Path, *directories: Path) -> list[Path]:
    """Slot files of this root, wherever they may lie."""
    prefix = f"ckptlib-{read_document(root / 'ckptlib.json')['id'][:16]}-"
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()), *directories)
    return [path for place in places for path in place.iterdir() if path.name.startswith(prefix)]


def writers_of(trainer: int) -> list[int]:
    """Pids of live writer processes that were started by the process `trainer`."""
    found = []
    for path in Path("/proc").iterdir():
        if re.fullmatch("[0-9]+", path.name) and _is_writer(path, trainer):
            found.append(int(path.name))
    return found


def _is_writer(path: Path, trainer: int) -> bool:
    try:
        arguments, name = (path / "cmdline").read_bytes().split(b"\0"), (path / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return False
    started = b"ckptlib.writer" in arguments and os.fsencode(str(trainer)) in arguments
    return started or (name == process_name(trainer) and arguments != [b""])  # which a zombie has
