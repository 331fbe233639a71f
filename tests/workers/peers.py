"""Trainings that keep snapshots in the memory of several hosts, and faults in the midst of them.

A host is a directory of slots, and a failure domain, of its own. `train` is started by `crash_jobs.start`, or by
torchrun: peers.py <directory> <arguments of train as JSON>; it tells what it does in JSON lines. Each step of training
waits until the snapshot of the one before has come to its end, so what a kill finds does not depend on timing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.inside import is_settled, poll, session_of, snapshots_of
from helpers.rights import give_up_rights
from workers.crash_jobs import Teller
from workers.peer_trainings import training_of
from workers.traps import CHUNK_BYTES, mark_sealed, on_chunk, set_trap, wrap

import ckptlib
from ckptlib import Peers
from ckptlib.peers import connection, increments, parameters
from ckptlib.ranks import link
from ckptlib.recovery import memory_source
from ckptlib.saving import snapshots

WAIT_S = 150.0
TIMEOUT = timedelta(seconds=60)


def train(
    tell: Teller,
    rank: int,
    *,
    url: str,
    hosts: Sequence[str],
    arenas: dict[str, str],
    total: int,
    kind: str = "fsdp",
    own_data: bool = True,
    copies: int = 1,
    everything: bool = False,
    every: int = 10**6,
    pauses: Sequence[int] = (),
    gates: str = "",
    traps: Sequence[dict[str, Any]] = (),
    pause_when_held: int | None = None,
    load_step: int | None = None,
    back_to: int | str | Sequence[int] | None = None,
    timeout_s: float = 60.0,
    settle: bool = True,
    drags: Sequence[float] = (),
    link_codec: str = "raw",
    rights: bool = True,
) -> None:
    """Restores, trains up to `total`, and tells the digest.

    hosts:           by rank. arenas: by host.
    every:           to the store; the last step goes there, too.
    pauses:          steps behind which it waits for a word; see `_pause`.
    pause_when_held: it waits as soon as all ranks hold this step, or a later one.
    traps:           see `_set_traps`.
    back_to:         the restore goes back to this step; a list: by rank.
    load_step:       loaded from the store, instead of a restore.
    settle:          whether a step waits until the snapshot of the one before has come to its end.
    drags:           by rank, seconds that each message of a body takes longer.
    link_codec:      see `Peers.link`.
    rights:          whether root may do what the modes of files forbid.
    """
    if not rights:
        give_up_rights()
    link.CHUNK_BYTES = CHUNK_BYTES
    connection.FIRST_BACKOFF_S = 0.2
    parameters.MIN_ELEMENTS, increments.STRETCH = 256, 1500
    snapshots.RECLAIM_EVERY_S = 0.0
    logging.getLogger("ckptlib").setLevel(logging.INFO)
    training = training_of(kind, rank, own_data)
    received = _watch_recoveries()
    if load_step is not None:
        ckptlib.load(url, training.state, step=load_step, random=True)
    host = hosts[rank]
    peers = Peers(
        copies=copies, everything=everything, domain=host, timeout=timedelta(seconds=timeout_s), link=link_codec
    )
    with ckptlib.Checkpointer(
        url, training.state, every=every, peers=peers, arena=arenas.get(host), timeout=TIMEOUT
    ) as ckpt:
        mark_sealed(rank, gates)
        for trap in traps:
            if trap["rank"] == rank:
                set_trap(Path(gates), len(hosts), **trap)
        if drags:
            wrap(link.Link, "_begin_send", before=on_chunk(lambda: time.sleep(drags[rank])))
        tell("made", pid=os.getpid(), generation=str(session_of(ckpt).generation))
        start = load_step
        if start is None:
            report = ckpt.restore(step=back_to[rank] if isinstance(back_to, list) else back_to)
            start = report.step
            tell(
                "restored",
                step=report.step,
                in_memory=report.in_memory,
                received=sum(received),
                save=str(report.save),
                skipped=report.skipped,
            )
        for step in ckpt.loop(start, total):
            if settle:
                _await_settled(ckpt)
            held = snapshots_of(ckpt)
            assert held.coverage is not None
            tell(
                "step",
                step=step,
                held=held.own.newest,
                held_by_all=held.held_by_all,
                sent=held.coverage.sent,
                coded=held.coverage.coded,
                uncoded=dict(held.coverage.uncoded),
            )
            again = pause_when_held is not None and held.held_by_all >= pause_when_held
            if step in pauses or again:
                if _pause(tell, ckpt, rank, step, gates) == "drift":
                    training.drift()
                pause_when_held = None if again else pause_when_held
            training.body(step)
        tell("done", step=total, digest=training.digest())
    dist.barrier()


def _watch_recoveries() -> list[int]:
    """How many slots of other hosts were read here, for each snapshot that was tried."""
    found: list[int] = []
    close = memory_source.InMemory.close

    def watched(self: memory_source.InMemory, together: bool) -> None:
        found.append(self.num_received)
        close(self, together)

    memory_source.InMemory.close = watched  # type: ignore[method-assign]
    return found


def _await_settled(ckpt: ckptlib.Checkpointer) -> None:
    """Returns when the snapshots that were begun, and what is made of them, have come to their ends on this rank.

    So that there is a slot at every step, whatever the writer is busy with.
    """
    deadline = time.monotonic() + WAIT_S
    while not is_settled(ckpt, persisted=True):
        poll(ckpt, 0.002)
        assert time.monotonic() < deadline, "a snapshot does not come to its end"


# What a test may say at a pause


def _pause(tell: Teller, ckpt: ckptlib.Checkpointer, rank: int, step: int, gates: str) -> str | None:
    """Waits for the file of this step: words by rank, for those who are to do something before they go on."""
    held = snapshots_of(ckpt)
    tell("paused", step=step, held=held.own.newest, held_by_all=held.held_by_all)
    path = Path(gates) / str(step)
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        poll(ckpt, 0.002)
        assert time.monotonic() < deadline, "nobody said what to do"
    word: str | None = json.loads(path.read_text()).get(str(rank))
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "cut":
        _cut(ckpt)
    elif word == "raise":
        raise KeyError("the trainer's own trouble")
    else:
        assert word in (None, "drift"), word
    return word


def _cut(ckpt: ckptlib.Checkpointer) -> None:
    """Ends every connection of the link, as a network does that goes away."""
    for fd in _sockets_of_last_link:
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with connection:
            connection.shutdown(socket.SHUT_RDWR)


_sockets_of_last_link: list[int] = []

_connect = link.connect


def _connect_and_note(*args: Any) -> Any:
    before = _connected()
    made = _connect(*args)
    _sockets_of_last_link[:] = sorted(_connected() - before)
    return made


link.connect = _connect_and_note


def _connected() -> set[int]:
    """Sockets that have a peer on the network."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    found.add(fd)
        except OSError:
            continue
    return found


def main() -> None:
    """A rank that torchrun has started."""
    directory, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    logging.basicConfig()
    store, _, size = next(iter(dist.rendezvous("env://")))
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":  # else it is a new one each time, with nothing in it
        store = dist.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    train(Teller(str(directory / f"attempt{attempt}.rank{rank}.jsonl")), rank, **arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
