"""The writer process: takes orders until its trainer is gone, and finishes what it took.

The main thread listens to the trainer and watches for its death by pidfd (a pipe's end may have been inherited by the
trainer's other children). One thread persists, one commits, one removes old steps, with a local tier one drains; each
takes its jobs in order. No job outlives its deadline: see `watchdog`.

    trainer -> writer    setup, begin, slot, forget, held, whole, expect, persist, drain, commit, void, await, close
    writer -> trainer    ready, begun, not-begun, released, drained, committed, failed, undecided, waiting
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
from ckptlib.errors import CkptError, FormatError, SaveFailed, StoreError, StoreTimeout, describe
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.format.manifest import Generation
from ckptlib.format.part import Part
from ckptlib.jobs import JobThread
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.policy.tier import LocalTier
from ckptlib.slots.slot import Slot
from ckptlib.slots.writer_lock import WriterLock
from ckptlib.stores import open_store
from ckptlib.writer.channel import PROTOCOL, Channel, Message, readable
from ckptlib.writer.generation import GenerationRecord
from ckptlib.writer.persist import Persister, put_failure
from ckptlib.writer.requests import NotedStore, Request, Requests
from ckptlib.writer.rescue import rescue
from ckptlib.writer.tier import Tier
from ckptlib.writer.watchdog import Watchdog, Work, stuck

log = logging.getLogger(__name__)

NICENESS = 10
"""Training comes first wherever both want a core."""

ORPHAN_DEADLINE_S = 60.0
"""How long a committer whose trainer is gone still waits for other ranks."""

RESCUE_AFTER_S = 15.0
"""How long a restart may take before what is in memory only is persisted: less than a killed allocation has left."""

SUCCESSOR_POLL_S = 0.2

RECORD_POLL_S = 0.02

STUCK_STATUS = 3
"""Of a writer that ended since a call hung."""


class WriterProcess:
    """Everything one writer knows. Slots are opened once, when they are first named."""

    def __init__(self, channel: Channel, trainer_pid: int, unread: WriterLock | None = None) -> None:
        """`unread`: the next job on this host waits while it is locked, if the trainer is gone."""
        self._channel = channel
        self._unread = unread
        self._trainer = _pidfd(trainer_pid)
        self._slots: dict[str, Slot] = {}
        self._expected: dict[SaveId, bool] = {}
        """Whether each of them is to go to the store."""
        self._orphan_since: float | None = None
        self._keep_slots_s = 0.0
        self._held: SaveId | None = None
        """The newest snapshot that all ranks hold in memory."""
        self._record: GenerationRecord | None = None
        """Rank 0's to put."""
        self._persists = JobThread("persist")
        self._commits = JobThread("commit")
        self._tier: Tier | None = None
        self._closed_at: float | None = None
        self._sweeps = JobThread("sweep")

    def run(self) -> None:
        """Returns when the trainer has closed the channel, or is gone, and all jobs are done."""
        os.nice(NICENESS)
        threading.excepthook = _die
        closed = self._listen()
        if closed:
            self._closed_at = time.monotonic()
        else:
            self._orphaned()
        self._await_record()
        if self._unread is not None:
            self._unread.release()
        self._persists.finish()
        if not closed:
            for slot in self._slots.values():  # a commit needs none, and may wait for other ranks
                slot.abandon()
        if self._tier is not None:
            self._tier.jobs.finish()
        self._commits.finish()
        self._sweeps.finish()
        if not closed:
            self._await_successor(rescued=self._held is None)

    def _await_record(self) -> None:
        """Without the record of its generation, what the trainer has left in memory or on the local disk counts for
        nothing: the next job waits for it, too."""
        while self._record is not None and not self._record.is_put and time.monotonic() < self._stops_draining():
            if not self._persists.busy and not (self._tier is not None and self._tier.jobs.busy):
                break  # nothing is left that would put it
            time.sleep(RECORD_POLL_S)

    def _await_successor(self, rescued: bool) -> None:
        """The slots are what a restarted job comes back from soonest; it unlinks them when it needs them no more.

        A step that is in memory only is persisted when no such job has come for a while. At last they go.
        """
        slots = list(self._slots.values())
        began = time.monotonic()
        while time.monotonic() - began < self._keep_slots_s and any(slot.path.exists() for slot in slots):
            if not rescued and time.monotonic() - began > min(RESCUE_AFTER_S, self._keep_slots_s / 2):
                rescued = True
                self._rescue(slots)
            time.sleep(SUCCESSOR_POLL_S)
        for slot in slots:
            slot.unlink()

    def _rescue(self, slots: list[Slot]) -> None:
        assert self._held is not None
        try:
            with self._watchdog.work("rescue", self._held, time.monotonic() + self._deadline_s):
                rescue(slots, self._held, self._rank, self._direct, self._committer)
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
        for save, drains in sorted(self._expected.items()):
            self._persists.put(partial(self._fail, save, error, drains))

    def _take(self, message: Message) -> None:
        """Carries out an order, or queues it."""
        op = message["op"]
        if op == "setup":
            self._setup(message)
            return
        if op == "begin":
            self._begin(message)
            return
        if op == "slot":
            self._open_slot(message["path"])
            return
        if op == "forget":
            self._persists.put(partial(self._forget, message["path"]))
            return
        save, drains = parse_save(message["save"]), message.get("drains", True)
        if drains and self._tier is not None and op in ("expect", "persist", "drain"):
            self._tier.expect(save)
        if op == "expect":
            self._expected[save] = drains
        elif op == "held":
            self._held = save
        elif op == "whole":
            if self._tier is not None:
                self._tier.note_whole(save, int(message["settled"]))
        elif op == "void":
            self._expected.pop(save, None)
            self._persists.put(partial(self._fail, save, SaveFailed(message["error"]), drains))
        elif op == "persist":
            self._expected.pop(save, None)
            slot = self._slots.get(message["slot"]) or self._open_slot(message["slot"])
            if slot is not None:
                slot.read_lock()  # from now on, so that a successor sees that there is work to do
            self._persists.put(partial(self._persist, save, message["slot"], drains))
        elif op == "drain":
            assert self._tier is not None
            self._tier.jobs.put(partial(self._drain, self._tier, save))
        elif op == "commit":
            self._commits.put(partial(self._commit, save, message["began"]))
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
        if message.get("protocol") != PROTOCOL:  # a long job, a package upgraded meanwhile, and a writer that died
            raise SystemExit("the trainer runs another version of ckptlib: restart the job")
        self._rank = int(message["rank"])
        self._world_size = int(message["world_size"])
        self._deadline_s = float(message["deadline_s"])
        self._keep_slots_s = float(message["keep_slots_s"])
        self._keep = None if message["keep"] is None else Keep.from_json(message["keep"])
        requests = Requests()
        self._watchdog = Watchdog(requests, self._deadline_s, self._tell_waiting, self._give_up)
        with self._watchdog.work("opening the store", None, time.monotonic() + self._deadline_s):
            store = open_store(message["url"], message["options"])
            store.trust_address()  # the trainer has probed it
            self._store = NotedStore(store, requests)
        self._catalog, self._swept = Catalog(self._store), Catalog(self._store)
        self._committer = Committer(self._catalog)
        make = partial(
            Persister,
            executor=ThreadPoolExecutor(1, "ckptlib-digest"),
            rank=self._rank,
            world_size=self._world_size,
            refresh_s=float(message["refresh_s"]),
            rules=CodecRules.from_json(message["codec"]),
        )
        self._persister = self._direct = make(self._store)
        if message.get("local") is not None:
            self._tier = tier = Tier(LocalTier.from_json(message["local"]), self._store, self._rank)
            self._persister = make(tier.disk, drained=tier.parents)
            tier.open(self._deadline_s, self._persister.note_upload)
            tier.gives_up_at = self._stops_draining
            tier.watched = lambda save: self._watchdog.work("drain", save, time.monotonic() + self._deadline_s)
        self._channel.send({"event": "ready"})

    def _begin(self, message: Message) -> None:
        """The generation enters history with its first save: rank 0's writer puts its record before that."""
        record = Generation.decode(message["record"].encode(), "the trainer's order")
        self._go_on_from(record.resumed_from)
        if self._rank == 0:
            self._record = GenerationRecord(record, message["root"], int(message["step"]), message["continues"])
            self._record.is_put = message["is_put"]
            if message["now"]:
                (self._persists if self._tier is None else self._tier.jobs).put(self._put_record_now)

    def _go_on_from(self, save: SaveId | None) -> None:
        if save is not None:
            self._persister.go_on_from(save)

    def _put_record_now(self) -> None:
        """Since what is in memory, or on local disks, is of no use before it is there."""
        try:
            with self._watchdog.work("begin", None, time.monotonic() + self._deadline_s):
                self._put_record()
        except (CkptError, OSError) as error:
            self._channel.send({"event": "not-begun", "error": describe(error)})

    def _put_record(self) -> None:
        """By whichever thread uses the store for what is saved."""
        if self._record is None or self._record.is_put:
            return
        warning = self._record.put(self._catalog)
        self._go_on_from(self._record.record.resumed_from)
        self._channel.send({"event": "begun", "warning": warning})

    def _persist(self, save: SaveId, path: str, drains: bool) -> None:
        began = time.monotonic()
        try:
            with self._watchdog.work("persist", save, began + self._deadline_s):
                part = self._persist_slot(save, path, drains, began + self._deadline_s)
        except (CkptError, OSError, ValueError) as error:
            self._fail(save, error, drains)
            self._channel.send({"event": "released", "save": str(save), "slot": path, "error": describe(error)})
            return
        nbytes = part.nbytes_put
        seconds = time.monotonic() - began
        total = part.table.nbytes_data
        log.info("step %d: %d bytes persisted in %.3f s, for a share of %d bytes", save.step, nbytes, seconds, total)
        told = {"save": str(save), "slot": path, "error": None, "seconds": seconds, "nbytes": nbytes, "began": began}
        if self._tier is not None:
            told["drains"] = drains
        self._channel.send({"event": "released", **told})
        if self._tier is not None:
            if drains:
                self._tier.jobs.put(partial(self._drain, self._tier, save))
        elif self._rank == 0:
            self._commits.put(partial(self._commit, save, began))

    def _persist_slot(self, save: SaveId, path: str, drains: bool, deadline: float) -> Part:
        slot = self._slots.get(path)
        if slot is None:
            raise FormatError(f"{path}: the slot of step {save.step} is gone")
        try:
            if self._tier is None:
                self._put_record()
                return self._persister.persist(slot, save, deadline)
            self._tier.make_room(save)
            there = self._tier.persisted(slot, save)
            return there or self._persister.persist(slot, save, deadline, may_be_parent=drains)
        finally:
            slot.unlock()

    def _drain(self, tier: Tier, save: SaveId) -> None:
        try:
            tier.drain(save, self._put_record)
        except (CkptError, OSError, ValueError) as error:
            tier.settle(save)
            self._give_up_save(save, error)
            return
        self._channel.send({"event": "drained", "save": str(save)})
        if self._rank == 0:
            self._commits.put(partial(self._commit, save, time.monotonic()))
        else:
            tier.settle(save)

    def _stops_draining(self) -> float:
        """While the trainer lives, never."""
        if self._orphan_since is not None:
            return self._orphan_since + ORPHAN_DEADLINE_S
        return float("inf") if self._closed_at is None else self._closed_at + self._deadline_s

    def _forget(self, path: str) -> None:
        slot = self._slots.pop(path, None)
        if slot is not None:
            slot.close()

    def _fail(self, save: SaveId, error: BaseException, drains: bool = True) -> None:
        """From the thread that persists: this rank's part will not come.

        With a local tier that thread does not wait for the store, and nobody waits for what is not drained.
        """
        if self._tier is None:
            self._give_up_save(save, error)
            return
        self._tier.settle(save)
        if drains:
            self._tier.jobs.put(partial(self._publish_in_time, save, describe(error)))
        self._report_failure(save, error)

    def _give_up_save(self, save: SaveId, error: BaseException) -> None:
        """Publishes that this rank's part will not come, or its commit, so that nobody waits for it."""
        self._publish_in_time(save, describe(error))
        self._report_failure(save, error)

    def _publish_in_time(self, save: SaveId, error: str) -> None:
        """That may hang as well: it goes on in a thread of its own, and what comes next does not wait for it."""
        log.error("step %d: %s", save.step, error)
        publishing = threading.Thread(target=self._publish, args=(save, error), daemon=True)
        publishing.start()
        publishing.join(self._watchdog.slack_s)

    def _publish(self, save: SaveId, error: str) -> None:
        try:
            put_failure(self._store, save, self._rank, error)
        except (CkptError, OSError) as second:
            log.error("step %d: the failure could not be published: %s", save.step, describe(second))

    def _report_failure(self, save: SaveId, error: BaseException) -> None:
        self._channel.send(
            {"event": "failed", "save": str(save), "kind": type(error).__name__, "error": describe(error)}
        )

    def _commit(self, save: SaveId, began: float) -> None:
        left, usual_s = partial(self._seconds_left, began), time.monotonic() - began
        commit = partial(self._committer.commit_when_whole, save, self._world_size, left, usual_s)
        try:
            with self._watchdog.work("commit", save, max(began + self._deadline_s, time.monotonic())):
                manifest = commit() if self._tier is None else self._tier.commit(save, commit, left)
        except (CkptError, OSError) as error:
            self._give_up_save(save, error)  # its own part is there, but the others wait for the step
            return
        finally:
            if self._tier is not None:
                self._tier.settle(save)
        seconds = time.monotonic() - began
        log.info("step %d is committed: %d bytes in %.3f s", save.step, manifest.nbytes, seconds)
        self._channel.send({"event": "committed", "save": str(save), "seconds": seconds, "nbytes": manifest.nbytes})
        if self._tier is not None:
            self._tier.look_again()
        if self._keep is not None and self._orphan_since is None:
            self._sweeps.put(partial(self._sweep, self._keep, save))

    def _seconds_left(self, began: float) -> float:
        """Until a save is given up; sooner when the trainer is gone, since other ranks may be, too."""
        deadline = began + self._deadline_s
        if self._orphan_since is not None:
            deadline = min(deadline, max(began, self._orphan_since) + ORPHAN_DEADLINE_S)
        return deadline - time.monotonic()

    def _sweep(self, keep: Keep, save: SaveId) -> None:
        """Removes old steps, by a catalog of its own: no commit waits for it."""
        try:
            with self._watchdog.work("sweep", None, time.monotonic() + self._deadline_s, minor=True):
                sweep(self._swept, keep, save.generation)
        except (CkptError, OSError) as error:
            log.warning("old steps could not be removed: %s", describe(error))

    def _await(self, save: SaveId, timeout_s: float) -> None:
        """Tells the trainer of a rank that does not commit what became of a save."""
        deadline, pause = time.monotonic() + timeout_s, 0.01
        try:
            with self._watchdog.work("await", save, deadline + self._deadline_s, minor=True):
                while not self._is_decided(save):
                    if time.monotonic() > deadline:  # for whoever asked; the save goes on
                        self._channel.send({"event": "undecided", "save": str(save)})
                        return
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.5)
        except (CkptError, OSError) as error:
            self._report_failure(save, error)
            return
        self._channel.send({"event": "committed", "save": str(save), "seconds": 0.0, "nbytes": 0})

    def _is_decided(self, save: SaveId) -> bool:
        """Whether it is committed. Raises SaveFailed when it never will be."""
        try:
            if self._catalog.is_committed(save):
                return True
            raise_if_failed(self._catalog, save)
        except StoreError:
            if self._tier is None:  # else it is drained when the store is back
                raise
        return False

    # What the store does not answer; from the watchdog's thread

    def _tell_waiting(self, work: Work | None, request: Request | None) -> None:
        save = None if work is None or work.save is None else str(work.save)
        at, since = (None, None) if request is None else (str(request), request.since)
        self._channel.send({"event": "waiting", "save": save, "request": at, "since": since})

    def _give_up(self, work: Work, request: Request | None) -> None:
        """A call that hangs cannot be cancelled, so the process ends; the trainer starts another for what is left."""
        error = stuck(work, request)
        log.error("%s", error)
        if self._orphan_since is not None:
            self._await_successor(rescued=True)
        elif work.what == "drain":
            pass  # it is on the local disk, and the next writer tries again
        elif work.what == "await":
            self._channel.send({"event": "undecided", "save": str(work.save), "replace": True})
        elif work.save is not None:
            failure = {"save": str(work.save), "kind": StoreTimeout.__name__, "error": error}
            self._channel.send({"event": "failed", **failure, "replace": True})
        elif work.what == "begin":
            self._channel.send({"event": "not-begun", "error": error, "replace": True})
        os._exit(STUCK_STATUS)


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
