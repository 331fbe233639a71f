"""A root of one save whose documents are to be spoiled; every digest fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from support import make_generation, make_root, make_save

from ckptlib.format import keys
from ckptlib.format.documents import seal
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.stores.local import LocalStore

Body = dict[str, Any]


# Roots


class Root:
    """A root of one save by two ranks, to be spoiled. Every digest fits, whatever is in the documents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        store = LocalStore(str(path))
        catalog = make_root(store)
        weights = np.zeros(2**12, dtype=np.float32)
        self.save = make_save(catalog, make_generation(catalog, world_size=2), 1, {"w": weights}, 2)
        manifest = catalog.manifest(self.save)
        (layout,) = manifest.layouts
        self.bodies: dict[str, Body] = {
            kind: body(store.get(key))
            for kind, key in {
                "root": keys.ROOT,
                "generation": self.save.generation.key,
                "manifest": self.save.manifest_key,
                "layout": keys.layout_key(layout),
                "part": manifest.parts[0].key,
            }.items()
        }
        self.bodies["trash"] = body(TrashRecord(self.other, "kept enough").encode())
        self.bodies["failure"] = {"save": str(self.other), "rank": 0, "error": "no room"}
        self.parts = [body(store.get(part.key)) for part in manifest.parts]
        self.target: list[int] = [2**12]
        """Shape of what is loaded."""

    @property
    def other(self) -> SaveId:
        """One that was not committed."""
        return SaveId(2, self.save.generation)

    def put(self, kind: str, text: str) -> None:
        """A document of this kind, and those that have to follow from it."""
        if kind in ("layout", "part"):
            self._put_parts(kind, text)
        elif kind in ("trash", "failure"):
            document = seal(kind, text)
            digest = xxhash.xxh3_128_hexdigest(document)
            failed = keys.PartName(self.other, 0, "0" * 8, None, digest).key
            path = self.path / (failed if kind == "failure" else self.other.trash_key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(document)
        else:
            key = {"root": keys.ROOT, "generation": self.save.generation.key, "manifest": self.save.manifest_key}[kind]
            (self.path / key).write_bytes(seal(kind, text))

    def _put_parts(self, kind: str, text: str) -> None:
        layout = text if kind == "layout" else dumps(self.bodies["layout"])
        document = seal("layout", layout)
        digest = xxhash.xxh3_128_hexdigest(document)
        (self.path / keys.layout_key(digest)).write_bytes(document)
        names = []
        for rank, one in enumerate(self.parts):
            written = text if kind == "part" and rank == 0 else dumps(one)
            written = written.replace(one["table"]["layout"], digest)
            table = written[written.rindex('"table":') + 8 : -1]
            sealed = seal("part", written)
            name = keys.PartName(
                self.save,
                rank,
                one["attempt"],
                xxhash.xxh3_128_hexdigest(table.encode()),
                xxhash.xxh3_128_hexdigest(sealed),
                None,
                xxhash.xxh3_128_hexdigest(b"")[:16],
                put_for(written, one),
            )
            (self.path / name.key).write_bytes(sealed)
            names.append(name.key)
        manifest = {**self.bodies["manifest"], "parts": names, "layouts": {digest: [[0, 1]]}}
        self.put("manifest", dumps(manifest))


def put_for(text: str, otherwise: Body) -> int:
    """Bytes of the packs of a part of its own, so that the name does not lie; of what cannot be read, as it was."""
    try:
        part = json.loads(text)
        return sum(nbytes for _, nbytes, _ in part["packs"]) % 2**64
    except (ValueError, RecursionError, KeyError, TypeError):
        return sum(nbytes for _, nbytes, _ in otherwise["packs"])


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def body(document: bytes) -> Body:
    found: Body = json.loads(document)["body"]
    return found
