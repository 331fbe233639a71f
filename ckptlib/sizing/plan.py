"""The plan of a run's checkpoints: the question, and what follows from it. Pure; bytes and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ckptlib.sizing.activations import Transformer
from ckptlib.sizing.intervals import by_budget, ettr, young
from ckptlib.sizing.parameters import PerParameter
from ckptlib.sizing.storage import DOLLARS_PER_PUT, Storage, num_requests, storage

SLOTS = 2
SLOTS_WITH_PEERS = 3
"""Slots in memory for each rank whose snapshots a rank keeps: itself, and those that it has replicas of."""
USUAL_INTERVAL_S = 1800.0
"""The interval if the mean time between failures is not known."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The state to be saved."""

    nbytes: float
    """Bytes of one checkpoint."""
    num_ranks: int
    params: float | None = None
    each: PerParameter | None = None
    nbytes_changed: float | None = None
    """Mean bytes that a save after the first writes, if that was measured."""

    @property
    def rank_nbytes(self) -> float:
        return self.nbytes / self.num_ranks

    @property
    def training_nbytes(self) -> float | None:
        """Bytes of one rank in training, without activations."""
        if self.params is None or self.each is None:
            return None
        return self.params * self.each.in_training / self.num_ranks


@dataclass(frozen=True, slots=True)
class Question:
    """The run and its machines; None where a fact is not known."""

    ranks_per_host: int
    copies: int
    """Replicas in the memory of other hosts."""
    every: float | None
    period: float
    keep: int
    at_most: float
    mtbf: float | None
    restart: float
    bandwidth: float | None
    """Bytes per second that the store takes from all ranks together."""
    host_memory: float | None
    device_memory: float | None
    model: Transformer | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that follows from a question."""

    subject: Subject
    question: Question
    stall_s: float
    """Seconds that training waits for a save."""
    persist_s: float | None
    """Seconds from then until the save is in the store."""

    @property
    def num_slots(self) -> int:
        """The slots of one rank, each for a snapshot in its host's memory."""
        return SLOTS_WITH_PEERS * (1 + self.question.copies) if self.question.copies else SLOTS

    @property
    def host_nbytes(self) -> float:
        """Bytes of all slots on a host."""
        return self.num_slots * self.subject.rank_nbytes * min(self.question.ranks_per_host, self.subject.num_ranks)

    @property
    def fits_host(self) -> bool | None:
        room = self.question.host_memory
        return None if room is None else self.host_nbytes <= room

    @property
    def device_spare_nbytes(self) -> float | None:
        """Bytes left on a rank's device beside weights, gradients, optimizer state and activations; may be negative."""
        room, trained, model = self.question.device_memory, self.subject.training_nbytes, self.question.model
        if room is None or trained is None:
            return None
        return room - trained - (0.0 if model is None else model.activations_without_scores)

    @property
    def fits_device(self) -> bool | None:
        spare = self.device_spare_nbytes
        return None if spare is None else self.subject.rank_nbytes <= spare

    @property
    def intervals(self) -> dict[str, float]:
        """The intervals by reason: `budget`, and, if they are known, `persist` and `young`."""
        mtbf, found = self.question.mtbf, {"budget": by_budget(self.stall_s, self.question.at_most)}
        if self.persist_s is not None:
            found["persist"] = self.persist_s
        if mtbf is not None:
            found["young"] = young(self.stall_s, mtbf)
        return found

    @property
    def interval(self) -> float:
        """The interval: as asked for; else the best one for the failures, but within the budget, and never shorter than
        a save takes."""
        found = self.intervals
        return self.question.every or max(
            found["budget"], found.get("persist", 0.0), found.get("young", USUAL_INTERVAL_S)
        )

    @property
    def ettr(self) -> float | None:
        mtbf, restart = self.question.mtbf, self.question.restart
        return None if mtbf is None else ettr(self.interval, self.stall_s, self.persist_s or 0.0, restart, mtbf)

    @property
    def storage(self) -> Storage:
        subject, asked = self.subject, self.question
        return storage(subject.nbytes, self.interval, asked.period, asked.keep, subject.nbytes_changed)

    @property
    def num_requests(self) -> int:
        """The most requests of one checkpoint."""
        return num_requests(self.subject.nbytes, self.subject.num_ranks)

    @property
    def dollars(self) -> float:
        """The most that one checkpoint's requests cost."""
        return self.num_requests * DOLLARS_PER_PUT

    def document(self) -> dict[str, object]:
        """Returns the plan for JSON."""
        subject, model = self.subject, self.question.model
        return {
            "params": subject.params,
            "bytes_per_param": None
            if subject.each is None
            else {**asdict(subject.each), "saved": subject.each.in_checkpoint, "trained": subject.each.in_training},
            "ranks": subject.num_ranks,
            "checkpoint_bytes": subject.nbytes,
            "changed_bytes": subject.nbytes_changed,
            "rank_bytes": subject.rank_nbytes,
            "training_rank_bytes": subject.training_nbytes,
            "activations_rank_bytes": None if model is None else model.activations,
            "activations_without_scores_rank_bytes": None if model is None else model.activations_without_scores,
            "slots": self.num_slots,
            "host_bytes": self.host_nbytes,
            "fits_host": self.fits_host,
            "device_spare_bytes": self.device_spare_nbytes,
            "fits_device": self.fits_device,
            "stall_s": self.stall_s,
            "persist_s": self.persist_s,
            "intervals_s": self.intervals,
            "interval_s": self.interval,
            "ettr": self.ettr,
            "storage": {**asdict(self.storage), "period_s": self.question.period},
            "requests": self.num_requests,
            "request_dollars": self.dollars,
        }
