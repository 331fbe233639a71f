"""Which root and which step a checkpoint_id names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptlib.adapters.checkpoint_id import place_of


@pytest.mark.parametrize(
    ("checkpoint_id", "url", "step"),
    [
        ("runs/7/step-12", "runs/7/step", 12),
        ("runs/7/step_00012", "runs/7/step", 12),
        ("runs/7/global_step12/", "runs/7/global_step", 12),
        ("runs/7/12", "runs/7", 12),
        ("/runs/epoch=3", "/runs/epoch", 3),
        ("/step-3", "/step", 3),
        ("/3", "/.", 3),
        ("step-3", "step", 3),
        ("3", ".", 3),
        (Path("runs") / "Checkpoint-500", "runs/Checkpoint", 500),
        ("s3://bucket/run/step-12", "s3://bucket/run/step", 12),
        ("s3://bucket/12", "s3://bucket", 12),
        ("s3://12", "s3://12", None),
        ("file:///tmp/run/step-1", "file:///tmp/run/step", 1),
        ("runs/last", "runs/last", None),
        ("runs/run7", "runs/run7", None),
        ("runs/model_1", "runs/model_1", None),
        ("checkpoint-500/optimizer_0", "checkpoint-500/optimizer_0", None),
        ("runs/step-" + "1" * 30, "runs/step-" + "1" * 30, None),
    ],
)
def test_places(checkpoint_id: str | Path, url: str, step: int | None) -> None:
    assert place_of(checkpoint_id) == (url, step)


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing(nothing: str | None) -> None:
    with pytest.raises(ValueError, match="checkpoint_id is needed"):
        place_of(nothing)
