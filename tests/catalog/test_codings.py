"""What chunks are stored as, by codec and by kind; against a count of chunks one by one."""

from __future__ import annotations

import numpy as np
import pytest
from support import layout_of, shards_of

from ckptlib.catalog.codings import SMALL, Codings, Count, kind_of
from ckptlib.format import body_layout
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.part import Part
from ckptlib.format.places import Coding


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("optim/layers.0.wq.weight/exp_avg", "optim/*exp_avg"),
        ("model/layers.0.wq.weight", "model/*weight"),
        ("model/weight", "model/*weight"),
        ("cache/3", "cache/*"),
        ("w", "w"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_counts_by_codec_and_kind() -> None:
    large = np.zeros((512, 512), np.float32)
    names = [f"optim/{layer}/{kind}" for layer in ("a", "b") for kind in ("exp_avg", "exp_avg_sq")]
    small = {"model/bias": large[0, :3], "model/x.bias": large[0, :5], "optim/a/step": large[0, :1]}
    layout = layout_of({**dict.fromkeys(names, large), **small})
    table = body_layout.lay_out(layout, shards_of(layout, 0), 256 * 1024)
    of = {name: [*table.chunks(table.tensors.index(layout.index[name]))] for name in names}
    codings = {chunk: Coding("planes", 1000) for name in names for chunk in of[name] if name.endswith("exp_avg")}
    codings[of["optim/a/exp_avg"][0]] = Coding("zstd", 10)
    part = Part(SaveId(1, GenerationId(1, "0" * 8)), 0, 1, "0" * 8, table, (), XXH3, (), {}, {}, 0.0, codings=codings)
    found = Codings()
    found.add(part, layout)
    nbytes, chunk = large.nbytes, 256 * 1024
    assert found.kinds == {
        "optim/*exp_avg": {"planes": Count(7, 7 * chunk, 7000), "zstd": Count(1, chunk, 10)},
        "optim/*exp_avg_sq": {"raw": Count(8, 2 * nbytes, 2 * nbytes)},
        SMALL: {"raw": Count(1, 36, 36)},
    }
    assert [*found.codecs] == ["raw", "planes", "zstd"]
    assert found.codecs["raw"] == Count(9, 2 * nbytes + 36, 2 * nbytes + 36)
    assert found.codecs["planes"].ratio == "0.004"
