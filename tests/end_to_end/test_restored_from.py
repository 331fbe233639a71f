"""From where each start restored, as the root records it: the store, local disks, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.increments import body_of

import ckptlib
from ckptlib.catalog.accounts import read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores.local import LocalStore


@pytest.mark.parametrize("tier", ["store", "local", "memory"])
def test_the_tier_is_in_the_account_and_in_manifests(tmp_path: Path, tier: str) -> None:
    more: dict[str, Any] = {"local": tmp_path / "disk"} if tier == "local" else {}
    more |= {"peers": ckptlib.Peers(every=1, copies=0)} if tier == "memory" else {}
    (tmp_path / "arena").mkdir()
    state = {"w": torch.zeros(4)}
    told = []

    def start(last: int, fails: bool) -> None:
        with ckptlib.Checkpointer(tmp_path / "root", state, every=2, arena=tmp_path / "arena", **more) as ckpt:
            report = ckpt.restore()
            told.append(report.tier if report.step else None)
            for step in ckpt.loop(report.step, last):
                state["w"] += 1
                if fails and step == last - 1:
                    raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        start(4, fails=True)
    start(8, fails=False)
    assert told == [None, tier]
    catalog = Catalog(LocalStore(str(tmp_path / "root")))
    accounts = read_accounts(catalog).told
    assert [accounts[of].restored_from for of in sorted(accounts)] == told
    newest = sorted((tmp_path / "root" / "steps").glob("*.json"))[-1]
    assert body_of(newest)["account"]["restored_from"] == tier
