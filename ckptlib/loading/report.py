"""The report of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from ckptlib.format.keys import SaveId


@dataclass(frozen=True)
class LoadReport:
    """The result of a load."""

    step: int
    """0 if there was nothing to restore."""
    source: str
    """Where it came from, for people."""
    save: SaveId | None
    nbytes: int
    """Bytes that this rank read from the store."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint has not; left as they were."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the state has not."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Plain values by path."""
    skipped: tuple[str, ...] = ()
    """Newer steps, or nearer copies, that were found damaged, and why."""
    in_memory: bool = False
    """Whether it came from the memory of the job's hosts."""
    tier: str = "store"
    """"memory", "local" (local disks) or "store"."""
    committed: bool = True
    """Whether the store has it."""
    rounded: Mapping[str, float] = field(default_factory=dict)
    """Bound of the error of each tensor that this rank read and that `codec=Lossy` had rounded, by name: no number is
    off by more than this fraction of the largest absolute value among the 256 numbers around it."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: look (for snapshots in memory), wait (for writers of the job before), list (the steps), bring
    (from peers), plan, read, spread (over ranks)."""

    initialized_from: str | None = None
    """Source from which `Checkpointer(init_from=)` filled the state of a fresh run."""

    @override
    def __str__(self) -> str:
        if self.initialized_from is not None:
            return (
                f"a fresh run, which begins from {self.initialized_from}: {self.nbytes:,} bytes in {self.seconds:.2f} s"
            )
        if self.save is None:
            return f"nothing to restore in {self.source}: a fresh run"
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        text = f"step {self.step} from {self.source}: {self.nbytes:,} bytes in {self.seconds:.2f} s ({rate:.2f} GB/s)"
        if self.rounded:
            most = max(self.rounded.values())
            text += f"; {len(self.rounded)} tensors were saved rounded, by at most {most:.2%} of the values around"
        return text + "".join(f"; skipped {reason}" for reason in self.skipped)
