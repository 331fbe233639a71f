"""What is left of a run whose save was killed, or whose files were damaged? ckptlib and its peers, fault by fault.

Each trial is a job of its own: it saves step 1, saves step 2, and meets one fault; then a new job starts and resumes as
the library's documentation says. An oracle that shares no code with any library says whose tensors it got. Lines of
JSON, one for each trial; beside them, a page of tables. Linux; root may mount the disk that fills up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from benchmarks.common import Report, scratch
from benchmarks.conformance import buckets, faults
from benchmarks.conformance.content import Content
from benchmarks.conformance.faults import TOY, Amount, Fault
from benchmarks.conformance.lab import Lab, preload
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.page import page

FAULTS: dict[str, Fault] = {**faults.FAULTS, **buckets.FAULTS}
LIMIT_S = 30.0
ROWS, TOY_ROWS = 128, 16
NEEDS_ROOT = "disk full"
MOSTLY_WAITS = 2
"""As many times as many trials run beside each other where they wait for time-outs, and beside all others."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks conformance")
    parser.add_argument("--toy", action="store_true", help="two trials of each fault")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; the page of tables goes beside it")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    parser.add_argument("--libraries", nargs="*", default=[*LIBRARIES], choices=[*LIBRARIES], metavar="LIBRARY")
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS], metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=3, help="libraries at a time (default: %(default)s)")
    given = parser.parse_args(arguments)
    report = Report("conformance", given.out, given.directory, toy=given.toy, command=["conformance", *arguments])
    on_s3 = [fault for fault in given.faults if fault in buckets.FAULTS]
    preload(given.libraries, buckets.IMPORTS if on_s3 else ())
    began = time.monotonic()
    with scratch(given.directory, "conformance") as directory:
        lab = Lab(directory, Content(TOY_ROWS if given.toy else ROWS), LIMIT_S)
        suite = _Suite(lab, report, TOY if given.toy else Amount(), given.libraries)
        serving = buckets.server(directory) if on_s3 and buckets.why_not() is None else nullcontext()
        with serving, ThreadPoolExecutor(1) as beside:
            waits = beside.submit(suite.run, on_s3, MOSTLY_WAITS * given.jobs)
            suite.run([fault for fault in given.faults if fault in faults.FAULTS], given.jobs)
            waits.result()
    report.add("end", seconds=time.monotonic() - began)
    text = page(report.lines)
    if given.out is None:
        print(text)
    else:
        given.out.with_suffix(".md").write_text(text, encoding="utf-8")


class _Suite:
    """Writes a line for each trial as it ends."""

    def __init__(self, lab: Lab, report: Report, amount: Amount, libraries: Sequence[str]) -> None:
        self._lab, self._report, self._amount, self._libraries = lab, report, amount, libraries
        self._lock = threading.Lock()

    def run(self, names: Sequence[str], num_threads: int) -> None:
        """Every library with every one of these faults; fault by fault."""
        with ThreadPoolExecutor(num_threads) as pool:
            pairs = [(library, fault) for fault in names for library in self._libraries]
            for done in [pool.submit(self._try, *pair) for pair in pairs]:
                done.result()

    def _try(self, library: str, fault: str) -> None:
        for line in self._lines(library, fault):
            with self._lock:
                self._report.add(line.pop("kind"), library=library, fault=fault, **line)
        print(f"{library}, {fault}", file=sys.stderr, flush=True)

    def _lines(self, library: str, fault: str) -> Iterator[dict[str, str]]:
        why = LIBRARIES[library].why_not() or _why_not(fault)
        if why is not None:
            yield {"kind": "left out", "why": why}
            return
        try:
            for trial in FAULTS[fault](self._lab, library, self._amount):
                yield {"kind": "trial", **trial.line()}
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # the other libraries go on
            yield {"kind": "failure", "why": str(error)[:2000]}


def _why_not(fault: str) -> str | None:
    """Why this machine cannot make it."""
    if fault == NEEDS_ROOT and not faults.can_mount():
        return "needs root, which may mount a disk of its own"
    return buckets.why_not() if fault in buckets.FAULTS else None
