"""A page of the documents as its reader types it: programs and commands, block by block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.M | re.S)
_NAMED = re.compile(r"as `(\w+\.py)`:\s*$")
FILES = {"json", "yaml", "text", "bash"}
"""Languages of fences around what is a file, or output."""


@dataclass(frozen=True)
class Block:
    """One of a page's."""

    language: str
    """Of a fence; "" for a block that is indented."""
    text: str
    name: str | None
    """Under which the page says to save it."""

    @property
    def first(self) -> str:
        return self.text.splitlines()[0]

    def without(self, lines: Collection[str]) -> Block:
        return replace(self, text="".join(line for line in self.text.splitlines(True) if line.rstrip() not in lines))


def blocks(page: str) -> list[Block]:
    """In their order."""
    found = []
    for match in _BLOCK.finditer(page):
        language, fenced, indented = match.groups("")
        name = _NAMED.search(page[: match.start()])
        found.append(Block(language, fenced or re.sub(r"^    ", "", indented, flags=re.M), name[1] if name else None))
    return found


def script(found: Collection[Block]) -> str:
    """For bash: saves and runs the programs, and types the commands. What fails ends it, and its block is the last that
    it told of."""
    lines = ["set -e"]
    for number, block in enumerate(found):
        if block.language in FILES:
            continue
        lines.append(f"echo {shlex.quote(f'=== {block.first}')} >&2")
        if block.language == "python":
            name = block.name or f"program_{number}.py"
            lines += [f"cat > {name} << 'END_OF_PROGRAM'", block.text + "END_OF_PROGRAM"]
            lines += [] if block.name else [f"python {name}"]
        else:
            lines.append(commands(block.text))
    return "\n".join(lines) + "\n"


def commands(text: str) -> str:
    """What is typed: all of it, or what follows a prompt where there is one."""
    typed = re.findall(r"^\$ (.*(?<=\\)\n.*|.*)$", text, re.M)
    return "\n".join(typed) if typed else text
