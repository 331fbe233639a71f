"""The writer process: takes orders until its trainer is gone, and finishes them.

The main thread listens to the trainer and watches for its death. One thread persists, one commits, one removes old
steps, with a local tier one drains; each takes its jobs in order. No job outlives its deadline: see `watchdog`.

    trainer -> writer    setup, begin, slot, forget, held, earlier, whole, expect, persist, drain, commit, stop-waiting,
                         void, await, close
    writer -> trainer    ready, begun, not-begun, persists, released, drained, committed, swept, failed, undecided,
                         waiting, warned
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CkptError, FormatError, SaveFailed, StoreError, StoreFull, StoreTimeout, describe
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.jobs import JobThread
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.policy.tier import LocalTier
from ckptlib.slots.slot import Slot
from ckptlib.slots.writer_lock import WriterLock
from ckptlib.stores import open_store
from ckptlib.writer import late_numpy
from ckptlib.writer.account import StartAccount
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.beginning import Beginning
from ckptlib.writer.channel import PROTOCOL, Channel, Message
from ckptlib.writer.commits import Commits
from ckptlib.writer.failures import Failures
from ckptlib.writer.known_origin import KnownOrigin
from ckptlib.writer.open_slots import OpenSlots
from ckptlib.writer.own_shares import OwnShares
from ckptlib.writer.persist import Persister
from ckptlib.writer.requests import NotedStore, Request, Requests
from ckptlib.writer.rescue import left_of, rescue
from ckptlib.writer.tier import Tier
from ckptlib.writer.told_warnings import ALREADY_TOLD, ToldWarnings
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog, Work, stuck

log = logging.getLogger(__name__)

RECORD_POLL_S = 0.02

STUCK_STATUS = 3
"""Exit status of a writer that ended since a call hung."""


class WriterProcess:
    """One per process: hands each order to the thread that carries it out."""

    def __init__(self, channel: Channel, trainer_pid: int, unread: WriterLock | None = None) -> None:
        """`unread`: while it is locked, the next job on this host waits, if the trainer is gone."""
        self._channel = channel
        self._unread = unread
        self._trainer = Trainer(trainer_pid)
        self._slots = OpenSlots()
        self._expected: dict[SaveId, bool] = {}
        """Whether each expected save is to go to the store."""
        self._held: SaveId | None = None
        """The newest snapshot that all ranks hold in memory."""
        self._account: StartAccount | None = None
        """The account of this start; on rank 0 only."""
        self._persists = JobThread("persist")
        self._tier: Tier | None = None
        self._is_set_up = False

    def run(self) -> None:
        """Returns when the trainer has closed the channel, or is gone, and all jobs are done."""
        threading.excepthook = _die
        ToldWarnings.begin(self._channel)
        closed = self._listen()
        if self._is_set_up:  # else its trainer died before it could order anything
            self._finish(closed)
        elif self._unread is not None:
            self._unread.release()

    def _finish(self, closed: bool) -> None:
        """Finishes all jobs. `closed`: whether the trainer said that no more orders will come; if not, it is gone."""
        if self._account is not None:
            self._account.end()
        if closed:
            self._trainer.close()
        else:
            self._orphaned()
        self._await_record()
        if self._unread is not None:
            self._unread.release()
        self._persists.finish()
        if not closed:
            self._slots.abandon()  # a commit needs none, and may wait for other ranks
        if self._tier is not None:
            self._tier.jobs.finish()
        self._commits.finish()
        if closed:  # else a deletion that hangs would hold up the rescue
            self._commits.finish_sweeps()
        if self._account is not None:
            self._account.finish()
        if self._is_left:
            self._trainer.leave()  # if it died in `close`: what has failed may be finished by others from here on
            self._slots.abandon()
            self._slots.await_successor(None if self._held is None else self._rescue)
        self._commits.finish_sweeps()

    @property
    def _is_left(self) -> bool:
        """Whether the trainer went before it had unlinked the slots, which it does when it has closed."""
        if self._trainer.closed:  # so nobody else receives
            self._channel.receive(timeout_s=0)
        return self._trainer.gone or (self._trainer.closed and (self._channel.closed or self._trainer.dead))

    def _listen(self) -> bool:
        """Takes orders until there will be no more; returns whether the trainer said so itself."""
        while True:
            self._trainer.wait(self._channel.fileno())
            gone = self._trainer.dead  # asked before reading, so that its last words are read
            for message in self._channel.receive(timeout_s=0):
                if message["op"] == "close":
                    return True
                self._take(message)
            if gone or self._channel.closed:
                return False

    def _orphaned(self) -> None:
        """Gives up snapshots that the trainer, which is gone, has not finished: they will not come."""
        self._trainer.leave()
        error = SaveFailed("the trainer died before its snapshot was whole")
        for save, drains in sorted(self._expected.items()):
            self._persists.put(partial(self._shares.fail, save, error, drains))

    def _await_record(self) -> None:
        """Waits while the record of the generation is being put: without it, snapshots that the trainer has left in
        memory or on the local disk count for nothing. The next job waits for the record, too."""
        while self._beginning.owes_record:
            putting = self._persists.busy or (self._tier is not None and self._tier.jobs.busy)
            if not putting or time.monotonic() > self._trainer.stops_draining():
                break
            time.sleep(RECORD_POLL_S)

    def _rescue(self, slots: list[Slot]) -> None:
        """Persists what is in memory only. Raises StoreError if the store fails, which may pass; not if it is full."""
        assert self._held is not None
        if self._beginning.owes_record:
            told = "step %d stays in memory only: the record of its generation is not in the store"
            log.warning(told, self._held.step)
            return
        save, deadline = left_of(slots, self._held), time.monotonic() + self._trainer.deadline_s
        try:
            with self._watchdog.work("rescue", save, deadline):
                rescue(slots, save, self._rank, self._direct, self._commits.committer, deadline)
        except (CkptError, OSError, ValueError) as error:
            if isinstance(error, StoreError) and not isinstance(error, StoreFull):
                raise
            log.warning("step %d stays in memory only: %s", save.step, describe(error))

    def _take(self, message: Message) -> None:
        """Carries out an order, or queues it."""
        op = message["op"]
        if op == "setup":
            self._setup(message)
            return
        if op == "slot":
            self._slots.open(message["path"])
            return
        late_numpy.load()  # all other orders come with the first snapshot, while that is copied
        if op == "begin":
            self._begin(message)
        elif op == "forget":
            self._persists.put(partial(self._slots.forget, message["path"]))
        elif op == "earlier":
            if self._tier is not None:
                self._tier.note_earlier(None if message["save"] is None else parse_save(message["save"]))
        else:
            self._take_of_save(op, parse_save(message["save"]), message)

    def _begin(self, message: Message) -> None:
        order = BeginOrder.from_message(message)
        begun = self._beginning.begin(order, message.get("known"), self._rank)
        if self._tier is not None:
            self._tier.begun = begun
        elif order.is_new and not order.again:
            self._persister.begin_anew()
        if order.now and self._rank == 0:
            (self._persists if self._tier is None else self._tier.jobs).put(self._beginning.put_now)

    def _take_of_save(self, op: str, save: SaveId, message: Message) -> None:
        drains = message.get("drains", True)
        if drains and op in ("expect", "persist", "drain"):
            if self._rank == 0:
                self._commits.expect(save)
            if self._tier is not None:
                self._tier.expect(save)
                if op == "expect" and self._rank and not self._tier.jobs.busy:  # the save does not wait for it
                    self._tier.jobs.put(partial(self._tier.look_before, save))
        if op == "expect":
            self._expected[save] = drains
        elif op == "held":
            self._held = save
        elif op == "whole":
            if self._tier is not None:
                self._tier.note_whole(save, int(message["settled"]), bool(message["recorded"]))
        elif op == "void":
            self._expected.pop(save, None)
            self._persists.put(partial(self._shares.fail, save, SaveFailed(message["error"]), drains))
        elif op == "persist":
            self._expected.pop(save, None)
            self._slots.take(message["slot"])
            how = drains, message.get("layout", True), message.get("again", False)
            self._persists.put(partial(self._shares.persist, save, message["slot"], *how))
        elif op == "drain":
            assert self._tier is not None
            self._tier.jobs.put(partial(self._shares.drain, save, time.monotonic(), again=message.get("again", False)))
        elif op == "commit":
            self._commits.put(save, message["began"], message.get("again", False))
        elif op == "await":
            self._commits.put_wait(save, message["timeout_s"])
        elif op == "stop-waiting":
            self._commits.stop_waiting(save, message["rank"], message["why"])
        else:
            raise FormatError(f"unknown order: {op}")

    def _setup(self, message: Message) -> None:
        if message.get("protocol") != PROTOCOL:  # the package was upgraded while the job ran, and its writer died
            raise SystemExit("the trainer runs another version of ckptlib: restart the job")
        self._rank = int(message["rank"])
        world_size = int(message["world_size"])
        self._trainer.deadline_s = deadline_s = float(message["deadline_s"])
        self._slots.keep_s = float(message["keep_slots_s"])
        keep = None if message["keep"] is None else Keep.from_json(message["keep"])
        requests = Requests()
        self._watchdog = Watchdog(requests, deadline_s, self._tell_waiting, self._give_up)
        with self._watchdog.work("opening the store", None, time.monotonic() + deadline_s):
            store = open_store(message["url"], message["options"])
            store.trust_address()  # the trainer has probed it
            noted = NotedStore(store, requests)
        self._catalog = catalog = Catalog(noted)
        catalog.shared.opened_id = message["root"]
        if (page := message.get("account_fd")) is not None:
            self._account = StartAccount(int(page), message["generation"], catalog.shared, self._trainer.dead)
        make = partial(
            Persister,
            executor=ThreadPoolExecutor(1, "ckptlib-digest"),
            rank=self._rank,
            world_size=world_size,
            refresh_s=float(message["refresh_s"]),
            rules=CodecRules.from_json(message["codec"]),
            pack_nbytes=message.get("pack_nbytes"),
        )
        self._persister = self._direct = make(noted, shared=catalog.shared)
        if message.get("local") is not None:
            self._tier = tier = Tier(LocalTier.from_json(message["local"]), noted, self._rank, message["root"])
            self._persister = make(tier.disk, drained=tier.parents)
            tier.open(deadline_s, self._persister.note_upload)
            tier.gives_up_at = self._trainer.stops_draining
            tier.watched = lambda save: self._watchdog.work("drain", save, time.monotonic() + deadline_s)
        failures = Failures(self._channel, catalog.shared, self._rank, self._watchdog.slack_s, self._trainer)
        told = self._channel, self._trainer, self._watchdog, failures
        self._commits = Commits(*told, catalog, world_size, keep if self._rank == 0 else None, self._tier)
        self._beginning = Beginning(*told[:3], catalog, self._go_on_from)
        self._shares = OwnShares(
            *told, catalog, self._rank, self._slots, self._beginning, self._persister, self._tier, self._commits
        )
        self._is_set_up = True
        self._channel.send({"event": "ready"})

    def _go_on_from(self, save: SaveId, known: KnownOrigin | None) -> None:
        self._persister.go_on_from(save, known)
        manifest = None if known is None else known.decoded_manifest()
        if manifest is not None:
            self._catalog.keep_stand(manifest)
        if self._account is not None:
            self._account.continues(save, manifest, known is not None and known.accounted)

    # For requests that the store does not answer; called by the watchdog's thread

    def _tell_waiting(self, work: Work | None, request: Request | None) -> None:
        save = None if work is None or work.save is None else str(work.save)
        at, since = (None, None) if request is None else (str(request), request.since)
        self._channel.send({"event": "waiting", "save": save, "request": at, "since": since})

    def _give_up(self, work: Work, request: Request | None) -> None:
        """Ends the process, since a call that hangs cannot be cancelled; the trainer starts another for the rest."""
        error = stuck(work, request)
        log.error("%s", error, extra=ALREADY_TOLD)
        if self._is_left:
            self._slots.await_successor(None)
        elif work.what == "drain":  # it is on the local disk, and the next writer tries again, however often
            self._channel.send({"event": "waiting", "save": None, "request": None, "since": None, "replace": True})
        elif work.what == "await":
            self._channel.send({"event": "undecided", "save": str(work.save), "replace": True})
        elif work.save is not None:
            failure: Message = {"save": str(work.save), "kind": StoreTimeout.__name__, "error": error}
            if work.what == "commit" or self._shares.parts.may_have_put(work.save):  # nobody knows yet how it ended
                failure["in_doubt"] = True
            self._channel.send({"event": "failed", **failure, "replace": True})
        elif work.what == "begin":
            self._channel.send({"event": "not-begun", "error": error, "replace": True})
        os._exit(STUCK_STATUS)


def _die(failure: threading.ExceptHookArgs) -> None:
    """Ends the process on a bug in one thread: the trainer sees that, and starts another."""
    threading.__excepthook__(failure)
    os._exit(1)
