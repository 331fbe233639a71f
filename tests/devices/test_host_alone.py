"""What is asked of a driver where all is in memory of the host: nothing. Who asks CUDA may fork no more."""

from __future__ import annotations

import pytest
import torch

from ckptlib.devices import accelerator


def test_no_driver_is_asked_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.accelerator, "is_available", asked)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", asked)
    host = torch.device("cpu")
    assert accelerator.is_chosen(host)
    assert not accelerator.has_streams.__wrapped__(host)
    assert accelerator.bring(torch.ones(2), host)().tolist() == [1, 1]
