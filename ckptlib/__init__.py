"""Sharded, asynchronous, verified checkpoints for PyTorch training.

    with ckptlib.Checkpointer(url, {"model": model, "optim": optim}, every=ckptlib.Steps(500)) as ckpt:
        start = ckpt.restore().step
        for step in ckpt.loop(start, total):
            ...

Names that are not in `__all__` are not promised. Names are resolved on first use, so that the writer process and the
command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ckptlib._version import __version__ as __version__

if TYPE_CHECKING:
    from ckptlib import data as data
    from ckptlib import events as events
    from ckptlib.api import checkpoints, load, save, save_async
    from ckptlib.catalog.catalog import CheckpointInfo
    from ckptlib.checkpointer import Checkpointer
    from ckptlib.errors import (
        AgreementFailed,
        CheckpointNotFound,
        CkptError,
        CorruptData,
        FormatError,
        NewerFormat,
        NoRoom,
        ObjectExists,
        ObjectNotFound,
        ObjectUnreadable,
        Preempted,
        SaveFailed,
        StateError,
        StateMismatch,
        StoreDenied,
        StoreError,
        StoreFull,
        StoreTimeout,
        Superseded,
        UnsupportedState,
        WaitTimeout,
    )
    from ckptlib.exporting.asked import Export
    from ckptlib.exporting.export import ExportReport, export
    from ckptlib.imports.beginning import Init
    from ckptlib.imports.convert import ImportReport, convert
    from ckptlib.loading.report import LoadReport
    from ckptlib.policy.keep import Keep
    from ckptlib.policy.lossy import Lossy
    from ckptlib.policy.overhead import Overhead
    from ckptlib.policy.peers import Coverage, Peers
    from ckptlib.policy.when import First, Minutes, Policy, Steps
    from ckptlib.reading.nested import read
    from ckptlib.reading.opened import CheckpointReader, open
    from ckptlib.saving.pending import Pending
    from ckptlib.state.leaf import PerRank, Sharded

_HOMES = {
    "CheckpointInfo": "catalog.catalog",
    "CheckpointReader": "reading.opened",
    "Export": "exporting.asked",
    "ExportReport": "exporting.export",
    "ImportReport": "imports.convert",
    "Init": "imports.beginning",
    "convert": "imports.convert",
    "LoadReport": "loading.report",
    "Pending": "saving.pending",
    "checkpoints": "api",
    "export": "exporting.export",
    "load": "api",
    "open": "reading.opened",
    "read": "reading.nested",
    "save": "api",
    "save_async": "api",
    "Checkpointer": "checkpointer",
    "Coverage": "policy.peers",
    "Peers": "policy.peers",
    "First": "policy.when",
    "Minutes": "policy.when",
    "Overhead": "policy.overhead",
    "Policy": "policy.when",
    "Steps": "policy.when",
    "Keep": "policy.keep",
    "Lossy": "policy.lossy",
    "PerRank": "state.leaf",
    "Sharded": "state.leaf",
    **dict.fromkeys(
        (
            "AgreementFailed",
            "CheckpointNotFound",
            "CkptError",
            "CorruptData",
            "FormatError",
            "NewerFormat",
            "NoRoom",
            "ObjectExists",
            "ObjectNotFound",
            "ObjectUnreadable",
            "Preempted",
            "SaveFailed",
            "StateError",
            "StateMismatch",
            "StoreDenied",
            "StoreError",
            "StoreFull",
            "StoreTimeout",
            "Superseded",
            "UnsupportedState",
            "WaitTimeout",
        ),
        "errors",
    ),
}

__all__ = [
    "AgreementFailed",
    "CheckpointInfo",
    "CheckpointNotFound",
    "CheckpointReader",
    "Checkpointer",
    "CkptError",
    "CorruptData",
    "Coverage",
    "Export",
    "ExportReport",
    "First",
    "FormatError",
    "ImportReport",
    "Init",
    "Keep",
    "LoadReport",
    "Lossy",
    "Minutes",
    "NewerFormat",
    "NoRoom",
    "ObjectExists",
    "ObjectNotFound",
    "ObjectUnreadable",
    "Overhead",
    "Peers",
    "Pending",
    "PerRank",
    "Policy",
    "Preempted",
    "SaveFailed",
    "Sharded",
    "StateError",
    "StateMismatch",
    "Steps",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreTimeout",
    "Superseded",
    "UnsupportedState",
    "WaitTimeout",
    "checkpoints",
    "convert",
    "export",
    "load",
    "open",
    "read",
    "save",
    "save_async",
]


_MODULES = ("data", "events")
"""Public modules, whose own names are promised, too."""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"ckptlib.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptlib' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ckptlib.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
