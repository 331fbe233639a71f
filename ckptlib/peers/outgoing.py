"""The replicas that go from this rank to one holder of its snapshots."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from ckptlib.errors import CkptError, WaitTimeout
from ckptlib.peers.connection import Connection
from ckptlib.peers.increment_sender import StepSender
from ckptlib.peers.rounds import ReplicaOutcome, Round
from ckptlib.peers.stream import Stream
from ckptlib.peers.transfer import send_slot, withdraw
from ckptlib.ranks.link import Link
from ckptlib.slots.slot import Slot
from ckptlib.staging.stager import Staging


class Outgoing:
    """The way of one rank's snapshots to one holder."""

    def __init__(
        self, rank: int, to: int, connection: Connection, timeout: timedelta, steps: StepSender | None
    ) -> None:
        """`steps`: if increments may be sent."""
        self.stream = Stream(f"to-{to}", f"replicas on rank {to}")
        self._rank, self._to = rank, to
        self._connection = connection
        self._timeout = timeout
        self._steps = steps

    @property
    def base(self) -> Slot | None:
        """The slot that serves as the base of what is being sent. For the main thread."""
        return self._steps.base if self._steps is not None and self.stream.thread.busy else None

    def send(self, link: Link | None, now: Round, staging: Staging | None, outcome: ReplicaOutcome) -> None:
        """Sends a snapshot as soon as it is ready, and notes the outcome. `staging`: None if there is none."""
        if link is None:
            outcome.note(sealed=False)
        else:
            self.stream.put(link, self._send, now, staging, outcome)

    def _send(self, link: Link, now: Round, staging: Staging | None, outcome: ReplicaOutcome) -> None:
        to, step, sealed, sent, steps = self._to, now.save.step, False, 0, self._steps
        try:
            if staging is not None:
                with suppress(WaitTimeout):  # then its holders are told, or they would take the next one for it
                    staging.wait_done(self._timeout.total_seconds())
            if staging is None or not staging.done or staging.error is not None:
                withdraw(link, to, self._rank, f"there is no snapshot of step {step}")
            else:
                if steps is not None:
                    steps.begin(now.may_go)
                try:
                    header = staging.slot.read_header()
                except CkptError as error:
                    withdraw(link, to, self._rank, str(error))
                    raise
                sent = send_slot(link, to, staging.slot, header, steps)
                sealed = True
                self._connection.prove()
                self.stream.tell(step, None)
        except CkptError as error:
            self.stream.tell(step, error)
        finally:
            outcome.note(sealed, sent, steps)
