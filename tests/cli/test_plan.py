"""`ckptlib plan`: from a number of parameters, and from the roots of real jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.commands import Ckptlib
from torch import nn

import ckptlib as library


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model and AdamW, in fp32, after three saves."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    optim = torch.optim.AdamW(model.parameters())
    (tmp_path / "arena").mkdir()
    state = {"model": model, "optim": optim}
    with library.Checkpointer(tmp_path / "root", state, every=2, arena=tmp_path / "arena") as ckpt:
        for _ in ckpt.loop(ckpt.restore().step, 6):
            model(torch.randn(2, 64)).sum().backward()
            optim.step()
    return tmp_path / "root"


def test_the_example_of_the_documents(ckptlib: Ckptlib) -> None:
    shown = ckptlib("plan", "--params", "175B", "--every", "2h", "--keep", "10", "--stall", "100ms")
    assert shown.code == 0
    assert "14 bytes of each are saved" in shown.out
    assert "84 saves in 7 d: 206 TB written, 24.5 TB kept in 10 steps" in shown.out
    weights = ("--optimizer", "none", "--precision", "fp32")
    found = ckptlib("plan", "--params", "175B", *weights, "--every", "2h", "--keep", "10", "--json").json
    assert found["storage"]["nbytes_written"] == pytest.approx(58.8e12)
    assert found["storage"]["nbytes_kept"] == pytest.approx(7e12)


def test_bytes_are_those_of_a_real_run(ckptlib: Ckptlib, root: Path) -> None:
    """What the files take, what the plan of the same parameters says, and what the plan of the root says."""
    files = sum(path.stat().st_size for path in (root / "packs").rglob("*") if path.is_file()) / 3
    params = 20 * (64 * 64 + 64)
    given = ckptlib("plan", "--params", str(params), "--precision", "fp32", "--ranks", "1", "--json").json
    of_root = ckptlib("plan", root, "--json").json
    assert given["checkpoint_bytes"] == 12 * params
    assert given["checkpoint_bytes"] == pytest.approx(files, rel=0.05)
    assert of_root["checkpoint_bytes"] == pytest.approx(files, rel=0.05)
    assert of_root["changed_bytes"] == pytest.approx(files, rel=0.05)
    assert of_root["ranks"] == 1
    assert 0 < of_root["stall_s"] < 10
    assert of_root["persist_s"] > 0
    assert "measured" in ckptlib("plan", root).out


def test_what_saves_took_is_what_they_will_take(ckptlib: Ckptlib, root: Path) -> None:
    """By the store's clock; the first one made the slots, and does not count."""
    manifests = sorted(path for path in (root / "steps").rglob("*") if path.is_file())
    for later_s, path in zip((900, 100, 200), manifests, strict=True):
        os.utime(path, (path.stat().st_mtime + later_s,) * 2)
    assert 150 <= ckptlib("plan", root, "--json").json["persist_s"] < 200


def test_the_store_is_left_as_it_was(ckptlib: Ckptlib, root: Path, tmp_path: Path) -> None:
    def files() -> list[str]:
        return sorted(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)

    before = files()
    assert ckptlib("plan", root).code == 0
    assert files() == before
    assert ckptlib("plan", tmp_path / "new", "--params", "1M").code == 0
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --params"),
        (("--params", "many"), "such as 7B"),
        (("--params", "0"), "above 0"),
        (("--params", "1e99"), "above 0"),
        (("--params", "7B", "--every", "2 weeks"), "such as 2h"),
        (("--params", "7B", "--every", "500"), "and a unit"),
        (("--params", "7B", "--mtbf", "12"), "and a unit"),
        (("--params", "7B", "--layers", "3"), "--hidden"),
        (("--params", "7B", "--at-most", "0"), "0<x<1"),
        (("--params", "7B", "--at-most", "nan"), "such as 0.035"),
        (("--params", "7B", "--at-most", "1e-320"), "such as 0.035"),
        (("--params", "7B", "--batch", "1"), "--batch: these go with --layers"),
        (("a-root", "--ranks", "8", "--device-memory", "80GB"), "--ranks, --device-memory: these go with --params"),
    ],
)
def test_wrong_usage(ckptlib: Ckptlib, arguments: tuple[str, ...], told: str) -> None:
    shown = ckptlib("plan", *arguments)
    assert shown.code == 2
    assert told in shown.err


def test_a_root_without_steps(ckptlib: Ckptlib, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = ckptlib("plan", tmp_path / "empty")
    assert shown.code == 1
    assert "--params" in shown.err or "no checkpoint" in shown.err
