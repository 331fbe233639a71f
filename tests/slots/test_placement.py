"""Placement: every set of hosts that can be lost, judged by counting copies one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.slots.placement import ReplicaMap, place


def hosts(num_hosts: int, ranks_each: int, interleaved: bool = False) -> list[str]:
    """By rank: as launchers number them, host by host; or around all hosts."""
    num = num_hosts * ranks_each
    return [f"host{rank % num_hosts if interleaved else rank // ranks_each}" for rank in range(num)]


def survives(placement: ReplicaMap, rank: int, gone: frozenset[str]) -> bool:
    """The oracle: whether any process that holds this rank's snapshot still runs."""
    return any(placement.domains[r] not in gone for r in (rank, *placement.holders[rank]))


def lost(placement: ReplicaMap, domains: Iterable[str]) -> tuple[int, ...]:
    """The ranks of whose snapshots no copy is left."""
    gone = frozenset(domains)
    return tuple(rank for rank in range(len(placement.domains)) if not survives(placement, rank, gone))


def subsets(names: set[str]) -> Iterator[frozenset[str]]:
    for size in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(sorted(names), size))


def every_case() -> Iterator[tuple[int, int, int]]:
    """Hosts, ranks per host, copies."""
    for num_hosts, ranks_each in itertools.product(range(1, 9), (1, 2, 4)):
        yield from ((num_hosts, ranks_each, copies) for copies in range(num_hosts))


def check(placement: ReplicaMap, copies: int) -> None:
    """What must hold of every placement, whatever is lost."""
    domains, ranks = placement.domains, range(len(placement.domains))
    for rank in ranks:
        homes = [domains[rank], *(domains[holder] for holder in placement.holders[rank])]
        assert len(homes) == len(set(homes)) == copies + 1
    for holder in ranks:
        assert placement.origins(holder) == tuple(r for r in ranks if holder in placement.holders[r])
    all_survive: dict[int, bool] = dict.fromkeys(range(len(set(domains)) + 1), True)
    for gone in subsets(set(domains)):
        all_survive[len(gone)] &= not lost(placement, gone)
    assert placement.num_losses_survived == max(k for k, survived in all_survive.items() if survived) == copies


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_loss_of_up_to_eight_hosts(interleaved: bool) -> None:
    for num_hosts, ranks_each, copies in every_case():
        placement = place(hosts(num_hosts, ranks_each, interleaved), copies)
        check(placement, copies)
        # as many replicas on one rank as on the next
        held = Counter(holder for holders in placement.holders for holder in holders)
        assert {held[rank] for rank in range(num_hosts * ranks_each)} == {copies}


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.data())
def test_hosts_of_different_size_in_any_order(domains: list[str], data: st.DataObject) -> None:
    copies = data.draw(st.integers(0, len(set(domains)) - 1))
    placement = place(domains, copies)
    check(placement, copies)
    sizes = Counter(domains)
    for holder, domain in enumerate(domains):
        # from each host that its own host keeps replicas of, no more than a fair share
        from_host = Counter(domains[origin] for origin in placement.origins(holder))
        for origin_host, num in from_host.items():
            assert num <= -(-sizes[origin_host] // sizes[domain])


def test_as_likely_to_survive_as_gemini_says() -> None:
    """P(N, m, k) of its paper, exact for k = m and a lower bound above; counted over all losses of k hosts."""
    for num_hosts, _, copies in every_case():
        m = copies + 1
        if num_hosts % m:
            continue
        placement = place(hosts(num_hosts, 1), copies)
        names = sorted(set(placement.domains))
        for k in range(m, num_hosts + 1):
            losses = list(itertools.combinations(names, k))
            found = Fraction(sum(not lost(placement, gone) for gone in losses), len(losses))
            bound = 1 - Fraction(num_hosts * comb(num_hosts - m, k - m), m * comb(num_hosts, k))
            assert found >= max(Fraction(0), bound)
            if k == m:
                assert found == bound


def test_the_rest_joins_the_last_group_as_a_ring() -> None:
    assert place(hosts(7, 1), 2).holders == ((1, 2), (2, 0), (0, 1), (4, 5), (5, 6), (6, 3), (3, 4))


def test_a_rank_goes_to_its_like() -> None:
    placement = place(hosts(2, 4), 1)
    assert placement.holders == ((4,), (5,), (6,), (7,), (0,), (1,), (2,), (3,))
    assert placement.origins(6) == (2,)
    assert lost(placement, ["host0"]) == ()
    assert lost(placement, ["host0", "host1", "a host of another job"]) == tuple(range(8))
    assert place(["a", "a", "a", "b"], 1).holders == ((3,), (3,), (3,), (0,))


def test_ranks_that_hold_the_same_keep_each_others_replicas() -> None:
    # HSDP, each replica of the state over two hosts of two ranks: the like of rank 0 are 4 and 8
    over_two = [0, 1, 2, 3] * 3
    assert place(hosts(6, 2), 2, over_two).holders[:4] == ((4, 8), (5, 9), (6, 10), (7, 11))
    assert place(hosts(6, 2), 1, over_two).holders == tuple(((rank + 4) % 12,) for rank in range(12))
    # on the second host, ranks in another order
    assert place(hosts(2, 3), 1, [0, 1, 2, 2, 0, 1]).holders == ((4,), (5,), (3,), (2,), (0,), (1,))
    # two replicas are too few for two copies: as if nothing were alike, but no domain is left out
    check(place(hosts(4, 1), 2, [0, 1, 0, 1]), 2)
    assert place(hosts(5, 1), 1, [0, 1, 0, 1, 2]).holders == ((2,), (3,), (0,), (4,), (1,))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), min_size=1, max_size=14), st.data())
def test_whatever_is_alike(ranks: list[tuple[str, int]], data: st.DataObject) -> None:
    domains = [domain for domain, _ in ranks]
    copies = data.draw(st.integers(0, len(set(domains)) - 1))
    placement = place(domains, copies, [kind for _, kind in ranks])
    check(placement, copies)
    assert placement.copies == copies


def test_no_copies() -> None:
    placement = place(hosts(2, 2), 0)
    assert placement.holders == ((),) * 4
    assert placement.num_losses_survived == 0
    assert lost(placement, {"host1"}) == (2, 3)


@pytest.mark.parametrize(
    ("domains", "copies", "told"),
    [
        (["a", "a"], 1, r"copies=1 needs 2 failure domains, but the 2 ranks are on 1 \(a\)\. .* to 0\."),
        (hosts(6, 2), 6, r"the 12 ranks are on 6 \(host0, host1, host2, host3, \.\.\.\)\. .* to 5\."),
        (["a", "b"], -1, "Expected copies from 0"),
        ([], 0, "the 0 ranks are on 0"),
    ],
)
def test_more_copies_than_there_are_places(domains: list[str], copies: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        place(domains, copies)


def test_a_large_job() -> None:
    placement = place(hosts(1024, 8), 2)
    assert placement.num_losses_survived == 2
    assert lost(placement, {"host0", "host1"}) == ()
    assert lost(placement, {"host0", "host1", "host2"}) == tuple(range(24))
    assert len(placement.holders[8191]) == 2
