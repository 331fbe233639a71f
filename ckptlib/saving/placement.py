"""Decides which rank keeps whose replicas: all ranks agree on it before the first snapshot."""

from __future__ import annotations

from collections.abc import Callable

from ckptlib.policy.peers import HOST, Peers
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
from ckptlib.slots.host import boot_id
from ckptlib.slots.placement import ReplicaMap, place


def agree_placement(group: Group, peers: Peers, kind: Callable[[], str]) -> ReplicaMap:
    """Returns which rank keeps whose replicas. Collective.

    `kind`: see `kind_of`. Its errors are raised on all ranks, as is ValueError if there are too few domains.
    """

    def own_domain() -> str:
        return boot_id() if peers.domain == HOST else peers.domain

    own = together(group, "looking for peers", lambda: f"{kind()} {own_domain()}".encode())
    told = [data.decode().partition(" ") for data in group.gather(own)]
    numbers = {name: n for n, name in enumerate(dict.fromkeys(name for name, _, _ in told))}
    kinds = [numbers[name] for name, _, _ in told] if 1 < len(numbers) < len(told) else []
    return place([domain for _, _, domain in told], peers.copies, kinds)
