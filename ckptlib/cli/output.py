"""Output for people and programs: aligned columns with human sizes, or one JSON document.

Names and values come from a store and may hold anything; control characters are escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from ckptlib.words import one_line, plain

Cell = str | Text

MAX_COMMON_WIDTH = 120
"""Cells that are wider than this, in columns of a terminal, do not widen the others of their column."""

_CALM = Theme(dict.fromkeys(("progress.download", "progress.data.speed", "progress.remaining"), "default"))
"""rich would give each number of a progress bar a colour of its own."""


def somebody_answers() -> bool:
    """Whether a person can be asked. Python's stdin is None if the standard input was closed."""
    return sys.stdin is not None and sys.stdin.isatty()


class Output:
    """Where a command writes: results to stdout; progress, questions and errors to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, theme=_CALM)

    def document(self, data: object) -> None:
        """Writes the one JSON document of a command; nothing without --json."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")

    def line(self, *cells: Cell) -> None:
        """Writes one line for people; nothing in JSON mode."""
        if not self.as_json:
            self._print([_cell(cell) for cell in cells])

    def columns(self, header: Sequence[str], rows: Iterable[Sequence[Cell]], right: Iterable[str] = ()) -> None:
        """Writes a table for people. `right`: the columns that are aligned right, as numbers are."""
        if self.as_json:
            return
        cells = [[_cell(cell) for cell in row] for row in rows]
        if header:
            cells.insert(0, [Text(name, style="dim") for name in header])
        widths = [_common_width(map(_width, column)) for column in zip(*cells, strict=True)]
        ends = {i for i, name in enumerate(header) if name in {*right}}
        for row in cells:
            padded: list[Cell] = []
            for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
                pad = " " * (width - _width(cell))  # empty for a cell that is wider
                padded += [pad, cell, "  "] if i in ends else [cell, pad, "  "]
            self._print(padded)

    def _print(self, cells: Sequence[Cell]) -> None:
        """Writes one line. If no style shows, bypasses rich, which takes a quarter of a millisecond for each: there may
        be thousands."""
        if self._out.color_system is None or not any(isinstance(cell, Text) for cell in cells):
            self._out.file.write("".join(map(str, cells)).rstrip() + "\n")
        else:
            line = Text.assemble(*cells)
            line.rstrip()
            self._out.print(line)

    def error(self, error: BaseException) -> None:
        """Writes an error in one line; in JSON mode, as JSON, too."""
        message = one_line(str(error))
        self.document({"error": {"kind": type(error).__name__, "message": message}})
        self.problem(message)

    def problem(self, text: str) -> None:
        """Writes a problem to stderr, whatever the mode."""
        self.err.print(Text(plain(text), style="red"))


def _common_width(widths: Iterable[int]) -> int:
    """Returns the width of a column. A very long cell moves only the rest of its own line, not that of all lines."""
    return max((width for width in widths if width <= MAX_COMMON_WIDTH), default=0)


def _width(cell: Cell) -> int:
    """Returns the columns of a terminal that a cell takes."""
    if isinstance(cell, Text):
        return cell.cell_len
    return len(cell) if cell.isascii() else cell_len(cell)


def _cell(cell: Cell) -> Cell:
    return cell if isinstance(cell, Text) else plain(cell)
