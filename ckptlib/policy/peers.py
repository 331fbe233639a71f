"""What a user asks of the memory of a job's hosts, and what it protects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from ckptlib.policy.overhead import Overhead
from ckptlib.policy.when import Policy, policy_of
from ckptlib.policy.whole import check_whole

HOST, DEVICE = "host", "device"
RAW, OPTIMIZER = "raw", "optimizer"


@dataclass(frozen=True, slots=True)
class Peers:
    """Snapshots in memory every few steps, and replicas of them in the memory of other hosts.

    copies:   replicas of each rank's snapshot, each in another failure domain than the others and the rank itself. 0:
              none; a snapshot then survives its trainer, but not its host.
    every:    steps from one snapshot to the next; or a budget of its own, `Overhead(at_most=0.01)`: as often as that
              allows. What is saved to the store is a snapshot, too.
    domain:   the failure domain of this rank: what is lost at one time. "host": this machine; else a name, such as
              that of its rack.
    timeout:  after which a peer that does not take or give a few megabytes counts as gone.
    everything: whether replicas are sent whole, even what their holder has in its own share of the state: without, it
              copies that itself, and it is checked against the digests of the rank whose snapshot it is.
    memory:   "host", or "device": snapshots of tensors on GPUs are copied in the GPU's own memory first, if that has
              room for a second copy beside the peak of the training, and to the host from there. Then the next
              optimizer.step() waits for a copy at the speed of that memory, not of the link to the host: for
              iterations that are shorter than the latter.
    link:     "raw", or "optimizer": what an optimizer wrote since the snapshot before travels as what that and the new
              gradients do not tell, about a quarter of the bytes, without loss. Encoding and decoding take the time of
              a core each, at 0.5 to 1 GB/s of state: for links that are slower. Needs every=1.
    keep_for: how long, after the trainers of a host died, its snapshots wait for a job that goes on from them.
    """

    copies: int = 1
    every: int | Overhead = 1
    domain: str = HOST
    timeout: timedelta = timedelta(seconds=60)
    everything: bool = False
    memory: str = HOST
    link: str = RAW
    keep_for: timedelta = timedelta(minutes=15)

    def __post_init__(self) -> None:
        check_whole(f"Peers(copies={self.copies!r})", self.copies)
        if self.copies < 0:
            raise ValueError(f"Peers needs copies >= 0, got {self.copies}")
        if not isinstance(self.every, Overhead) and (isinstance(self.every, bool) or not isinstance(self.every, int)):
            raise TypeError(
                f"Peers(every={self.every!r}): expected a number of steps, or a budget such as Overhead(at_most=0.01)"
            )
        if isinstance(self.every, int) and self.every < 1:
            raise ValueError(f"Peers needs every >= 1, got {self.every}")
        if not isinstance(self.domain, str):
            raise TypeError(
                f"Peers(domain={self.domain!r}): expected a text, which ranks that may be lost together have in common"
            )
        if self.memory not in (HOST, DEVICE):
            raise ValueError(
                f"memory is {HOST!r} or {DEVICE!r}, got {self.memory!r}; for a directory of slots there is arena="
            )
        if self.link not in (RAW, OPTIMIZER):
            raise ValueError(f"link is {RAW!r} or {OPTIMIZER!r}, got {self.link!r}")
        if self.link == OPTIMIZER and self.every != 1:
            raise ValueError(
                f"link={OPTIMIZER!r} needs every=1, got every={self.every}: only from one step to the next does a "
                "snapshot tell most of the other"
            )

    @property
    def policy(self) -> Policy:
        """When a snapshot is due."""
        return policy_of(self.every)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the memory of the job's hosts protects, as all ranks last agreed."""

    step: int | None
    """The newest snapshot that every rank holds, with all its replicas; None: there is none yet."""
    lag: int
    """Steps from it, or where there is none from the one that the training began at, to the one that the training is
    at: what would be lost with as many domains."""
    num_losses: int
    """As many failure domains may be lost, whichever they are, and `step` still comes back from memory."""
    linked: bool
    """Whether new snapshots get replicas; not while a peer cannot be reached."""
    sent: int
    """Bytes of this rank's newest snapshot that were sent for its replicas; their holders had the rest."""
    coded: int = 0
    """Bytes of it that travelled as increments, before they were coded: with `link="optimizer"`."""
    uncoded: Mapping[str, int] = field(default_factory=dict)
    """Bytes of it that did not, by the reason, with `link="optimizer"`; also what their holders had."""
