"""What the documents log with Weights & Biases and with TensorBoard lies in the files of these."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import snippets
from places import ROOT

BLOCK = 32768


def snippet(word: str) -> str:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "events.md").read_text(), re.S)
    (code,) = [code for code in found if word in code]
    return str(code)


def records(data: bytes) -> Iterator[bytes]:
    """Of a file of wandb, which is a log as LevelDB has it: blocks of fragments, behind a head of seven bytes."""
    at, whole = 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, nbytes, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + nbytes]
        at += 7 + nbytes
        if kind in (1, 4):  # a whole record, or the last fragment of one
            yield whole
            whole = b""


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    failed = snippets.run(snippet("import wandb"), tmp_path)
    assert failed is None, failed
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, list[Any]] = {}
    for data in records(file.read_bytes()):
        for item in Record.FromString(data).history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    assert found["ckpt/Begun/step"] == found["ckpt/Committed/step"] == ["2", "4"]
    assert len(found["ckpt/Begun/stall_s"]) == len(found["ckpt/Committed/seconds"]) == 2
    assert all(int(nbytes) >= 4000 for nbytes in found["ckpt/Committed/nbytes"])


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    failed = snippets.run(snippet("SummaryWriter"), tmp_path)
    assert failed is None, failed
    scalars = EventAccumulator(str(tmp_path / "logs" / "run14")).Reload().Scalars("ckpt/commit_s")
    assert [scalar.step for scalar in scalars] == [2, 4]
    assert all(scalar.value > 0 for scalar in scalars)
