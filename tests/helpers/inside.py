"""What lies inside a Checkpointer, by the words that tests use for it. Only this file knows its private members."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ckptlib
from ckptlib.checkpoint import SaveOrder, save_step
from ckptlib.saving import standing
from ckptlib.saving.session import Session
from ckptlib.saving.snapshots import Snapshots
from ckptlib.staging.arena import Arena
from ckptlib.staging.fence import Fence
from ckptlib.staging.stager import Stager
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.client import Writer


def session_of(ckpt: ckptlib.Checkpointer) -> Session:
    return ckpt._session


def snapshots_of(ckpt: ckptlib.Checkpointer) -> Snapshots:
    """Of this rank, in its host's memory."""
    return session_of(ckpt).snapshots


def arena_of(ckpt: ckptlib.Checkpointer) -> Arena:
    return snapshots_of(ckpt).arena


def writer_of(ckpt: ckptlib.Checkpointer) -> Writer:
    return session_of(ckpt).writer


def stager_of(ckpt: ckptlib.Checkpointer) -> Stager:
    return session_of(ckpt).stager


def fence_of(ckpt: ckptlib.Checkpointer) -> Fence:
    return ckpt._fence


def num_saves(ckpt: ckptlib.Checkpointer) -> int:
    """How many were begun, snapshots in memory included."""
    return session_of(ckpt)._num_saves


def num_failures(ckpt: ckptlib.Checkpointer) -> int:
    """How many saves in a row failed, up to now."""
    return session_of(ckpt).outcomes.run.count


def num_wanted(ckpt: ckptlib.Checkpointer) -> int:
    """How many saves there are whose outcome this rank asks for, though nobody waits for it."""
    return len(session_of(ckpt).outcomes._wanted)


def has_said(ckpt: ckptlib.Checkpointer, event: str) -> bool:
    """Whether the writer has said so, and this process has not heard it yet."""
    with suppress(BlockingIOError):
        heard = writer_of(ckpt)._child.channel._socket.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return f'"{event}"'.encode() in heard
    return False


def is_asking(pending: ckptlib.Pending) -> bool:
    """Whether this rank has asked its writer for the outcome of a save, and has no answer yet."""
    return pending._outcome.watches > 0


def lose_notices(ckpt: ckptlib.Checkpointer) -> None:
    """As where the store of the ranks is gone with its host."""
    session_of(ckpt).news._notices._lose(RuntimeError("as planned"))


def poll(ckpt: ckptlib.Checkpointer, seconds: float = 0.005) -> None:
    """Takes in what the writer and the staging thread have said, and waits so long for more."""
    session_of(ckpt).outcomes.poll(seconds)


def settle(ckpt: ckptlib.Checkpointer, timeout_s: float, persisted: bool = False) -> None:
    """Until every snapshot that was begun has come to its end, or the time is up. `persisted`: and is in the store.

    With peers also until the record of the generation is there, without which no snapshot counts as held.
    """
    deadline = time.monotonic() + timeout_s
    while not is_settled(ckpt, persisted) and time.monotonic() < deadline:
        poll(ckpt)


def is_settled(ckpt: ckptlib.Checkpointer, persisted: bool) -> bool:
    """See `settle`."""
    snapshots, lineage = snapshots_of(ckpt), session_of(ckpt).lineage
    unrecorded = lineage.placement is not None and lineage.began and not lineage.recorded
    return not (snapshots.settling or unrecorded or (persisted and snapshots.persisting))


def await_room(ckpt: ckptlib.Checkpointer) -> None:
    """Until there is a slot for the next snapshot."""
    standing.await_room(session_of(ckpt))


def save_now(ckpt: ckptlib.Checkpointer, state: Mapping[str, object], step: int) -> ckptlib.Pending:
    """A save of this very step, whether it is due or not."""
    await_room(ckpt)
    pending = save_step(session_of(ckpt), SaveOrder(state, step))
    pending.staging.go()
    return pending


def owe_a_save(ckpt: ckptlib.Checkpointer) -> None:
    """As if one had been due at the last step."""
    ckpt._due.owe(to_store=True)


def forget_last_save(ckpt: ckptlib.Checkpointer) -> None:
    """So that nobody waits for it, and it may have failed, or not have been taken."""
    ckpt._attempts.last = None
    ckpt._attempts._missed = None


def refuse_slots(ckpt: ckptlib.Checkpointer, take_slot: Callable[[int], Any]) -> None:
    """`take_slot` is called in place of the one that takes a slot; it raises."""
    snapshots_of(ckpt).take_slot = take_slot  # type: ignore[method-assign, assignment]


def has_spare_memory(ckpt: ckptlib.Checkpointer) -> bool:
    """Whether any device keeps a copy of the state in memory of its own."""
    return any(spares._spares for spares in stager_of(ckpt)._devices._spares.values())


def objects_of(store: MemoryStore) -> dict[str, Any]:
    """What it keeps, by key; to be changed as no caller of a store can."""
    return store._objects
