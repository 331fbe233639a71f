"""Placement: which ranks keep the replicas of which. Pure integers and names: no torch, no I/O.

Gemini's placement (SOSP 2023), over failure domains: they are cut into groups of copies + 1, each of which holds the
snapshots of all its members, so that few sets of lost domains take every copy of something with them. If the number
does not divide, the rest joins the last group, which then is a ring: a domain's copies go to the next ones around it.

Domains that hold the same of the state (the replicas of HSDP, or of a pipeline's stage) come into one group before
others do, and within it rank meets rank that holds the same: what both have needs no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptlib.words import listed


@dataclass(frozen=True)
class ReplicaMap:
    """Which rank keeps replicas of which others. Equal on all ranks that know the same domains."""

    domains: tuple[str, ...]
    """Per rank: its failure domain, such as its host."""
    holders: tuple[tuple[int, ...], ...]
    """Per rank: the ranks that keep a replica of its snapshots; each in a domain of its own, none in the rank's."""
    kinds: tuple[int, ...]
    """Per rank: a number that it shares with those that hold the same of the state; empty if nothing is known."""

    @property
    def copies(self) -> int:
        """Number of replicas of each rank's snapshots."""
        return len(self.holders[0])

    def origins(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks whose replicas a rank keeps, ascending."""
        return tuple(origin for origin, holders in enumerate(self.holders) if rank in holders)

    @property
    def num_losses_survived(self) -> int:
        """How many domains may be gone, whichever they are, with a copy left of every rank's snapshots."""
        homes = ({self.domains[r] for r in (rank, *holders)} for rank, holders in enumerate(self.holders))
        return min(map(len, homes)) - 1


def place(domains: Sequence[str], copies: int, kinds: Sequence[int] = ()) -> ReplicaMap:
    """Returns the placement of `copies` replicas of each rank's snapshots, beside its own. `domains`: per rank.

    `kinds`: see `ReplicaMap`.

    Raises ValueError if there are too few domains for so many copies.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        ranks_of.setdefault(domain, []).append(rank)
    alike: dict[tuple[int, ...], list[str]] = {}
    for domain, ranks in ranks_of.items():
        if kinds:
            ranks.sort(key=kinds.__getitem__)
        alike.setdefault(tuple(kinds[rank] for rank in ranks) if kinds else (), []).append(domain)
    if not 0 <= copies < len(ranks_of):
        raise ValueError(
            f"copies={copies} needs {copies + 1} failure domains, but the {len(domains)} ranks are on {len(ranks_of)} "
            f"({listed([*ranks_of], 4)}). Expected copies from 0 (snapshots survive the death of a trainer, not of a "
            f"host) to {max(len(ranks_of) - 1, 0)}. A failure domain is a machine unless domain= names others"
        )
    holders: list[tuple[int, ...]] = [()] * len(domains)
    for ring in _rings(list(alike.values()), copies + 1):
        for position, origin in enumerate(ring):
            around = [ranks_of[ring[(position + k) % len(ring)]] for k in range(1, copies + 1)]
            for i, rank in enumerate(ranks_of[origin]):
                holders[rank] = tuple(there[i % len(there)] for there in around)
    return ReplicaMap(tuple(domains), tuple(holders), tuple(kinds))


def _rings(alike: list[list[str]], size: int) -> list[list[str]]:
    """Returns groups of `size` domains, of those that are alike first; the last one takes the rest, too."""
    rings = [ring for domains in alike if len(domains) >= size for ring in _cut(domains, size)]
    rest = [domain for domains in alike if len(domains) < size for domain in domains]
    if len(rest) >= size:
        rings += _cut(rest, size)
    elif rest:
        rings[-1] = rings[-1] + rest
    return rings


def _cut(domains: list[str], size: int) -> list[list[str]]:
    starts = range(0, len(domains) - size + 1, size)
    return [domains[start : len(domains) if start == starts[-1] else start + size] for start in starts]
