"""docs/quickstart.md, followed to the letter: what it prints after a kill is what it prints without one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = f"""
set -e
python() {{ {sys.executable} "$@"; }}
ckptlib() {{ python -m ckptlib.cli "$@"; }}
"""


def section(title: str) -> str:
    """The lines that a reader types."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)^## ", PAGE, re.M | re.S)
    assert found is not None
    return "".join(re.findall(r"^    (.*\n)", re.sub(r"^```.*?^```$", "", found[1], flags=re.M | re.S), re.M))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_reader_gets_there(tmp_path: Path) -> None:
    code = re.search(r"as `train.py`:\n\n```python\n(.*?)```", PAGE, re.S)
    assert code is not None
    (tmp_path / "train.py").write_text(code[1])

    def typed(commands: str) -> str:
        # Its own process is killed by its number: a shell's function would run in another one.
        commands = commands.replace("python train.py &", f"{sys.executable} train.py &")
        done = subprocess.run(
            ["bash", "-c", COMMANDS + commands], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    loss = typed(section("Train")).splitlines()[-1]
    again = typed(section("Kill it, and start it again")).splitlines()
    assert any(line.lstrip().startswith(("1000 ", "1,000 ")) for line in again)  # as ls saw it after the kill
    assert again[-1] == loss
    assert ": all good" in typed(section("Look"))
