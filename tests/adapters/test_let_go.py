"""A run that ends with an error lets go of its checkpoints' directories; a run that begins then looks at them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.adapters.step_folders import StepFolders
from ckptlib.format.keys import SaveId


def committed(directory: Path) -> tuple[str, SaveId]:
    """A root with one step."""
    root = str(directory / "root")
    with ckptlib.Checkpointer(root, {"w": torch.ones(3)}, every=1) as checkpointer:
        pending = checkpointer.save(1)
        assert pending is not None
        pending.wait_committed()
    return root, pending.save


def test_what_is_being_renamed_is_done_with(tmp_path: Path) -> None:
    """Else the next run of the process finds drafts, and gives them their names at the same moment."""
    root, saved = committed(tmp_path)
    entered, leave = threading.Event(), threading.Event()

    def beyond(newest: Path) -> list[Path]:
        entered.set()
        leave.wait(60)
        return []

    folders = StepFolders(tmp_path, root, None, beyond)
    folders.draft("checkpoint-1", saved)
    folders.publish("checkpoint-1", saved)
    assert entered.wait(60)
    going = threading.Thread(target=folders.let_go)
    going.start()
    going.join(0.2)
    assert going.is_alive()
    leave.set()
    going.join(60)
    assert not going.is_alive()


def test_no_commit_is_waited_for(tmp_path: Path) -> None:
    root, saved = committed(tmp_path)
    folders = StepFolders(tmp_path, root, None, lambda newest: [])
    never = SaveId(2, saved.generation)
    draft = folders.draft("checkpoint-2", never)
    folders.publish_when_committed("checkpoint-2", never, threading.Event())
    folders.let_go()
    assert draft.is_dir(), "whoever starts next knows whether its step was committed"


def test_a_step_that_is_gone_when_its_outcome_is_known_is_not_waited_for(tmp_path: Path) -> None:
    root, saved = committed(tmp_path)
    folders = StepFolders(tmp_path, root, None, lambda newest: [])
    known = threading.Event()
    drafts = [folders.draft(name, save) for name, save in (("gone", SaveId(2, saved.generation)), ("there", saved))]
    folders.publish_when_committed("gone", SaveId(2, saved.generation), known)
    folders.publish_when_committed("there", saved, known)
    known.set()
    folders.wait()
    assert not any(draft.exists() for draft in drafts)
    assert (tmp_path / "there").is_dir()
    assert not (tmp_path / "gone").exists()


ENDS = {
    "accelerate": """
from ckptlib.adapters.accelerate import CkptlibAccelerator
accelerator = CkptlibAccelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(4, 4))
accelerator.save_state(sys.argv[1] + "/last")
""",
    "lightning": """
from ckptlib.adapters.lightning import CkptlibCheckpointIO
CkptlibCheckpointIO().save_checkpoint({"w": torch.ones(1000)}, sys.argv[1] + "/last")
""",
}
"""Programs that end without `end_training` or `teardown`."""


def ended(package: str, directory: Path, more: str = "", first: str = "") -> None:
    pytest.importorskip(package)
    program = f"import logging, shutil, sys, torch\n{first}\n{ENDS[package]}\n{more}\nlogging.warning('the end')"
    command = [sys.executable, "-c", program, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "WARNING:root:the end" in done.stderr, done.stderr


@pytest.mark.parametrize("package", ["accelerate", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_process_ends_behind_its_last_checkpoint(package: str, tmp_path: Path) -> None:
    ended(package, tmp_path / "run")
    assert (tmp_path / "run" / "last").exists()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "run" / "ckptlib")] == [0]


UNSEEN = """
import threading
from ckptlib.catalog.catalog import Catalog
gone, asked = threading.Event(), Catalog.is_committed

def held(catalog, save):
    if threading.current_thread() is not threading.main_thread():
        gone.wait(60)
    return asked(catalog, save)

Catalog.is_committed = held
"""
"""Threads ask for a commit only when it is gone again."""

GONE = {
    "accelerate": "CkptlibAccelerator._under_way[0].pending",
    "lightning": "[*CkptlibCheckpointIO._saving.values()][0].pending",
}


@pytest.mark.parametrize("package", ["accelerate", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_process_ends_whose_root_is_gone(package: str, tmp_path: Path) -> None:
    """Committed, and gone with its directory before the thread that waits for it has looked: a temporary one, often."""
    ended(
        package, tmp_path / "run", f"{GONE[package]}.wait_committed()\nshutil.rmtree(sys.argv[1])\ngone.set()", UNSEEN
    )
    assert not (tmp_path / "run").exists()
