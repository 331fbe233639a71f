"""The replicator: sends this rank's snapshots to their holders, and keeps those of the ranks it holds.

All ranks begin the same snapshots at the same step, so a holder knows which replica comes next and waits for it with a
time-out; no rank listens without end. What a holder has in its own share of the state, as with data parallelism, it
copies itself, and only the rest is sent. One thread for each direction of each pair of ranks; gloo moves the bytes
without the GIL. What goes wrong is noted and told by the beat: training never waits for a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from ckptlib.jobs import JobThread
from ckptlib.peers.connection import Connection
from ckptlib.peers.incoming import FindAlike, Incoming
from ckptlib.peers.increment_receiver import StepReceiver
from ckptlib.peers.increment_sender import StepSender
from ckptlib.peers.outgoing import Outgoing
from ckptlib.peers.rounds import ReplicaOutcome, Round
from ckptlib.policy.peers import OPTIMIZER, Peers
from ckptlib.slots.placement import ReplicaMap
from ckptlib.slots.slot import Slot
from ckptlib.staging.arena import Arena
from ckptlib.staging.stager import CopyJob, Staging


class Replicator:
    """Sends and receives replicas. One per rank; for the main thread. Its own threads send and receive."""

    def __init__(
        self,
        over: dist.ProcessGroup | None,
        rank: int,
        placement: ReplicaMap,
        peers: Peers,
        make_arena: Callable[[], Arena],
    ) -> None:
        """`over`: the ranks of the placement; connect them before the first snapshot. `make_arena`: for the replicas of
        one rank."""
        self.connection = Connection(over, peers)
        self._copies_alike = not peers.everything
        """Whether this rank copies itself what it has of the replicas that it holds."""
        size, timeout, coded = len(placement.domains), peers.timeout, peers.link == OPTIMIZER
        self._outgoing = {
            to: Outgoing(rank, to, self.connection, timeout, StepSender() if coded else None)
            for to in placement.holders[rank]
        }
        self._incoming = {
            origin: Incoming(origin, size, make_arena(), timeout, StepReceiver() if coded else None)
            for origin in placement.origins(rank)
        }

    def start(self) -> None:
        """Starts the threads. Raises RuntimeError."""
        for thread in self._threads:
            thread.start()

    def local_replicas(self, now: Round, find: FindAlike) -> list[CopyJob]:
        """Returns copies of those shards of incoming replicas that this rank has itself, into their slots."""
        if self.connection.link is None or not self._copies_alike:
            return []
        found = (incoming.local_replica(now, find) for incoming in self._incoming.values())
        return [twin for twin in found if twin is not None]

    def begin(self, now: Round, staging: Staging | None, local_replicas: Sequence[CopyJob]) -> ReplicaOutcome:
        """Replicates this rank's snapshot as soon as it is ready, and receives those that come here.

        `staging`: None if this rank could not begin one. `local_replicas` are filled when it is done.
        """
        twins = {} if staging is None else {twin.header.rank: twin for twin in local_replicas}
        link, outcome = self.connection.link, ReplicaOutcome(len(self._outgoing))
        for outgoing in self._outgoing.values():
            outgoing.send(link, now, staging, outcome)
        for origin, incoming in self._incoming.items():
            if link is not None:
                incoming.receive(link, now, twins.get(origin), staging)
        return outcome

    @property
    def arenas(self) -> list[Arena]:
        return [incoming.arena for incoming in self._incoming.values()]

    @property
    def bases(self) -> list[Slot]:
        """Slots of this rank that serve as bases of what is being sent."""
        found = (outgoing.base for outgoing in self._outgoing.values())
        return [slot for slot in found if slot is not None]

    @property
    def linked(self) -> bool:
        """Whether snapshots are replicated, as far as all ranks have agreed."""
        return self.connection.link is not None or not self._threads

    @property
    def calm(self) -> bool:
        """Whether this rank is ready to connect anew."""
        return self.connection.rested and not any(thread.busy for thread in self._threads)

    @property
    def _threads(self) -> list[JobThread]:
        ways: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        return [way.stream.thread for way in ways]

    def close(self, clean: bool) -> None:
        """Closes the replicator. `clean`: waits for transfers in flight, and removes the replicas.

        If not `clean`, waits for nothing: see `Incoming.let_go`.
        """
        if not clean:
            for incoming in self._incoming.values():
                incoming.let_go()
            for thread in self._threads:
                thread.leave()
            return
        for thread in self._threads:
            thread.finish()  # each job has time-outs
        self.connection.close()
        for arena in self.arenas:
            arena.close(unlink=True)
