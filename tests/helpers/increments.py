"""A root of which each step shares most with the one before, and what its documents say, read by json alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptlib

SIDE = 300
"""Of the large tensors, of 360,000 bytes: each has pages of its own."""


def save_steps(root: Path, first: int = 1, last: int = 5) -> None:
    """One process. From step to step only `w0` and `s1` change, and values that tell the step."""
    large = {f"w{i}": torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) * (i + 1) for i in range(4)}
    small = {f"s{i}": torch.full((5,), float(i)) for i in range(6)}
    for step in range(first, last + 1):
        large["w0"][0, 0], small["s1"][0] = step, step
        state = {"model": {**large, **small}, "epoch": step, "schedule": {"lr": 0.1, "steps": [step, step + 1]}}
        ckptlib.save(root, state, step=step, metrics={"loss": 1 / step})


def body_of(path: Path) -> dict[str, Any]:
    """Of a document."""
    found: dict[str, Any] = json.loads(path.read_bytes())["body"]
    return found


def needed_ranges(root: Path) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """By pack and step: the ranges of its chunks. All chunks are stored as they are."""
    found: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for manifest in sorted((root / "steps").glob("*.json")):
        said = body_of(manifest)
        for part in said["parts"]:
            body = body_of(root / part)
            sizes = iter(body["table"]["chunks"]["nbytes"])
            for pack, offset, count in body["places"]["runs"]:
                for _ in range(count):
                    nbytes = next(sizes)
                    found[body["packs"][pack][0]][said["step"]].append((offset, offset + nbytes))
                    offset += nbytes
            assert next(sizes, None) is None
    return found


def needed_bytes(ranges: Mapping[int, list[tuple[int, int]]], nbytes: int) -> np.ndarray:
    """Of each byte of a pack: the steps that need it, as the sum of 2**step."""
    found = np.zeros(nbytes, np.int64)
    for step, of in ranges.items():
        for start, stop in of:
            found[start:stop] |= 1 << step
    return found
