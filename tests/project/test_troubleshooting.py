"""docs/troubleshooting.md quotes messages as the code words them: one that was reworded there fails here."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from places import ROOT

import ckptlib

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.M)[1:]}
OTHERS = ("Starting and restarting with torchrun", "Errors by class")
"""Sections that quote torch, and classes."""
HOLE = "\0"
"""Stands for what is put into a text when it is said."""


@cache
def texts() -> str:
    """All of the package, one to a line."""
    found = []
    for path in sorted((ROOT / "ckptlib").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:[srd]|\.\df)", HOLE, node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                found.append("".join(map(str, parts)))
    return "\n".join(text.replace("\n", " ") for text in found)


def quoted() -> list[str]:
    """What stands in backticks in the first column, but for single words."""
    cells = [
        cell for name in SECTIONS if name not in OTHERS for cell in re.findall(r"^\| (.+?) \| ", SECTIONS[name], re.M)
    ]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if " " in text]


def test_there_is_something_to_compare() -> None:
    assert len(quoted()) > 80


@pytest.mark.parametrize("message", quoted())
def test_the_code_says_so(message: str) -> None:
    for piece in message.split("..."):  # a message may be put together of several texts
        assert piece.strip(" ,;()") in texts()


def test_every_class_is_explained() -> None:
    tree = ast.parse((ROOT / "ckptlib" / "errors.py").read_text(encoding="utf-8"))
    public = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} & set(ckptlib.__all__)
    assert public <= set(re.findall(r"`(?:ckptlib\.)?(\w+)`", SECTIONS["Errors by class"]))
