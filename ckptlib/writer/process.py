"""The writer process: takes orders until its trainer is gone, and finishes what it took.

The main thread listens to the trainer and watches for its death by pidfd (a pipe's end may have been inherited by the
trainer's other children). One thread persists, one commits; each takes its jobs in order.

    trainer -> writer    setup, slot, forget, held, expect, persist, commit, void, await, close
    writer -> trainer    ready, released, committed, failed, undecided
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer, raise_if_failed
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CkptError, FormatError, SaveFailed, describe
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.format.part import Part
from ckptlib.jobs import JobThread
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.slots.slot import Slot
from ckptlib.stores import open_store
from ckptlib.writer.channel import Channel, Message, readable
from ckptlib.writer.persist import Persister, put_failure
from ckptlib.writer.rescue import rescue

log = logging.getLogger(__name__)

NICENESS = 10
"""Training comes first wherever both want a core."""

ORPHAN_DEADLINE_S = 60.0
"""How long a committer whose trainer is gone still waits for other ranks."""

RESCUE_AFTER_S = 15.0
"""How long a restart may take before what is in memory only is persisted: less than a killed allocation has left."""

SUCCESSOR_POLL_S = 0.2


class WriterProcess:
    """Everything one writer knows. Slots are opened once, when they are first named."""

    def __init__(self, channel: Channel, trainer_pid: int) -> None:
        self._channel = channel
        self._trainer = _pidfd(trainer_pid)
        self._slots: dict[str, Slot] = {}
        self._expected: set[SaveId] = set()
        self._orphan_since: float | None = None
        self._keep_slots_s = 0.0
        self._held: SaveId | None = None
        """The newest snapshot that all ranks hold in memory."""
        self._persists = JobThread("persist")
        self._commits = JobThread("commit")

    def run(self) -> None:
        """Returns when the trainer has closed the channel, or is gone, and all jobs are done."""
        os.nice(NICENESS)
        threading.excepthook = _die
        closed = self._listen()
        if not closed:
            self._orphaned()
        self._persists.finish()
        if not closed:
            for slot in self._slots.values():  # a commit needs none, and may wait for other ranks
                slot.abandon()
        self._commits.finish()
        if not closed:
            self._await_successor()
            for slot in self._slots.values():
                slot.unlink()

    def _await_successor(self) -> None:
        """The slots are what a restarted job comes back from soonest; it unlinks them when it needs them no more.

        A step that is in memory only is persisted when no such job has come for a while.
        """
        slots = list(self._slots.values())
        began = time.monotonic()
        rescued = self._held is None
        while time.monotonic() - began < self._keep_slots_s and any(slot.path.exists() for slot in slots):
            if not rescued and time.monotonic() - began > min(RESCUE_AFTER_S, self._keep_slots_s / 2):
                rescued = True
                self._rescue(slots)
            time.sleep(SUCCESSOR_POLL_S)

    def _rescue(self, slots: list[Slot]) -> None:
        assert self._held is not None
        try:
            rescue(slots, self._held, self._rank, self._persister, self._committer)
        except (CkptError, OSError, ValueError) as error:
            log.warning("step %d stays in memory only: %s", self._held.step, describe(error))

    def _listen(self) -> bool:
        """Takes orders until there will be no more; returns whether the trainer said so itself."""
        while True:
            if self._trainer is not None:
                readable(self._channel.fileno(), self._trainer, timeout_s=None)
            gone = _dead(self._trainer)  # asked before reading, so that its last words are read
            for message in self._channel.receive(timeout_s=0):
                if message["op"] == "close":
                    return True
                self._take(message)
            if gone or self._channel.closed:
                return False

    def _orphaned(self) -> None:
        """The trainer is gone: what it has not finished will not come."""
        self._orphan_since = time.monotonic()
        error = SaveFailed("the trainer died before its snapshot was whole")
        for save in sorted(self._expected):
            self._persists.put(partial(self._fail, save, error))

    def _take(self, message: Message) -> None:
        """Carries out an order, or queues it."""
        op = message["op"]
        if op == "setup":
            self._setup(message)
            return
        if op == "slot":
            self._open_slot(message["path"])
            return
        if op == "forget":
            self._persists.put(partial(self._forget, message["path"]))
            return
        save = parse_save(message["save"])
        if op == "expect":
            self._expected.add(save)
        elif op == "held":
            self._held = save
        elif op == "void":
            self._expected.discard(save)
            self._persists.put(partial(self._fail, save, SaveFailed(message["error"])))
        elif op == "persist":
            self._expected.discard(save)
            slot = self._slots.get(message["slot"]) or self._open_slot(message["slot"])
            if slot is not None:
                slot.read_lock()  # from now on, so that a successor sees that there is work to do
            self._persists.put(partial(self._persist, save, message["slot"]))
        elif op == "commit":
            self._commits.put(partial(self._commit, save, time.monotonic()))
        elif op == "await":
            self._commits.put(partial(self._await, save, message["timeout_s"]))
        else:
            raise FormatError(f"unknown order: {op}")

    def _open_slot(self, path: str) -> Slot | None:
        """None where it is gone: the trainer made a larger one while this process was still starting."""
        try:
            slot = self._slots[path] = Slot.open(Path(path))
        except FormatError as error:
            log.info("%s", error)
            return None
        return slot

    def _setup(self, message: Message) -> None:
        if "codec" not in message:  # a long job, a package that was upgraded meanwhile, and a writer that died
            raise SystemExit("the trainer runs an older ckptlib, which writes another format: restart the job")
        self._rank = int(message["rank"])
        self._world_size = int(message["world_size"])
        self._deadline_s = float(message["deadline_s"])
        self._keep_slots_s = float(message["keep_slots_s"])
        self._keep = None if message["keep"] is None else Keep.from_json(message["keep"])
        self._store = open_store(message["url"], message["options"])
        self._catalog = Catalog(self._store)
        self._committer = Committer(self._catalog)
        self._persister = Persister(
            self._store,
            ThreadPoolExecutor(1, "ckptlib-digest"),
            self._rank,
            self._world_size,
            float(message["refresh_s"]),
            CodecRules.from_json(message["codec"]),
        )
        self._channel.send({"event": "ready"})

    def _persist(self, save: SaveId, path: str) -> None:
        began = time.monotonic()
        try:
            part = self._persist_slot(save, path)
        except (CkptError, OSError, ValueError) as error:
            self._fail(save, error)
            self._channel.send({"event": "released", "save": str(save), "slot": path, "error": describe(error)})
            return
        nbytes = part.nbytes_put
        seconds = time.monotonic() - began
        total = part.table.nbytes_data
        log.info("step %d: %d bytes persisted in %.3f s, for a share of %d bytes", save.step, nbytes, seconds, total)
        self._channel.send(
            {"event": "released", "save": str(save), "slot": path, "error": None, "seconds": seconds, "nbytes": nbytes}
        )
        if self._rank == 0:
            self._commits.put(partial(self._commit, save, began))

    def _persist_slot(self, save: SaveId, path: str) -> Part:
        slot = self._slots.get(path)
        if slot is None:
            raise FormatError(f"{path}: the slot of step {save.step} is gone")
        try:
            return self._persister.persist(slot, save)
        finally:
            slot.unlock()

    def _forget(self, path: str) -> None:
        slot = self._slots.pop(path, None)
        if slot is not None:
            slot.close()

    def _fail(self, save: SaveId, error: BaseException) -> None:
        """Publishes that this rank's part will not come, or its commit, so that nobody waits for it."""
        log.error("step %d: %s", save.step, describe(error))
        try:
            put_failure(self._store, save, self._rank, describe(error))
        except (CkptError, OSError) as second:
            log.error("step %d: the failure could not be published: %s", save.step, describe(second))
        self._report_failure(save, error)

    def _report_failure(self, save: SaveId, error: BaseException) -> None:
        self._channel.send(
            {"event": "failed", "save": str(save), "kind": type(error).__name__, "error": describe(error)}
        )

    def _commit(self, save: SaveId, began: float) -> None:
        try:
            manifest = self._committer.commit_when_whole(
                save, self._world_size, lambda: self._seconds_left(began), usual_s=time.monotonic() - began
            )
        except (CkptError, OSError) as error:
            self._fail(save, error)  # its own part is there, but the others wait for the step
            return
        seconds = time.monotonic() - began
        log.info("step %d is committed: %d bytes in %.3f s", save.step, manifest.nbytes, seconds)
        self._channel.send({"event": "committed", "save": str(save), "seconds": seconds, "nbytes": manifest.nbytes})
        self._retain(save)

    def _seconds_left(self, began: float) -> float:
        """Until a save is given up; sooner when the trainer is gone, since other ranks may be, too."""
        deadline = began + self._deadline_s
        if self._orphan_since is not None:
            deadline = min(deadline, max(began, self._orphan_since) + ORPHAN_DEADLINE_S)
        return deadline - time.monotonic()

    def _retain(self, save: SaveId) -> None:
        if self._keep is None or self._orphan_since is not None:
            return
        try:
            sweep(self._catalog, self._keep, save.generation)
        except (CkptError, OSError) as error:
            log.warning("old steps could not be removed: %s", describe(error))

    def _await(self, save: SaveId, timeout_s: float) -> None:
        """Tells the trainer of a rank that does not commit what became of a save."""
        deadline, pause = time.monotonic() + timeout_s, 0.01
        try:
            while not self._catalog.is_committed(save):
                raise_if_failed(self._catalog, save)
                if time.monotonic() > deadline:  # for whoever asked; the save goes on
                    self._channel.send({"event": "undecided", "save": str(save)})
                    return
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
        except (CkptError, OSError) as error:
            self._report_failure(save, error)
            return
        self._channel.send({"event": "committed", "save": str(save), "seconds": 0.0, "nbytes": 0})


def _die(failure: threading.ExceptHookArgs) -> None:
    """A bug in one thread ends the process: the trainer sees that, and starts another."""
    threading.__excepthook__(failure)
    os._exit(1)


def _pidfd(pid: int) -> int | None:
    """Of the trainer; None when it died while this process was starting. What it had ordered is still to be done."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if os.getppid() != pid:
        os.close(fd)
        return None
    return fd


def _dead(pidfd: int | None) -> bool:
    return pidfd is None or readable(pidfd, timeout_s=0)
