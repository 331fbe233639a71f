"""The command, and roots for it: one of real ranks, a copy of that, and one made by hand."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from helpers.commands import Ckptlib, Result
from helpers.increments import save_steps
from launch import fork_ranks
from support import make_generation, make_root, make_save, state

from ckptlib.cli.app import run
from ckptlib.stores.local import LocalStore


@pytest.fixture
def ckptlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckptlib:
    """Runs the command in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal, whoever runs the tests
    monkeypatch.setenv("COLUMNS", "80")  # people's terminals are narrow: nothing may be lost or cut

    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4 of two ranks; then a rewind to 2, and step 3 of one rank."""
    root = tmp_path_factory.mktemp("cli") / "root"
    for num_ranks, mode in ((2, "two"), (1, "one")):
        fork_ranks("cli_saves.py", num_ranks, root, mode, timeout_s=120)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def made(tmp_path: Path) -> LocalStore:
    """Steps 1 to 5, by hand."""
    store = LocalStore(str(tmp_path / "made"))
    catalog = make_root(store)
    generation = make_generation(catalog)
    for step in range(1, 6):
        make_save(catalog, generation, step, state(step))
    return store


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 5 of one process, each of which shares most with the one before. Not to be changed."""
    root = tmp_path_factory.mktemp("shared") / "root"
    save_steps(root)
    return root


@pytest.fixture
def sharing(shared: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(shared, tmp_path / "sharing"))
