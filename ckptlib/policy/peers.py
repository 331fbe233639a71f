"""The user's settings for the memory of a job's hosts, and what it protects."""

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
    """Snapshots in memory every few steps, and replicas of them in the memory of other hosts. Give all ranks the same
    `copies` and `link`.

    copies:   replicas of each rank's snapshot, each in another failure domain than the others and the rank itself. 0:
              none; a snapshot then survives its trainer, but not its host.
    every:    steps from one snapshot to the next; or a budget of its own, `Overhead(at_most=0.01)`: as often as that
              allows. A save to the store is a snapshot, too.
    domain:   the failure domain of this rank, which is lost at one time. "host": this machine; else a name, such as
              that of its rack.
    timeout:  a peer that does not take or give a few megabytes in this time counts as gone.
    everything: True sends replicas whole. Otherwise their holder copies from its own share what both ranks have alike,
              and checks it by the digests of the rank whose snapshot it is.
    memory:   "device" copies tensors on a GPU within the GPU's memory first, and from there to the host, if that memory
              has room for a second copy beside the training's peak. The next optimizer.step() then waits for a copy at
              the speed of that memory, not of the link to the host. Use it if iterations are shorter than a copy over
              that link. "host" copies to the host at once.
    link:     "optimizer" sends of what an optimizer wrote only what the snapshot before and the new gradients do not
              tell: about a quarter of the bytes, without loss. It needs every=1. Encoding and decoding take a core
              each, at 0.5 to 1 GB/s of state, so use it on slower links. "raw" sends the bytes.
    keep_for: how long the snapshots of a host whose trainers died wait for a job that goes on from them.
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
        for name, example in (("timeout", "seconds=60"), ("keep_for", "minutes=15")):
            if not isinstance(value := getattr(self, name), timedelta):
                raise TypeError(f"Peers({name}={value!r}): expected timedelta, such as timedelta({example})")
        if self.timeout <= timedelta():
            raise ValueError(f"Peers(timeout={self.timeout!r}): expected a time above 0, such as timedelta(seconds=60)")
        if self.keep_for < timedelta():
            raise ValueError(f"Peers(keep_for={self.keep_for!r}): expected a time, or timedelta(0)")
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
        """The policy that says when a snapshot is due."""
        return policy_of(self.every)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the memory of the job's hosts protects, as all ranks last agreed."""

    step: int | None
    """The newest snapshot that every rank holds, with all its replicas; None: there is none yet."""
    lag: int
    """Steps done since `step`, or if that is None since the training began: what a loss of `num_losses` domains
    costs."""
    num_losses: int
    """If any this many failure domains are lost, `step` still comes back from memory."""
    linked: bool
    """Whether new snapshots get replicas; not while a peer cannot be reached."""
    sent: int
    """Bytes of this rank's newest snapshot that were sent for its replicas; their holders had the rest."""
    coded: int = 0
    """Bytes of it that travelled as increments, before they were coded: with `link="optimizer"`."""
    uncoded: Mapping[str, int] = field(default_factory=dict)
    """Bytes of it that did not travel as increments, by the reason, with `link="optimizer"`; also those that their
    holders had."""
