"""`ckptlib report`: writes a run's records as one page of HTML."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.errors import CkptError
from ckptlib.reporting.gather import gather
from ckptlib.reporting.page import page
from ckptlib.stores import Store
from ckptlib.words import count, size

STDOUT = "-"


@click.command("report", short_help="Write a page that shows what a run's checkpoints do.")
@click.option(
    "-o", "--out", default="report.html", show_default=True, metavar="FILE", help="The page; - writes it to stdout."
)
@with_store
@with_output
def command(output: Output, store: Store, out: str) -> bool:
    """Writes one HTML page about a run: stalls, persist times, sizes, codecs, intervals, restores, failures, ETTR.

    It shows what the root's records tell, reads no tensor data, and changes nothing in the root. The page needs no
    network and runs no script. Exit status 1 where a record cannot be read; the page says which, and shows all others.
    """
    if out == STDOUT and output.as_json:
        raise click.UsageError("--out - and --json both write to stdout; give one of them")
    found = gather(Catalog(store))
    text = page(found)
    if out == STDOUT:
        sys.stdout.buffer.write(text.encode())  # the page says that it is UTF-8, whatever the locale is
    else:
        _write(Path(out), text)
        nbytes = len(text.encode())
        output.document({"out": out, "nbytes": nbytes, "steps": len(found.steps), "problems": [*found.problems]})
        output.line(f"{out}: {count(len(found.steps), 'step')}, {size(nbytes)}")
    for problem in found.problems[:8]:
        output.problem(problem)
    return not found.problems


def _write(path: Path, text: str) -> None:
    """Writes the page, whole or not at all. A link stays a link. A path that is no regular file, such as a pipe or
    /dev/null, is written to, and not replaced."""
    if not path.name:
        raise CkptError(f"'{path}' is no name of a file for the page")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise CkptError(f"{path}: cannot write the page: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    """Writes the page beside an older one, which it then replaces."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
