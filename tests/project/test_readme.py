"""What the documents show is run: README's snippets as they stand, and the names that ckptlib promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import snippets
from places import ROOT

import ckptlib

HERE = ROOT
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run(code: str, tmp_path: Path) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")
    for name in ("wandb", "tensorboard"):  # test_loggers looks into their files
        if name in code:
            pytest.importorskip(name, reason=f"{name} is not installed")
    failed = snippets.run(code, tmp_path)
    assert failed is None, failed


def test_every_promised_name_is_there() -> None:
    for name in ckptlib.__all__:
        assert getattr(ckptlib, name).__name__ == name
    assert sorted(ckptlib.__all__) == ckptlib.__all__ or sorted(ckptlib.__all__, key=str.lower) == ckptlib.__all__


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckptlib.nothing  # noqa: B018


def test_a_snippet_that_fails_is_told(tmp_path: Path) -> None:
    assert "ZeroDivisionError" in str(snippets.run("print(1 / 0)", tmp_path))
    assert snippets.run("import sys; sys.exit(3)", tmp_path) == "exit status 3"
    assert snippets.run("assert __name__ == '__main__'", tmp_path) is None
