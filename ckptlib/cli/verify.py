"""`ckptlib verify`: reads steps whole and names what is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output, count, duration, plain, size
from ckptlib.errors import CheckpointNotFound, CkptError
from ckptlib.format.keys import SaveId
from ckptlib.stores import Store
from ckptlib.verify.findings import Finding
from ckptlib.verify.packs import Advance
from ckptlib.verify.root import verify_root, verify_save
from ckptlib.verify.shared_chunks import SharedChunks

MAX_SHARDS = 3
"""Of a finding, that people see; JSON has all."""


@click.command("verify", short_help="Read a step whole and name what is damaged.")
@click.option("--all", "everything", is_flag=True, help="Verify every committed step, also abandoned ones.")
@with_store
@click.argument("step", default="latest")
@with_output
def command(store: Store, output: Output, step: str, everything: bool) -> bool:
    """Reads every byte of a step and checks it against its digest.

    STEP: a number, a name as `ls --json` prints it, or (default) the latest. With --all, good bytes that several steps
    share are read once. Nothing is changed or repaired.
    """
    if everything and step != "latest":
        raise click.UsageError("give either STEP or --all")
    catalog = Catalog(store)
    in_root = list(verify_root(catalog))
    saves = catalog.saves() if everything else []
    saves = saves or [_resolve(catalog, step, in_root)]
    for finding in in_root:
        _print(output, finding)
    began, nbytes = time.monotonic(), 0
    steps: list[dict[str, object]] = []
    found = [*in_root]
    shared = SharedChunks(catalog, saves) if len(saves) > 1 else None
    for save in saves:
        try:
            with _progress(output, save) as advance:
                mine = list(verify_save(catalog, save, advance, advance.expect, shared))
        except CheckpointNotFound:
            if not everything:
                raise
            continue  # dropped by retention since it was listed
        found += mine
        nbytes += advance.nbytes
        steps.append({"step": save.step, "name": str(save), "good": not mine, "nbytes": advance.nbytes})
        _print_step(output, save, mine, advance.nbytes)
    seconds = time.monotonic() - began
    output.document(
        {
            "url": store.url,
            "good": not found,
            "seconds": seconds,
            "nbytes": nbytes,
            "steps": steps,
            "findings": [document(finding) for finding in found],
        }
    )
    rate = f" ({size(nbytes / seconds)}/s)" if seconds > 0 and nbytes else ""
    summary = f"{count(len(steps), 'step')}, {size(nbytes)} read in {duration(seconds)}{rate}: "
    output.line(
        summary,
        Text(count(len(found), "finding"), style="red") if found else Text("all good", style="green"),
    )
    return not found


def _resolve(catalog: Catalog, step: str, in_root: list[Finding]) -> SaveId:
    """Damaged generations hide the history; the newest step is then the one that was saved last."""
    try:
        return catalog.resolve(step)
    except CheckpointNotFound:
        raise
    except CkptError:
        saves = [save for save in catalog.saves() if step in ("latest", str(save.step), str(save))]
        if not saves or not in_root:
            raise
        return max(saves, key=lambda save: (save.generation, save.step))


class _Counter:
    """Counts the bytes that were read, and moves the bar."""

    def __init__(self, bar: Advance, expect: Advance) -> None:
        self.nbytes = 0
        self._bar = bar
        self.expect = expect
        """To be told how many bytes there will be."""

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bar(nbytes)


@contextmanager
def _progress(output: Output, save: SaveId) -> Iterator[_Counter]:
    """A bar on stderr where that is a terminal; it is gone when the step is done."""
    if not output.err.is_terminal:
        yield _Counter(lambda nbytes: None, lambda nbytes: None)
        return
    columns = (
        TextColumn("step {task.description}"),
        BarColumn(complete_style="default", finished_style="default"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.err, transient=True) as bars:
        task = bars.add_task(str(save.step), total=None)
        yield _Counter(lambda nbytes: bars.advance(task, nbytes), lambda nbytes: bars.update(task, total=nbytes))


def document(finding: Finding) -> dict[str, object]:
    """A finding as JSON; `box` as a list of [first, last + 1] per dim."""
    fields = {name: getattr(finding, name) for name in ("damage", "key", "message", "rank", "offset", "nbytes")}
    save = finding.save
    return {
        **fields,
        "step": None if save is None else save.step,
        "name": None if save is None else str(save),
        "tensors": [
            {"name": name, "box": [[a, a + n] for a, n in zip(box.offset, box.shape, strict=True)]}
            for name, box in finding.shards
        ],
    }


def _print_step(output: Output, save: SaveId, findings: list[Finding], nbytes: int) -> None:
    mark = Text("bad ", style="red") if findings else Text("good", style="green")
    output.line(mark, f"  step {save.step}  {size(nbytes)}", Text(f"  {save}", style="dim"))
    for finding in findings:
        _print(output, finding)


def _print(output: Output, finding: Finding) -> None:
    output.line("      ", Text(f"{finding.damage:<10}", style="red"), "  ", finding.message)
    if len(finding.shards) > 1:
        some = [f"{name}{box}" for name, box in finding.shards[:MAX_SHARDS]]
        more = len(finding.shards) - len(some)
        text = ", ".join(some) + (f", and {more:,} more" if more else "")
        output.line(" " * 18, Text(plain(text), style="dim"))
