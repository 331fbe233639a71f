"""A whole checkpoint that is written by FORMAT.md alone is one of ckptlib's. Nothing of ckptlib writes here."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128_hexdigest as xxh3

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store
from ckptlib.verify import verify_root, verify_save

NONCE, ATTEMPT = "0a1b2c3d", "4e5f6071"
SAVE = f"000000000007-000001-{NONCE}"
TENSORS = {  # torch's name of the dtype, safetensors' word, shape, bytes
    "a/b": ("bfloat16", "BF16", [5], bytes(range(60, 70))),
    "a/w": ("float32", "F32", [30, 7], struct.pack("<210f", *range(210))),
    "empty": ("float32", "F32", [0, 3], b""),
    "n": ("int64", "I64", [], struct.pack("<q", -5)),
}


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def document(kind: str, version: int, body: object) -> bytes:
    head, text = f'{{"ckptlib":{version},"kind":"{kind}"', compact(body)
    digest = xxh3((text if version == 1 else head + text).encode())
    return f'{head},"digest":"xxh3:{digest}","body":{text}}}\n'.encode()


def write(root: Path) -> None:
    """One rank, nothing encoded; tensors one behind the other, each at a multiple of 64 bytes."""
    now = time.time()

    def put(key: str, data: bytes) -> None:
        for where in ["."] if key.startswith(("parts", "packs", "steps")) else [".", "copies"]:
            path = root / where / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    put("ckptlib.json", document("root", 1, {"id": "f" * 32, "algorithm": "xxh3", "save_deadline_s": 3600.0}))
    generation = {"generation": 1, "nonce": NONCE, "world_size": 1, "resumed_from": None, "created": now}
    generation |= {"host": "here", "versions": {}, "tags": {}}
    put(f"generations/000001-{NONCE}.json", document("generation", 2, generation))
    rows = [[name, dtype, shape, 0] for name, (dtype, _, shape, _) in TENSORS.items()]
    holding = {"how": "placed", "mesh": 0, "placements": ["R"], "writer": [0]}
    layout: dict[str, Any] = {"world_size": 1, "meshes": [{"shape": [1], "ranks": [0]}], "holdings": [holding]}
    layout |= {"columns": ["name", "dtype", "shape", "holding"], "tensors": rows, "aliases": {}, "objects": {}}
    encoded = document("layout", 1, layout)
    put(f"layouts/{xxh3(encoded)}.json", encoded)

    metadata = {"ckptlib": "1", "save": SAVE, "rank": "000000", "layout": xxh3(encoded)}
    head: dict[str, Any] = {"__metadata__": metadata}
    data, offsets = b"", []
    for name, (_, word, shape, raw) in TENSORS.items():
        if raw:
            if -len(data) % 64:
                gap = [len(data), len(data) + -len(data) % 64]
                head[f"@slack.{len(offsets) - 1}"] = {"dtype": "U8", "shape": [gap[1] - gap[0]], "data_offsets": gap}
                data += bytes(gap[1] - gap[0])
            offsets.append(len(data))
            data += raw
            head[f"{name}@0"] = {"dtype": word, "shape": shape, "data_offsets": [offsets[-1], len(data)]}
    text = compact(head).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    pack, key = struct.pack("<Q", len(text)) + text + data, f"packs/{SAVE}/000000-{ATTEMPT}-000000.safetensors"
    put(key, pack)

    full = [row for row, (_, _, _, raw) in enumerate(TENSORS.values()) if raw]
    shapes = [rows[row][2] for row in full]
    shards = {"tensor": full, "offset": [[0] * len(shape) for shape in shapes], "shape": shapes, "chunks": [1] * 3}
    raws = [raw for *_, raw in TENSORS.values() if raw]
    table = {"layout": xxh3(encoded), "shards": shards, "chunks": {"nbytes": [*map(len, raws)]}}
    part = {"save": SAVE, "rank": 0, "world_size": 1, "attempt": ATTEMPT, "created": now, "uses": [], "metrics": {}}
    part |= {"values": {"lr": 0.5, "betas": {"$nest": {"$tuple": [0.9, 0.99]}}}, "packs": [[key, len(pack), now]]}
    part |= {"algorithm": "xxh3", "digests": "".join(map(xxh3, raws))}
    check = f"{1:08x}{0:020x}"
    part |= {"places": {"runs": [[0, 8 + len(text) + offset, 1] for offset in offsets]}, "check": check, "table": table}
    encoded_part = document("part", 2, part)
    digests = f"{xxh3(compact(table).encode())}-{xxh3(encoded_part)}"
    name = f"parts/{SAVE}/000000-{ATTEMPT}-ok-{digests}-{check}-{xxh3(b'')[:16]}-{len(pack):016x}.json"
    put(name, encoded_part)
    manifest = {"save": SAVE, "step": 7, "world_size": 1, "created": now, "nbytes": len(pack), "uses": {}}
    manifest |= {"nbytes_state": sum(map(len, raws)), "metrics": {}, "layouts": {xxh3(encoded): [[0, 0]]}}
    put(f"steps/{SAVE}.json", document("manifest", 2, manifest | {"parts": [name]}))


def state() -> dict[str, Any]:
    a = {"b": torch.zeros(5, dtype=torch.bfloat16), "w": torch.zeros(30, 7)}
    return {"a": a, "empty": torch.zeros(0, 3), "n": torch.tensor(0), "lr": 0.0, "betas": (0.0, 0.0)}


def test_it_is_whole_loaded_and_gone_on_from(tmp_path: Path) -> None:
    write(tmp_path)
    catalog = Catalog(open_store(str(tmp_path)))
    [save] = catalog.saves()
    assert [*verify_root(catalog), *verify_save(catalog, save)] == []
    found = state()
    with ckptlib.Checkpointer(str(tmp_path), found, every=100) as ckpt:
        report = ckpt.restore()
        assert report is not None
        assert report.step == 7
        for name, tensor in {"a/b": found["a"]["b"], "a/w": found["a"]["w"], "n": found["n"]}.items():
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == TENSORS[name][3], name
        assert (found["lr"], found["betas"]) == (0.5, (0.9, 0.99))
        ckpt.save(8).wait_committed()
    saves = catalog.saves()
    assert [save.step for save in saves] == [7, 8]
    assert [finding for save in saves for finding in verify_save(catalog, save)] == []
