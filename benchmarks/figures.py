"""What the benchmarks that compare have in common: arguments, figures of several subjects, and subjects that fail.

A figure is one quantity of one subject ("ckptlib", "DCP", "bare direct write") in one case ("two ranks").
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.common import Line, Report, launch, scratch, spread, table

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What a benchmark was asked for."""

    toy: bool
    """A few seconds; shows that it runs, measures nothing."""
    gb: float
    """State per rank, in GB."""
    rounds: int
    """How often the subjects take turns."""
    timeout_s: float
    """For one subject in one round."""


class Figures:
    """Samples by case, subject and quantity, while they are gathered."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str, str], list[float]] = {}
        self._more: dict[tuple[str, str, str, str], dict[str, object]] = {}
        self.failures: dict[tuple[str, str], str] = {}
        """Why, by case and subject."""

    def add(self, case: str, subject: str, what: str, unit: str, samples: Sequence[float], **more: object) -> None:
        """More samples; `more` is what is to be known of the figure beside them."""
        key = (case, subject, what, unit)
        if samples:
            self._samples.setdefault(key, []).extend(samples)
            self._more.setdefault(key, {}).update(more)

    def failed(self, case: str, subject: str, why: str) -> None:
        self.failures[case, subject] = why

    def attempt(
        self,
        case: str,
        subject: str,
        module: str,
        num_ranks: int,
        arguments: Mapping[str, object],
        timeout_s: float,
        restarts: int = 0,
    ) -> list[Line]:
        """What the ranks told (see `launch`); a subject that failed or hung is noted as that, and told nothing."""
        if (case, subject) in self.failures:
            return []
        print(f"{case}, {subject}: begins, and may take {timeout_s:.0f} s", file=sys.stderr, flush=True)
        try:
            return launch(module, num_ranks, arguments, timeout_s, restarts)
        except subprocess.TimeoutExpired:
            self.failed(case, subject, f"did not end within {timeout_s:.0f} s")
        except RuntimeError as error:
            self.failed(case, subject, _reason(str(error)))
        return []

    def write(self, report: Report) -> None:
        """One line each."""
        for (case, subject, what, unit), samples in self._samples.items():
            more = self._more[case, subject, what, unit]
            report.add("figure", case=case, subject=subject, what=what, unit=unit, **spread(samples), **more)
        for (case, subject), why in self.failures.items():
            report.add("failure", case=case, subject=subject, why=why)


def _reason(output: str) -> str:
    """The line of a rank's last words that says what went wrong."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (errors or lines)[-1].partition("]: ")[2][:300] or (errors or lines)[-1][:300]


def rotated(turns: Sequence[T], number: int) -> list[T]:
    """Another one first in each round: some disks give a burst to whoever comes after a pause."""
    at = number % max(len(turns), 1)
    return [*turns[at:], *turns[:at]]


def run(
    arguments: list[str], name: str, measure: Callable[[Options, Path, Figures], None], gb: float, rounds: int = 3
) -> None:
    """`main` of such a benchmark: measures in an empty directory, writes JSON lines, and shows a table of them.

    Also those of a run that ends early, by an error or Control-C: the cases that had ended, and a line that says so.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    parser.add_argument("--toy", action="store_true", help="seconds instead of minutes; the figures mean nothing")
    parser.add_argument("--gb", type=float, default=gb, help="state per rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each subject (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one subject and turn")
    parser.add_argument("--out", type=Path, help="file for the JSON lines (default: stdout)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    given = parser.parse_args(arguments)
    options = Options(given.toy, given.gb, given.rounds, given.timeout)
    report = Report(name, given.out, given.directory, toy=given.toy, gb=given.gb, rounds=given.rounds)
    figures = Figures()
    try:
        with scratch(given.directory, name) as directory:
            measure(options, directory, figures)
    except BaseException as error:
        figures.failed("the rest", "all", repr(error))
        raise
    finally:
        figures.write(report)
    if given.out is not None:
        print(as_table(report.lines))


def as_table(lines: Sequence[Line]) -> str:
    """The figures and failures of one benchmark."""
    rows = [
        {
            "case": line["case"],
            "subject": line["subject"],
            "what": line.get("what", "failed"),
            "median": f"{line['median']:.4g} {line['unit']}" if "median" in line else line["why"][:60],
            "quartiles": f"{line['low']:.4g} - {line['high']:.4g}" if "median" in line else "",
        }
        for line in lines
        if line["kind"] in ("figure", "failure")
    ]
    return table(rows)
