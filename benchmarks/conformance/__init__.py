"""What is left of a run whose save was killed, or whose files were damaged? ckptlib and its peers, fault by fault.

Each trial is a job of its own: it saves step 1, saves step 2, and meets one fault; then a new job starts and resumes as
the library's documentation says. An oracle that shares no code with any library says whose tensors it got. Lines of
JSON, one for each trial; beside them, a page of tables. Linux; root may mount the disk that fills up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import Report, scratch
from benchmarks.conformance.content import Content
from benchmarks.conformance.faults import FAULTS, TOY, Amount, can_mount
from benchmarks.conformance.lab import Lab, preload
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.page import page

LIMIT_S = 30.0
ROWS, TOY_ROWS = 128, 16
NEEDS_ROOT = "disk full"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks conformance")
    parser.add_argument("--toy", action="store_true", help="two trials of each fault")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; the page of tables goes beside it")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    parser.add_argument("--libraries", nargs="*", default=[*LIBRARIES], choices=[*LIBRARIES], metavar="LIBRARY")
    parser.add_argument("--faults", nargs="*", default=[*FAULTS], choices=[*FAULTS], metavar="FAULT")
    parser.add_argument("--jobs", type=int, default=2, help="libraries at a time (default: %(default)s)")
    given = parser.parse_args(arguments)
    report = Report("conformance", given.out, given.directory, toy=given.toy, command=["conformance", *arguments])
    lock = threading.Lock()
    preload(given.libraries)

    def run(library: str, fault: str) -> None:
        for line in _lines(lab, library, fault, TOY if given.toy else Amount()):
            with lock:
                report.add(**line)
        print(f"{library}, {fault}", file=sys.stderr, flush=True)

    with scratch(given.directory, "conformance") as directory, ThreadPoolExecutor(given.jobs) as pool:
        lab = Lab(directory, Content(TOY_ROWS if given.toy else ROWS), LIMIT_S)
        for done in [pool.submit(run, library, fault) for fault in given.faults for library in given.libraries]:
            done.result()
    text = page(report.lines)
    if given.out is None:
        print(text)
    else:
        given.out.with_suffix(".md").write_text(text, encoding="utf-8")


def _lines(lab: Lab, library: str, fault: str, amount: Amount) -> Iterator[dict[str, str]]:
    about = {"library": library, "fault": fault}
    why = LIBRARIES[library].why_not()
    if why is None and fault == NEEDS_ROOT and not can_mount():
        why = "needs root, which may mount a disk of its own"
    if why is not None:
        yield {"kind": "left out", **about, "why": why}
        return
    try:
        for trial in FAULTS[fault](lab, library, amount):
            yield {"kind": "trial", **trial.line()}
    except RuntimeError as error:
        yield {"kind": "failure", **about, "why": str(error)[:2000]}
