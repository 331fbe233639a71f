"""Output for people and programs: aligned columns with human sizes, or one JSON document.

Names and values come from a store and may hold anything; control characters are escaped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

Cell = str | Text

_CALM = Theme(dict.fromkeys(("progress.download", "progress.data.speed", "progress.remaining"), "default"))
"""rich would give each number of a progress bar a colour of its own."""


class Output:
    """Where a command writes: results to stdout; progress, questions and errors to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, theme=_CALM)

    def document(self, data: object) -> None:
        """The one JSON document of a command; nothing in the other mode."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def line(self, *cells: Cell) -> None:
        """One line for people; nothing in JSON mode."""
        if not self.as_json:
            self._print([_cell(cell) for cell in cells])

    def columns(self, header: Sequence[str], rows: Iterable[Sequence[Cell]], right: Iterable[str] = ()) -> None:
        """A table; `right`: the columns whose cells end at one another, as numbers do."""
        if self.as_json:
            return
        cells = [[_cell(cell) for cell in row] for row in rows]
        if header:
            cells.insert(0, [Text(name, style="dim") for name in header])
        widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
        ends = {i for i, name in enumerate(header) if name in {*right}}
        for row in cells:
            padded: list[Cell] = []
            for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
                pad = " " * (width - _width(cell))
                padded += [pad, cell, "  "] if i in ends else [cell, pad, "  "]
            self._print(padded)

    def _print(self, cells: Sequence[Cell]) -> None:
        """One line. Where no style shows, past rich, a quarter of a millisecond for each: there may be thousands."""
        if self._out.color_system is None or not any(isinstance(cell, Text) for cell in cells):
            self._out.file.write("".join(map(str, cells)).rstrip() + "\n")
        else:
            line = Text.assemble(*cells)
            line.rstrip()
            self._out.print(line)

    def error(self, error: BaseException) -> None:
        """In one line; as JSON, too, where that was asked for."""
        message = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        self.document({"error": {"kind": type(error).__name__, "message": message}})
        self.err.print(Text(plain(message), style="red"))


def _width(cell: Cell) -> int:
    """Columns of a terminal."""
    if isinstance(cell, Text):
        return cell.cell_len
    return len(cell) if cell.isascii() else cell_len(cell)


def _cell(cell: Cell) -> Cell:
    return cell if isinstance(cell, Text) else plain(cell)


def plain(text: str) -> str:
    """The text, with everything escaped that is no printable character."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size(nbytes: float) -> str:
    """Bytes with three digits: "3.24 MB"."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    unit = ""
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007  (the last one is used below)
        nbytes /= 1000
        if nbytes < 999.5:
            break
    return f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"


def duration(seconds: float) -> str:
    """A time span in its largest unit: "3 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds >= 0 else "-" + duration(-seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(since: float) -> str:
    """How long ago a time was, given in seconds since the epoch."""
    seconds = time.time() - since
    return duration(seconds) if abs(seconds) >= 1 else "0 s"


def moment(seconds: float) -> str:
    """Seconds since the epoch as a date, UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):  # from a document: may be any number
        return f"{seconds:g} s since 1970"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def metrics(found: Mapping[str, object]) -> str:
    """On one line: "loss 2.513  lr 0.001"."""
    return "  ".join(f"{name} {_number(value)}" for name, value in found.items())


def _number(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case str():
            return value
        case {"$float": str(text)}:  # what JSON has no number for
            return text
        case _:
            return json.dumps(value)


def ranks(found: Sequence[int]) -> str:
    """Ascending ranks: "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in found:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
