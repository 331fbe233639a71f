"""Documents whose digests are right, and which only malice, a bug or a later version writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from helpers.damage import NEWEST, newest, try_all
from support import of_version, resealed
from workers.crash_oracle import read_document

from ckptlib.format.documents import VERSION
from ckptlib.format.keys import layout_key
from ckptlib.format.layout import Layout


def put_part(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replaces rank 0's part of the newest step, and has the manifest name the new one."""
    path, manifest = newest(root, "part 0"), newest(root, "manifest")
    body = read_document(path)
    change(body)
    document = resealed(path.read_bytes(), **body)
    stem = path.name.split("-")
    table = document[document.index(b'"table":') + 8 : document.rindex(b"}}\n")]
    stem[3] = xxhash.xxh3_128_hexdigest(json.dumps(json.loads(table), separators=(",", ":")).encode())
    stem[4] = xxhash.xxh3_128_hexdigest(document)  # the check behind it stays
    stem[7] = f"{sum(nbytes for _, nbytes, _ in body['packs']):016x}.json"
    new = path.with_name("-".join(stem))
    path.unlink()
    new.write_bytes(document)
    parts = read_document(manifest)["parts"]
    manifest.write_bytes(resealed(manifest.read_bytes(), parts=[f"parts/{new.parent.name}/{new.name}", *parts[1:]]))


def rewrite_manifest(root: Path, **fields: Any) -> None:
    path = newest(root, "manifest")
    path.write_bytes(resealed(path.read_bytes(), **fields))


def climb(body: dict[str, Any]) -> None:
    body["packs"][0][0] = "packs/../../../../../../etc/passwd"


def large_packs(body: dict[str, Any]) -> None:
    body["packs"] = [[key, 2**62, created] for key, _, created in body["packs"]]


def huge_nbytes(body: dict[str, Any]) -> None:
    body["table"]["chunks"]["nbytes"][0] = 2**61
    large_packs(body)


def huge_offset(body: dict[str, Any]) -> None:
    body["places"]["runs"][0][1] = 2**61
    large_packs(body)


def countless(body: dict[str, Any]) -> None:
    body["places"]["runs"][0][2] = 2**60


def huge_box(body: dict[str, Any]) -> None:
    body["table"]["shards"]["shape"][0] = [2**59]
    huge_nbytes(body)


def unknown_digests(body: dict[str, Any]) -> None:
    body["algorithm"] = "sha256"


def empty_shard(body: dict[str, Any]) -> None:
    shards = body["table"]["shards"]
    assert shards["chunks"][-1] <= 1
    last = {name: column[-1] for name, column in shards.items()}
    for name, value in {**last, "shape": [0] * len(last["shape"]), "chunks": 0}.items():
        shards[name].append(value)


def other_layout(root: Path) -> None:
    other = Layout(2, ())
    (root / layout_key(other.digest)).write_bytes(other.encoded)
    rewrite_manifest(root, layouts={other.digest: [[0, 1]]})


HOSTILE: dict[str, Callable[[Path], None]] = {
    "climbing-part": lambda root: rewrite_manifest(root, parts=["parts/../../../../etc/passwd"] * 2),
    "absolute-part": lambda root: rewrite_manifest(root, parts=["/etc/passwd"] * 2),
    "part-of-another-step": lambda root: rewrite_manifest(
        root, parts=read_document(next(root.glob("steps/000000000001-*")))["parts"]
    ),
    "world-of-millions": lambda root: rewrite_manifest(root, world_size=10**6),
    "climbing-layout": lambda root: rewrite_manifest(root, layouts={"../../../../etc/passwd": [[0, 1]]}),
    "layout-of-no-part": other_layout,
    "absurd-ranks": lambda root: rewrite_manifest(root, layouts={"0" * 32: [[0, 10**6 - 1]]}),
    "climbing-pack": lambda root: put_part(root, climb),
    "absurd-nbytes": lambda root: put_part(root, huge_nbytes),
    "absurd-offset": lambda root: put_part(root, huge_offset),
    "absurd-run": lambda root: put_part(root, countless),
    "absurd-box": lambda root: put_part(root, huge_box),
    "unknown-digests": lambda root: put_part(root, unknown_digests),
    "empty-shard": lambda root: put_part(root, empty_shard),
}


def test_hostile_documents(tmp_path: Path, template: Path) -> None:
    for case, change in HOSTILE.items():
        shutil.copytree(template, tmp_path / case)
        change(tmp_path / case)
    told = try_all(tmp_path, [tmp_path / case for case in HOSTILE], size=1)
    for case in HOSTILE:
        for line in told[case]["load"]:
            assert line["kind"] == "FormatError", line
            assert f"{NEWEST:012d}-" in line["text"], "names the object"
            assert "root:" not in line["text"], "tells what is in another file"
        assert [line.get("step") for line in told[case]["restore"]] == [NEWEST - 1], told[case]["restore"]


def test_the_part_that_is_put_by_hand_would_load(tmp_path: Path, template: Path) -> None:
    """The hostile ones fail for what was changed in them, and for nothing else."""
    shutil.copytree(template, tmp_path / "same")
    put_part(tmp_path / "same", lambda body: None)
    told = try_all(tmp_path, [tmp_path / "same"])["same"]
    assert [line.get("step") for line in told["load"] + told["restore"]] == [NEWEST] * 4, told


def test_a_newer_manifest_is_skipped_loudly_and_one_that_only_says_so_is_read(tmp_path: Path, template: Path) -> None:
    for case in ("newer", "flipped"):
        shutil.copytree(template, tmp_path / case)
        path = newest(tmp_path / case, "manifest")
        data = path.read_bytes()
        path.write_bytes(of_version(data, VERSION + 1) if case == "newer" else data.replace(b":2,", b":3,", 1))
    told = try_all(tmp_path, [tmp_path / "newer", tmp_path / "flipped"])
    for line in told["newer"]["load"]:
        assert line["kind"] == "NewerFormat"
        assert "update ckptlib" in line["text"]
    for line in told["newer"]["restore"]:
        assert line["step"] == NEWEST - 1
        assert "update ckptlib" in line["skipped"][0]
    assert [line.get("step") for line in told["flipped"]["load"] + told["flipped"]["restore"]] == [NEWEST] * 4
