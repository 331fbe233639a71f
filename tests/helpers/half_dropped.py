"""What a kill between two requests of a drop leaves."""

from __future__ import annotations

from pathlib import Path

import ckptlib


def dropped_by_halves(root: Path) -> set[int]:
    """The steps that are there, and have a trash record: nobody drops them before it is as old as a save may take."""
    return {info.step for info in ckptlib.checkpoints(root) if [*(root / "trash").glob(f"{info.step:012d}-*")]}
