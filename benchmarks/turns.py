"""Libraries that take turns on the same states: the cases that the benchmarks of saves and of loads share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.common import Line
from benchmarks.peers import Peer, why_not


@dataclass(frozen=True, slots=True)
class Case:
    """One state, and who saves or loads it."""

    name: str
    num_ranks: int
    num_tensors: int
    nbytes: int
    """Per rank."""
    rounds: int
    turns: tuple[tuple[str, ...], ...]
    """Peers by name; those of a turn share their processes."""

    @property
    def nbytes_everywhere(self) -> int:
        return self.nbytes * self.num_ranks

    @property
    def more(self) -> Line:
        """What is said beside each figure."""
        return {"nbytes": self.nbytes_everywhere, "ranks": self.num_ranks}

    def unable(self, kinds: Mapping[str, type[Peer]]) -> Iterator[tuple[str, str]]:
        """(peer, why it cannot take part)."""
        for name in (name for turn in self.turns for name in turn):
            if (why := why_not(kinds[name], self.num_ranks)) is not None:
                yield name, why

    def order(self, turn: Sequence[str], directory: Path, **more: object) -> Line:
        """What the ranks are told."""
        return {"peers": turn, "nbytes": self.nbytes, "tensors": self.num_tensors, "directory": str(directory), **more}


def cases(toy: bool, gb: float, rounds: int, subjects: Sequence[str], toy_subjects: tuple[str, ...]) -> list[Case]:
    """Many tensors over two ranks and over four, and one large tensor on one, each peer in processes of its own."""
    if toy:
        return [Case("one rank", 1, 6, int(0.006 * 1e9), 1, (toy_subjects,))]
    alone, nbytes = tuple((name,) for name in subjects), int(gb * 1e9)
    return [
        Case("two ranks", 2, 150, nbytes, rounds, alone),
        Case("four ranks", 4, 150, nbytes, 1, alone),  # 2 and 4 GB for each of ten: a round takes minutes
        Case("one tensor", 1, 1, int(8 * gb * 1e9), 1, alone),
    ]


def directory_of(directory: Path | str, name: str) -> Path:
    """Where a peer's checkpoints go."""
    return Path(directory) / name.replace(" ", "-")


def leave() -> None:
    """In a rank, when all is told."""
    if dist.is_initialized():
        dist.destroy_process_group()
