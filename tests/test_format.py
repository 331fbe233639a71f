"""FORMAT.md is read by the code it describes: every printed document has its real digest and decodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import xxhash

from ckptlib import documents
from ckptlib.keys import parse_part_key, parse_save
from ckptlib.layout import decode_layout
from ckptlib.manifest import Generation, Manifest, Root
from ckptlib.part import Part
from ckptlib.table import Table

TEXT = (Path(__file__).parent.parent / "FORMAT.md").read_text()
BLOCKS = re.findall(r"```json\n(.*?)\n```", TEXT, re.S)
EXAMPLES = {json.loads(block)["kind"]: (block + "\n").encode() for block in BLOCKS}


def test_every_kind_is_shown() -> None:
    assert EXAMPLES.keys() == {"root", "generation", "manifest", "layout", "part"}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_digest_is_of_the_body(kind: str) -> None:
    body = EXAMPLES[kind].split(b'"body":', 1)[1][:-2]
    assert json.loads(EXAMPLES[kind])["digest"] == "xxh3:" + xxhash.xxh3_128_hexdigest(body)


def test_documents_decode() -> None:
    assert Root.decode(EXAMPLES["root"], "FORMAT.md").algorithm == "xxh3"
    assert Generation.decode(EXAMPLES["generation"], "FORMAT.md").world_size == 2
    save = parse_save("000000000010-000002-d5828b0b")
    manifest = Manifest.decode(save, EXAMPLES["manifest"])
    assert [part.rank for part in manifest.parts] == [0, 1]
    layout = decode_layout(EXAMPLES["layout"], "FORMAT.md")
    assert layout.find(layout.aliases["model/embed.weight"]) == layout.tensors[1]


def test_part_decodes() -> None:
    data = EXAMPLES["part"]
    table = Table.decode(documents.decode("part", data, "FORMAT.md").inner("table"))
    digest = xxhash.xxh3_128_hexdigest(data)
    key = f"parts/000000000010-000002-d5828b0b/000000-25b4d951-ok-{table.digest}-{digest}.json"
    name = parse_part_key(key)
    assert name is not None
    part = Part.decode(name, data)
    assert sum(part.table.nbytes) == part.table.boxes[0].numel * 2


def test_the_names_in_the_document_are_the_code_s() -> None:
    from ckptlib import keys

    for prefix in (keys.GENERATIONS, keys.LAYOUTS, keys.STEPS, keys.PARTS, keys.PACKS, keys.TRASH):
        assert f"\n    {prefix}" in TEXT
