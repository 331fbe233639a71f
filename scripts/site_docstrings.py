"""For mkdocstrings: makes Markdown's lists of the lists of arguments in docstrings, whose columns are aligned."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*):\s+(?=\S)")


def listed(text: str) -> str:
    """Paragraphs that consist of `name: text` and indented lines become lists; all else stays."""
    return "\n\n".join(map(_listed, text.split("\n\n")))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not all(ENTRY.match(line) or line.startswith("    ") for line in lines) or lines[0][0] == " ":
        return paragraph
    return "\n".join(ENTRY.sub(r"- `\1`: ", line) if ENTRY.match(line) else f"    {line.strip()}" for line in lines)


class Lists(griffe.Extension):
    """Does so with each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
