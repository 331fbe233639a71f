"""What the benchmarks of other frameworks' trainers have in common: their options, and how often they save."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Report, spread

EVERY, CHECKPOINTS = 4, 5
"""Steps between checkpoints, and checkpoints of a turn."""


class Given(NamedTuple):
    """What the command line says."""

    nbytes: int
    """Of weights and AdamW's state."""
    turns: int
    out: Path | None
    directory: Path | None
    """Where checkpoints go; None: a temporary one."""


def given(name: str, description: str | None, arguments: list[str]) -> Given:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=description)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--mb", type=float, default=144.0, help="of weights and AdamW's state")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--directory", type=Path, help="where checkpoints go; default: a temporary one")
    told = parser.parse_args(arguments)
    nbytes, turns = (1_000_000, 1) if told.toy else (int(told.mb * 1e6), told.turns)
    return Given(nbytes, turns, told.out, told.directory)


def stalls_in_turns(
    name: str,
    description: str | None,
    arguments: list[str],
    subjects: Sequence[str],
    train: Callable[[str, Path, int], list[float]],
) -> None:
    """Reports the stalls of each subject. `train`: from subject, directory and bytes to seconds of each checkpoint."""
    nbytes, turns, out, directory = given(name, description, arguments)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        report = Report(name, out, Path(place), nbytes=nbytes, turns=turns, every=EVERY)
        stalls: dict[str, list[float]] = {subject: [] for subject in subjects}
        for turn in range(turns):
            for subject in subjects:
                stalls[subject] += train(subject, Path(place) / f"{subject}-{turn}", nbytes)[1:]
        for subject, samples in stalls.items():
            report.add("figure", subject=subject, what="stall", unit="s", **spread(samples), worst=max(samples))
