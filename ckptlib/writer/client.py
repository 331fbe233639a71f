"""The trainer's end of its writer: starts it, sends orders, receives events, and restarts it when it dies. No torch."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from pathlib import Path

from ckptlib.errors import SaveFailed, StoreTimeout, WaitTimeout
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.slots.writer_lock import WriterLock
from ckptlib.writer import logfile
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.channel import Message
from ckptlib.writer.child import Child
from ckptlib.writer.known_origin import KnownOrigin, Lent, lend
from ckptlib.writer.launch import no_start
from ckptlib.writer.orders import SAVES, OpenOrders
from ckptlib.writer.standing import Standing
from ckptlib.writer.told_warnings import log_told

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths in a row, without a save in between: then something is wrong that another start will not mend."""

RESTART_S = 3.0
"""How long after a failed start the next try is made, if nobody orders anything."""

UNTOLD_S = 4 * RESTART_S
"""How long `close` tries to start a writer whose only work is to tell other ranks of failures."""

SWEEPS_S = 5.0
"""How long a hurried `close` waits for the removal of old steps: launchers soon kill what they told to stop."""


class Writer:
    """One writer process; for the main thread. Any thread may call `add_slot`, `tell_expected`, `persist` and
    `void`."""

    def __init__(self, setup: Message, unread: WriterLock | None = None, wait_s: float = 0.0) -> None:
        """`setup`: the first order; it may hold secrets, so it goes over the socket.

        `unread`: a lock that tells the next job, should this process die, that the writer has yet to read its orders.
        Closed here.

        `wait_s`: how long the process delays its imports at most, which take 0.1 s of a core or more. `wake` ends that.
        """
        self._setup = setup
        self._unread = unread
        rank, has_local = int(setup["rank"]), setup.get("local") is not None
        self._standing = Standing(rank, has_local)
        self._open = OpenOrders(rank, has_local)
        self._heard: deque[Message] = deque()
        self._noted: list[Message] = []
        """`_heard`: events that the writer has sent. `_noted`: those of them that `poll` has yet to return."""
        self._lent: Lent | None = None
        """What is known of the step that the job restored, lent to the first writer. Closed once a save is put."""
        self.waiting: Message | None = None
        """The wait that the writer reported: the request, the save, and since when."""
        self._deaths = 0
        self._sweeps = 0
        """Number of removals of old steps that the writer is to make, or makes."""
        self.hurries = False
        """Whether the training waits, or the job must end: `close` hardly waits for the removal of old steps then."""
        self._stuck = False
        """Whether the writer hangs, and must be killed."""
        self._unstarted = False
        """Whether no writer could be started."""
        self._start_at = 0.0
        """When the start is tried again, by `time.monotonic`; the next order tries at once."""
        self.left = False
        """Whether the writer was left to itself: it finishes alone, or has finished, and is not replaced."""
        self._lock = threading.Lock()
        try:
            self.log_path = logfile.new_path(rank)
            self._start(wait_s)
        except BaseException as error:
            if unread is not None:
                unread.unlink()
                unread.close()
            if isinstance(error, OSError):
                raise SaveFailed(no_start(error)) from error
            raise
        if unread is not None:  # dropped without `close`, this object leaves the writer to itself
            weakref.finalize(self, unread.close).atexit = False

    def _start(self, wait_s: float = 0.0) -> None:
        """Starts a writer. Raises OSError; the one before, which is closed, stays then."""
        if not self.log_path.parent.is_dir():  # temporary directories are cleaned while a long job runs
            self.log_path = logfile.new_path(int(self._setup["rank"]))
        self._child = Child(self._setup, self.log_path, self._unread, wait_s)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wake(self) -> None:
        """Makes the writer begin now, if it waits. Any thread may call it. A death of this process wakes it, too."""
        self._child.wake()

    def add_slot(self, path: Path) -> None:
        """Makes the writer open this slot now, so that the slot outlives the trainer, and goes after it."""
        self.wake()
        with self._lock:
            self._child.channel.send(self._standing.slot(path))

    def held(self, save: SaveId) -> None:
        """Tells the writer that all ranks hold this snapshot in memory: if no job goes on from it, it must not be
        lost."""
        self._keep({"op": "held", "save": str(save)})

    def earlier(self, save: SaveId | None) -> None:
        """Tells the writer which of the earlier jobs' steps on the local disks a restart needs, or that it needs none.
        The others may be removed if there is no room."""
        self._keep({"op": "earlier", "save": None if save is None else str(save)})

    def whole(self, save: SaveId, settled: int, recorded: bool) -> None:
        """Tells the writer that all ranks have this save on their local disks: older steps may be removed there, and
        later ones up to `settled`. `recorded`: whether the store has the generation's record; if not, steps of earlier
        jobs stay."""
        self._keep({"op": "whole", "save": str(save), "settled": settled, "recorded": recorded})

    def _keep(self, order: Message) -> None:
        self._child.channel.send(self._standing.keep(order))

    def begin(self, order: BeginOrder, known: KnownOrigin | None = None) -> None:
        """Tells the writer that the generation begins. `known`: what is known of the step that the job restored. A
        replacement for a dead writer is not told it, and looks for what that writer has put."""
        with self._lock:
            told = None
            if known is not None and (lent := lend(known)) is not None:  # else what was lent before stays
                self._lent, told = lent, lent.path
            self._child.channel.send({**self._standing.begin(order), "known": told})

    def expect(self, save: SaveId, drains: bool = True) -> None:
        """Notes that a snapshot is being staged; `tell_expected` tells the writer.

        `drains`, here and below: with a local tier, whether the save goes to the store, too.
        """
        with self._lock:
            self._open.add({"op": "expect", "save": str(save), "drains": drains})

    def tell_expected(self, save: SaveId) -> None:
        """Tells the writer to expect the part of this save: if the trainer dies from now on, the writer knows that the
        part will not come.

        Apart from `expect`, since it wakes the writer, which may take the core from the training for 0.3 ms.
        """
        with self._lock:
            if (order := self._open.expected(save)) is not None:
                self._child.channel.send(order)

    def persist(self, save: SaveId, slot: Path, drains: bool = True, puts_layout: bool = True) -> None:
        """Orders the ready snapshot in `slot` to be put; answered by `released`. `puts_layout`: see `Persister`."""
        order = {"op": "persist", "save": str(save), "slot": str(slot), "drains": drains, "layout": puts_layout}
        self._order(order)

    def drain(self, save: SaveId) -> None:
        """Orders that a save which was to stay on the local disk, and is there, be copied to the store after all."""
        self._order({"op": "drain", "save": str(save), "drains": True})

    def void(self, save: SaveId, error: str, drains: bool = True) -> None:
        """Orders the writer to tell the other ranks' committer that the snapshot failed."""
        self._order({"op": "void", "save": str(save), "error": error, "drains": drains})

    def stop_waiting(self, save: str, rank: int, why: str) -> None:
        """Tells rank 0's writer that a rank gave up its share of this save: if that is not in the store, nobody waits
        for it any longer."""
        with self._lock:
            self._child.channel.send({"op": "stop-waiting", "save": save, "rank": rank, "why": why})

    @property
    def commits_next(self) -> str | None:
        """The oldest save that rank 0's writer waits to commit, or drains before that."""
        with self._lock:
            orders = self._open.of("commit", "drain")
        return orders[0]["save"] if orders else None

    @property
    def num_undrained(self) -> int:
        """Number of saves to be drained that are not committed or, on other ranks than 0, not drained yet."""
        with self._lock:
            return self._open.num_undrained

    @property
    def finishes(self) -> bool:
        """Whether it commits a save, or removes old steps: that costs the training as well, if no core is idle."""
        with self._lock:
            return self._sweeps > 0 or bool(self._open.of("commit"))

    @property
    def expected(self) -> set[str]:
        """Saves whose snapshots are being taken, or were being taken when that was interrupted."""
        with self._lock:
            return {order["save"] for order in self._open.of("expect")}

    @property
    def awaited(self) -> set[str]:
        """Saves that a restart on this host can go on from once this writer has finished them."""
        with self._lock:
            return {order["save"] for order in self._open.of("persist", "commit")}

    def watch(self, save: SaveId, timeout_s: float) -> None:
        """Asks for the outcome of another rank's commit; the answer is `committed`, `failed` or `undecided`."""
        self._order({"op": "await", "save": str(save), "timeout_s": timeout_s})

    def _order(self, message: Message) -> None:
        with self._lock:
            self._start_at = 0.0
            self._open.add(message)
            self._child.channel.send(message)

    def wait(self, timeout_s: float) -> None:
        """Returns when `poll` has something to return, or this time has passed. Any thread may call it."""
        self._child.channel.wait(timeout_s)

    def poll(self, timeout_s: float = 0.0) -> list[Message]:
        """Returns the writer's events since the last call; waits up to `timeout_s` for the first.

        A writer that died is started again as soon as there is something to do: orders that it did not carry out,
        snapshots to keep for a successor, or a record to put at once. A start that fails is tried again. If writers
        keep dying, each order is answered by a failure instead, and each question by `undecided`. A writer that gave up
        a save since the store did not answer is replaced, and its successor publishes the failure. So is one that does
        not run. One that was left is not.
        """
        self._heard += self._child.channel.receive(timeout_s)
        with self._lock:
            self._heard += self._give_up(bool(self._heard))
            self._note_heard()
            needed = (self._standing.is_kept or self._standing.owes_record) and self._deaths + 1 < MAX_DEATHS
            stuck = not self._unstarted and (self._stuck or self._child.channel.stalled)
            lacks = not self.left and (stuck or (self._child.channel.closed and (self._open or needed)))
            if lacks and time.monotonic() >= self._start_at:
                self._noted += self._revive()
        if self._child.channel.closed:  # without another end, `receive` did not wait
            time.sleep(timeout_s)
        events, self._noted = self._noted, []
        return events

    def _note_heard(self) -> None:
        while self._heard:  # each stays until it is noted: a call after Ctrl-C finds the rest
            event = self._heard[0]
            if event["event"] == "persists":  # of a writer that hangs, too: its successor must know
                self._open.begin(event["save"])
            elif not self._stuck:  # what a writer did after it gave up is done again
                self._note(event)
                self._noted.append(event)
            self._heard.popleft()

    def _give_up(self, heard: bool) -> list[Message]:
        """Gives up the oldest save in place of a writer that does not run, and returns the failure; none if it runs."""
        orders = self._open.of(*SAVES)
        seconds = self._child.silence.lasts(bool(orders) and not self._child.channel.closed, heard, time.monotonic())
        if seconds is None:
            return []
        error = (
            f"the writer process (pid {self.pid}) has said nothing for {seconds:.0f} s, longer than a save may take: "
            f"it was stopped, hangs in the kernel, or gets no core; another one takes its place. See {self.log_path}"
        )
        self._open.begin(orders[0]["save"])  # as the writer may still do before it is killed
        return [{**self._open.failure(orders[0], error), "kind": StoreTimeout.__name__, "replace": True}]

    def _note(self, event: Message) -> None:
        kind = event["event"]
        if kind == "warned":
            log_told(event, self._setup["rank"])
            return
        if event.get("replace"):
            self._stuck = True
        if kind == "waiting":
            self.waiting = None if event["request"] is None else event
        self._standing.note(event)
        if kind in ("ready", "begun", "not-begun", "waiting"):
            return
        if kind == "swept":
            self._sweeps -= 1
            return
        self._sweeps += event.get("sweeps", 0)
        if kind != "undecided":  # which does not prove that the writer can do more than look
            self._deaths = 0
            self._take_back()
        self._open.note(event)

    def _revive(self) -> list[Message]:
        self.wake()
        if self._unstarted:
            pass  # there is no writer that could have died
        elif self._stuck or self._child.channel.stalled:
            log.warning("the writer process (pid %d) hangs, or was stopped; starting another one", self.pid)
            self._child.reap(kill=True)
            self._heard += self._child.channel.receive(timeout_s=0)
            self._note_heard()
        else:
            self._deaths += 1
            code = self._child.reap()
            log.warning("the writer process died (exit %s, log %s); starting it again", code, self.log_path)
        self._stuck, self.waiting, self._sweeps = False, None, 0
        self._child.channel.close()
        try:
            self._start()
        except OSError as refusal:
            return self._wait_for_another(no_start(refusal))
        self._unstarted, self._start_at = False, 0.0
        dropped, answers = list[Message](), list[Message]()
        error = f"the writer process died {self._deaths} times in a row; see {self.log_path}"
        if self._deaths >= MAX_DEATHS:
            dropped = self._open.of("persist", "drain", "void")
            answers, self._deaths = self._open.drop_all(error), 0
        for message in self._standing.again():
            self._child.channel.send(message)
        for order in self._open.again():
            self._child.channel.send(order)
        for order in dropped:  # so that no other rank waits for the part
            self._child.channel.send({"op": "void", "save": order["save"], "error": error})
        return answers

    def _wait_for_another(self, error: str) -> list[Message]:
        """Notes that no writer could be started. What is persisted waits for the next one, which tells the other ranks
        of what is not. Returns the answers."""
        if not self._unstarted:
            log.warning("%s; tried again every %.0f s", error, RESTART_S)
        self._unstarted, self._start_at, self._deaths = True, time.monotonic() + RESTART_S, 0
        return self._open.void_persists(error)

    def forget_slot(self, path: Path) -> None:
        """Tells the writer that the slot is gone: its memory is given back when the writer has closed it, too."""
        with self._lock:
            self._child.channel.send(self._standing.forget(path))

    def leave(self) -> None:
        """Leaves the writer at once: it finishes alone, as when its trainer dies, and unlinks the slots."""
        self.wake()
        with self._lock:  # a listening thread would take the end of the channel for a death
            self._child.channel.close()
            self._let_go()

    @property
    def _patience_s(self) -> float:
        """How long `close` waits: as long as it may, unless no writer can be started and there is no save to commit or
        drain."""
        owed = self._open.of("commit", "drain")
        return math.inf if owed or not self._unstarted else UNTOLD_S

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.close()
            self._lent = None

    def _let_go(self) -> None:
        """Counts the writer as left to itself from here on."""
        self.left = True
        self._take_back()
        if self._unread is not None:
            self._unread.close()

    def close(self, timeout_s: float, waited_s: float = 0.0) -> list[Message]:
        """Lets the writer finish its orders; returns its events, as `poll` does. `waited_s`: how much of `timeout_s`
        has passed.

        An expected snapshot that is not there by now never will be: whoever was to take it was interrupted.

        Raises WaitTimeout if the writer does not end in time; it then goes on alone. If it has only old steps to
        remove, that is no error: they may stay until the next sweep. After an error, `poll` returns the events.
        """
        self.wake()
        for order in self._open.of("expect"):
            self.void(parse_save(order["save"]), "its rank was interrupted as its snapshot began", order["drains"])
        began = time.monotonic()
        deadline = began + timeout_s - waited_s
        while self._open and time.monotonic() < min(deadline, began + self._patience_s):
            self._noted = self.poll(0.05)  # from a replacement, if this one gives up an order; Ctrl-C loses none
        self._child.channel.send({"op": "close"})
        sweeps_until = min(deadline, time.monotonic() + (SWEEPS_S if self.hurries else math.inf))
        while not self._child.channel.closed:
            if self._sweeps > 0 and not self._open and time.monotonic() > sweeps_until:
                log.warning("the writer (pid %d) still removes old steps, and goes on with that alone", self.pid)
                self.leave()
                return self.poll()
            if time.monotonic() > deadline:
                self._let_go()
                raise WaitTimeout(
                    f"the writer (pid {self.pid}) did not finish within {timeout_s:.0f} s; it goes on alone"
                )
            self._heard += self._child.channel.receive(timeout_s=0.05)
            self._note_heard()
        error = f"the writer process died (exit {self._child.reap()}) while it was waited for; see {self.log_path}"
        self._child.channel.close()
        self._let_go()
        if self._unread is not None:
            self._unread.unlink()  # in case the writer could not
        self._noted += self._open.drop_all(error)
        return self.poll()
