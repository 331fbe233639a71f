"""Shows how far a command that moves many bytes has come, by a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckptlib.cli.output import Output

Advance = Callable[[int], None]


class Counter:
    """Counts the bytes that are done, and moves the bar."""

    def __init__(self, bar: Advance, expect: Advance) -> None:
        self.nbytes = 0
        self._bar = bar
        self.expect = expect
        """Sets how many bytes there will be."""

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bar(nbytes)


@contextmanager
def progress(output: Output, what: str) -> Iterator[Counter]:
    """Shows a bar on stderr, if that is a terminal, and removes it at the end. Yields the counter that moves it."""
    if not output.err.is_terminal:
        yield Counter(lambda nbytes: None, lambda nbytes: None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(complete_style="default", finished_style="default"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.err, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield Counter(lambda nbytes: bars.advance(task, nbytes), lambda nbytes: bars.update(task, total=nbytes))
