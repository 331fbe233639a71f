"""Saves of a trainer whose writers meet faults as they commit: what it is told, beside what is there in the end.

The trainer's end and the writers are those of production. Writers are forked, so that each has a store with faults of
its own. What judges them looks at the root with code of its own.

    commit_faults.py DIRECTORY PLANS    a JSON list of cases; prints one line of JSON for each
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from helpers.plain_reader import tensors_of
from typing_extensions import Buffer, override
from workers.crash_spare import make_root, ready_slot, setup

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.errors import SaveFailed, StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import _HookedStore
from ckptlib.writer import child, process
from ckptlib.writer.channel import Channel
from ckptlib.writer.client import Writer
from ckptlib.writer.process import WriterProcess

WAIT_S = 150.0
HANG_DEADLINE_S = 1.0
"""Of a save whose writers hang: so long each of these is waited for."""

GENERATION = GenerationId(1, "00000001")
"""As `make_root` puts it."""

COMMITS = ("ckptlib-commit", "ckptlib-documents")
"""The threads of a writer that ask the store for a commit."""

ERRORS = {"refused": StoreError, "denied": StoreDenied, "full": StoreFull, "late": StoreTimeout}


class Case(TypedDict):
    """Step 2 is saved by writers that meet these faults, steps 1 and 3 by such as meet none."""

    name: str
    local: bool
    """Whether the store calls itself a file system."""
    deadline_s: float
    writers: list[dict[str, str]]
    """Of the writers, one behind the other: by the number of a request for a commit, what befalls it."""


class Faulty(_HookedStore):
    """A writer's way to the root of a case."""

    def __init__(self, directory: Path, case: Case, faults: dict[str, str], begun: bool) -> None:
        super().__init__(LocalStore(str(directory / "root")), "faulty")
        self.is_local = case["local"]
        self._directory, self._faults = directory, faults
        self._begun = begun
        self._count = 0

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        self._begun = self._begun or key.startswith(f"parts/{2:012d}")
        fault = ""
        is_root = (op, key) == ("scan", keys.ROOT)  # asked of file systems alone: all others have one number everywhere
        if self._begun and threading.current_thread().name.startswith(COMMITS) and not is_root:
            if not (self._directory / "over").exists():
                fault = self._faults.get(str(self._count), "")
            self._count += 1
        when, _, what = fault.partition(" ")
        if when == "before":
            self._befall(what, f"{op} {key}")
        yield data
        if when == "after":
            self._befall(what, f"{op} {key}")

    def _befall(self, what: str, where: str) -> None:
        if what in ERRORS:
            raise ERRORS[what](f"{where}: {what}, as planned")
        EVENTS[what](self._directory / "root")


def manifests(root: Path, step: int) -> list[Path]:
    return [*root.glob(f"steps/{step:012d}-*.json")]


def sweep(root: Path) -> None:
    """One that lists the steps, and deletes what it takes for the remains of a crash: a store with several clocks."""
    if not manifests(root, 2):
        for path in [*root.glob(f"parts/{2:012d}-*/*"), *root.glob(f"packs/{2:012d}-*/*")]:
            path.unlink()


def commit(root: Path) -> None:
    """Another committer, such as the job that comes next."""
    committer = Committer(Catalog(LocalStore(str(root))))
    with suppress(SaveFailed):
        committer.commit_when_whole(SaveId(2, GENERATION), 1, lambda: 0.0)


def take_back(root: Path) -> None:
    """As that one does where it was late."""
    for path in manifests(root, 2):
        record = root / "trash" / path.name
        record.parent.mkdir(exist_ok=True)
        record.write_bytes(b"a record")
        path.unlink()


EVENTS: dict[str, Callable[[Path], object]] = {
    "hangs": lambda root: time.sleep(1e6),
    "dies": lambda root: os.kill(os.getpid(), signal.SIGKILL),
    "swept": sweep,
    "committed": commit,
    "taken back": take_back,
}


class Forked:
    """A writer process, as `Child` holds it."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid, self._status = pid, -1

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self._status < 0 and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("writer", timeout_s)
            time.sleep(0.002)
        self._status = 0
        return self._status


class Trainer:
    """The root of a case, and its trainer."""

    def __init__(self, directory: Path, case: Case) -> None:
        self.directory, self.case = directory, case
        self.root = directory / "root"
        directory.mkdir()
        assert make_root(self.root) == GENERATION
        self.num_writers = 0
        self.told: dict[int, dict[str, Any]] = {}
        self.failures: list[str] = []
        child.launch = self.fork  # type: ignore[assignment]
        self.writer = Writer(setup(self.root, deadline_s=case["deadline_s"]))

    def fork(self, end: Any, *_: object) -> Forked:
        number, self.num_writers = self.num_writers, self.num_writers + 1
        faults = self.case["writers"][number] if number < len(self.case["writers"]) else {}
        trainer = os.getpid()
        pid = os.fork()
        if pid:
            return Forked(pid)
        try:
            log = os.open(self.directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            store = Faulty(self.directory, self.case, faults, begun=number > 0)
            process.open_store = lambda url, options: store  # type: ignore[assignment]
            WriterProcess(Channel(end), trainer).run()
        finally:
            os._exit(0)

    def save(self, step: int, content: int) -> None:
        """Until it is told what became of it."""
        save = SaveId(step, GENERATION)
        arrays = {"w": np.arange(3000, dtype=np.int32) + content}
        slot = ready_slot(self.directory, save, arrays)
        self.writer.add_slot(slot.path)
        self.writer.persist(save, slot.path)
        self.until(lambda: step in self.told, f"nobody told what became of step {step}")
        event = self.told[step]
        if event["event"] == "committed":
            self.check_loads(step, arrays)

    def until(self, true: Callable[[], bool], else_: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            for event in self.writer.poll(0.02):
                if event["event"] in ("committed", "failed"):
                    self.told.setdefault(int(event["save"][:12]), event)
            if time.monotonic() > deadline:
                self.failures.append(else_)
                return

    def check_loads(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        try:
            (manifest,) = manifests(self.root, step)
            found = tensors_of(lambda key: (self.root / key).read_bytes(), manifest.read_bytes())
            assert found["w"].tobytes() == arrays["w"].tobytes(), "with other values"
        except Exception as error:
            self.failures.append(f"step {step} was told as committed, and does not load: {error!r}")

    def outcome(self, step: int) -> str:
        event = self.told.get(step, {})
        if event.get("event") != "failed":
            return str(event.get("event"))
        return "in doubt" if event.get("in_doubt") else "never"

    def run(self) -> dict[str, object]:
        self.save(1, content=1)
        self.save(2, content=2)  # all of it is new, and step 3 needs all of it
        (self.directory / "over").touch()
        self.save(3, content=2)
        try:
            left = self.writer.close(WAIT_S)
            if self.case["deadline_s"] > HANG_DEADLINE_S:  # else a busy machine is late for step 3 as well
                self.failures += [str(event) for event in left]
        except Exception as error:
            self.failures.append(repr(error))
        finish_saves(Catalog(LocalStore(str(self.root))), GenerationId(2, "00000002"))  # as the next job does
        if self.outcome(2) == "never" and manifests(self.root, 2):
            self.failures.append(f"step 2 is listed, and was told as never to be: {self.told[2]}")
        outcomes = [self.outcome(step) for step in (1, 2, 3)]
        return {"case": self.case["name"], "outcomes": outcomes, "failures": self.failures}


def main(directory: Path, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        trainer = Trainer(directory / str(number), case)
        print(json.dumps(trainer.run()), flush=True)
        shutil.rmtree(trainer.directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
