"""`probe`: how fast a store is, for people and for machines."""

from __future__ import annotations

from pathlib import Path

from helpers.commands import Ckptlib, files


def test_probe_tells_speeds_and_leaves_nothing(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    document = ckptlib("probe", saved, "--size", 20, "--json").json
    assert document["url"] == f"file://{saved}"
    for direction in ("up", "down"):
        found = document[direction]
        assert [(row["nbytes"], row["at_once"]) for row in found["transfers"]] == [
            (1 << 20, 1),
            (4 << 20, 1),
            (1 << 24, 1),
        ]
        assert all(row["bytes_per_second"] > 0 for row in found["transfers"])
        assert found["fit"].keys() == {"latency_s", "bytes_per_second", "knee_nbytes"}
    assert document["puts_per_second"] > 0
    assert document["latency_s"].keys() == {"put", "list", "get", "delete"}
    shown = ckptlib("probe", saved, "--size", 1)
    assert shown.code == 0
    assert "small objects per second" in shown.out
    assert files(saved) == before


def test_probe_of_a_store_that_fails(ckptlib: Ckptlib, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = ckptlib("probe", tmp_path / "file" / "below")
    assert result.code == 1
    assert str(tmp_path / "file") in result.err
