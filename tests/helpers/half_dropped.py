"""What a kill between two requests of a drop leaves."""

from __future__ import annotations

from pathlib import Path


def dropped_by_halves(root: Path) -> set[int]:
    """The steps that are there, and have a trash record: nobody drops them before it is as old as a save may take."""
    there, trash = ({path.name for path in (root / name).glob("*.json")} for name in ("steps", "trash"))
    return {int(name.partition("-")[0]) for name in there & trash}
