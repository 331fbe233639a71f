"""What the oldest torch lacks that ckptlib works with is not asked of it; `scripts/test-versions` runs that torch."""

from __future__ import annotations

import runpy

import pytest
import torch

from ckptlib.devices import accelerator
from ckptlib.imports import safetensors_files


def test_dtypes_that_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        monkeypatch.delattr(torch, name, raising=False)
    dtypes = runpy.run_path(safetensors_files.__file__)["_DTYPES"]
    assert "F8_E8M0" not in dtypes
    assert dtypes["F8_E4M3"] is torch.float8_e4m3fn


def test_it_raises_where_it_was_built_for_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    device = torch.device("cuda", 0)
    assert accelerator.available() is None
    assert accelerator.is_chosen(device)
    assert not accelerator.has_streams.__wrapped__(device)
