"""Where libraries are put to the test: processes that save and load, watched and killed from outside."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from benchmarks.conformance import jobs, tracer
from benchmarks.conformance.content import NEVER_SAVED, Content
from benchmarks.conformance.jobs import Job
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.library import elsewhere
from benchmarks.conformance.outcomes import Found, Outcome

LAST = 2
"""The step whose save meets the fault; those before are whole."""
_CONTEXT = multiprocessing.get_context("forkserver")
NUM_ATTEMPTS = 3
"""To get a library that far that its last save can begin; a busy machine makes helpers miss their own time limits."""


def preload(libraries: Iterable[str], more: Iterable[str] = ()) -> None:
    """Says what the process that jobs are forked from imports. Counts until the first job starts."""
    modules = dict.fromkeys([*(module for name in libraries for module in LIBRARIES[name].imports), *more])
    _CONTEXT.set_forkserver_preload(["benchmarks.conformance.jobs", *modules])


class Rank:
    """One process of a job."""

    def __init__(self, target: Callable[..., None], job: Job, *arguments: object) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process: BaseProcess = _CONTEXT.Process(target=target, args=(job, theirs, *arguments))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def hear(self, limit_s: float) -> Any:
        """What it says next; None when it has said nothing by then, ("died", code) when it ended instead."""
        sources = connection.wait([self._pipe, self._process.sentinel], limit_s)
        if self._pipe in sources or self._pipe.poll(0):
            with suppress(EOFError, ConnectionError):
                return self._pipe.recv()
        if not sources:
            return None
        self._process.join(limit_s)
        return "died", self._process.exitcode

    def tell(self, word: str) -> None:
        with suppress(BrokenPipeError, ConnectionError):
            self._pipe.send(word)

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended by then."""
        self._process.join(limit_s)
        return self._process.exitcode is not None

    def kill(self, helpers: bool = True) -> None:
        """It and, with `helpers`, all processes that it started."""
        for pid in tracer.family(self.pid) if helpers else [self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join(10)
        self._pipe.close()


class Bucket(Protocol):
    """A part of an object store that nobody else uses."""

    url: str
    environment: Mapping[str, str]
    """With which a library reaches it."""

    def fill_from(self, other: Place) -> None:
        """Copies another place's root."""
        shutil.copytree(other.root, self.root, symlinks=True)

    def names(self) -> list[str]:
        """What a listing of the URL gives, as if of a directory."""

    def read(self, name: str) -> bytes:
        """An object. Raises FileNotFoundError."""


@dataclass(frozen=True)
class Lab:
    """Settings of all trials."""

    directory: Path
    content: Content
    limit_s: float
    """After which somebody who says nothing hangs."""

    @contextmanager
    def place(self, bucket: Bucket | None = None) -> Iterator[Place]:
        """An empty one."""
        with tempfile.TemporaryDirectory(prefix="case-", dir=self.directory, ignore_cleanup_errors=True) as path:
            place = Place(self, Path(path), bucket)
            for folder in (place.seen, place.temporary, place.logs):
                folder.mkdir()
            try:
                yield place
            finally:
                place.forget_memory()


@dataclass(frozen=True)
class Place:
    """The directory of one trial: the root, and what else there is."""

    lab: Lab
    path: Path
    bucket: Bucket | None = None
    """Where steps go; None: to the root."""
    root_ids: set[str] = field(default_factory=set)
    """Of the roots that ckptlib made here."""

    @property
    def seen(self) -> Path:
        """All that a job under test writes is below it."""
        return self.path / "seen"

    @property
    def root(self) -> Path:
        return self.seen / "root"

    @property
    def temporary(self) -> Path:
        return self.seen / "tmp"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def job(self, library: str, rank: int = 0, world_size: int = 1, meeting: Path | None = None) -> Job:
        meeting = meeting or self.path / f"meeting-{uuid.uuid4().hex}"
        settings = (self.lab.content, self.seen, self.logs, meeting, rank, world_size)
        if self.bucket is None:
            return Job(library, str(self.root), *settings)
        return Job(library, self.bucket.url, *settings, tuple(self.bucket.environment.items()))

    def savers(self, library: str, world_size: int = 1) -> list[Rank]:
        """Processes that have saved all steps but the last. Raises RuntimeError where that fails."""
        word: Any = None
        for _ in range(NUM_ATTEMPTS):
            meeting = self.path / f"meeting-{uuid.uuid4().hex}"
            ranks = [Rank(jobs.save, self.job(library, r, world_size, meeting), LAST) for r in range(world_size)]
            words = [rank.hear(4 * self.lab.limit_s) for rank in ranks]
            self._note_root()
            if words == ["ready"] * world_size:
                return ranks
            word = next(word for word in words if word != "ready")
            for rank in ranks:
                rank.kill()
            if self.bucket is not None:
                break
            self._empty()
        raise RuntimeError(f"{library} cannot save without a fault: {word}\n{self.printed()}")

    def saved(self, library: str, world_size: int = 1) -> float:
        """Saves all steps without a fault; returns the seconds that the last one took."""
        ranks = self.savers(library, world_size)
        for rank in ranks:
            rank.tell("go")
        words = [rank.hear(4 * self.lab.limit_s) for rank in ranks]
        for rank in ranks:
            rank.tell("close")
        ended = [rank.wait(4 * self.lab.limit_s) for rank in ranks]
        for rank in ranks:
            rank.kill()
        for word in words:
            if not all(ended) or word is None or word[0] != "saved":
                raise RuntimeError(f"{library} cannot save without a fault: {words}\n{self.printed()}")
        return max(float(word[1]) for word in words)

    def resume(self, library: str, world_size: int = 1) -> Outcome:
        """What a new job finds: first what the library or a look into the directory says, then the steps before."""
        kind = LIBRARIES[library]
        by_itself = kind.finds_newest and (self.bucket is None or kind.finds_newest_on_s3)
        listed: Sequence[int | None] = [None] if by_itself else kind.steps(self.names())
        if not listed:
            return Outcome(Found.LOST, "no step is there")
        first = listed[0]
        kinds, detail = self._load(library, world_size, first)
        if kinds is not Found.ERROR and kinds is not Found.DIED:
            return Outcome(kinds, detail)
        older = [step for step in range(LAST - 1, 0, -1) if not kind.keeps_one]
        for step in older:
            again, _ = self._load(library, world_size, step)
            if again is Found.BEFORE:
                return Outcome(kinds, detail)
        return Outcome(Found.LOST, detail)

    def _load(self, library: str, world_size: int, asked: int | None) -> tuple[Found, str]:
        meeting = self.path / f"meeting-{uuid.uuid4().hex}"
        ranks = [Rank(jobs.load, self.job(library, r, world_size, meeting), asked, LAST) for r in range(world_size)]
        end = time.monotonic() + self.lab.limit_s
        words = [rank.hear(max(end - time.monotonic(), 0.1)) for rank in ranks]
        for rank in ranks:
            rank.kill()
        found, detail = _found(words, asked)
        return found, detail.replace(f"{self.seen}/", "")

    def fill_from(self, other: Place) -> None:
        """Copies another place's root."""
        shutil.copytree(other.root, self.root, symlinks=True)

    def names(self) -> list[str]:
        """What lies in the root, or in the bucket."""
        if self.bucket is not None:
            return self.bucket.names()
        return [path.name for path in self.root.iterdir()] if self.root.is_dir() else []

    def trace(self, rank: Rank, kill_at: int | None = None, spare_helpers: bool = False) -> subprocess.Popen[str]:
        """Watches what a process does to files here. Returns when it does."""
        command = [sys.executable, "-I", tracer.__file__, "--pid", str(rank.pid)]
        command += ["--prefix", str(self.seen), *(("--kill-at", str(kill_at)) if kill_at else ())]
        command += ["--spare-helpers"] if spare_helpers else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline() != "watching\n":
            raise RuntimeError(f"the tracer could not watch process {rank.pid}: ptrace may be forbidden here")
        return process

    def _empty(self) -> None:
        """The root; it may be where something is mounted."""
        self.forget_memory()
        for path in self.root.iterdir() if self.root.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget_memory(self) -> None:
        """What killed jobs left in the memory of this host."""
        shutil.rmtree(elsewhere(self.seen), ignore_errors=True)
        for root_id in self.root_ids:
            for path in Path("/dev/shm").glob(f"ckptlib-{root_id[:16]}*"):
                path.unlink(missing_ok=True)

    def _note_root(self) -> None:
        """Of ckptlib, whose slots in memory are named after it."""
        with suppress(FileNotFoundError):
            name = "ckptlib.json"
            document = (self.root / name).read_bytes() if self.bucket is None else self.bucket.read(name)
            self.root_ids.add(json.loads(document)["body"]["id"])

    def files(self) -> dict[Path, tuple[int, int]]:
        """What is in the root: size and time of each file."""
        found = (path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())
        return {path.relative_to(self.root): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    def printed(self) -> str:
        return "".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.logs.iterdir()))


def _found(words: Sequence[Any], asked: int | None) -> tuple[Found, str]:
    """Of what the ranks said of one load."""
    for rank, word in enumerate(words):
        if word is not None and word[0] in ("error", "died"):
            whose = f"rank {rank}: " if len(words) > 1 else ""
            if word[0] == "error":
                return Found.ERROR, f"{whose}{word[1]}"
            return Found.DIED, f"{whose}ended with {word[1]}"
    if None in words:
        return Found.HANG, ""
    steps = {word[1].step for word in words}
    if steps == {NEVER_SAVED}:
        return Found.NOTHING, ""
    if len(steps) == 1 and None not in steps and asked in (None, *steps):
        return (Found.NEW if steps == {LAST} else Found.BEFORE), ""
    return Found.WRONG, "; ".join(word[1].detail or f"step {word[1].step}" for word in words)
