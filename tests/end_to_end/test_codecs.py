"""What is stored as frames comes back bit for bit: floats by planes, touched rows of tables by patches, integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.sparse_training import tensors, train

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.format.part import Part
from ckptlib.stores import open_store


def parts(root: Path) -> Iterator[Part]:
    catalog = Catalog(open_store(str(root), {}))
    for save in catalog.saves():
        yield catalog.part(catalog.manifest(save).parts[0])


@pytest.mark.parametrize("codec", ["planes", {"sparse/*": "planes", "*": "raw"}])
def test_every_step_comes_back_bit_for_bit(tmp_path: Path, codec: str | dict[str, str]) -> None:
    state, wanted = train(tmp_path, codec)
    for step, values in wanted.items():
        ckptlib.load(tmp_path, state, step=step)
        assert all(map(torch.equal, tensors(state), values)), step
    kinds = [Counter(coding.codec for coding in part.codings.values()) for part in parts(tmp_path)]
    assert kinds[0]["planes"]
    assert not kinds[0]["patch"]
    assert (kinds[0]["zstd"] > 0) == (codec == "planes")
    assert (kinds[-1]["patch"] > 0) == (codec == "planes"), "moments that are mostly 0 are smaller whole"
    sizes = [part.nbytes_put for part in parts(tmp_path)]
    if codec == "planes":
        assert sizes[-1] < sizes[0] / 3, "the rows that were not touched are not stored again"


def test_raw_is_what_a_local_disk_gets(tmp_path: Path) -> None:
    train(tmp_path, "auto")
    assert not any(part.codings for part in parts(tmp_path))
