"""A run that ends with an error lets go of its checkpoints' directories; a run that begins then looks at them."""

from __future__ import annotations

import threading
from pathlib import Path

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
