"""What all ranks hold: told by numbers, judged against the list of what each rank really has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptlib.ranks.held import NONE, HeldSteps

FATES = st.lists(st.booleans(), max_size=8)


@given(st.lists(FATES, min_size=1, max_size=4))
def test_what_is_named_is_held_by_every_rank(ranks: list[list[bool]]) -> None:
    """Each rank is as far as its list is long: snapshots are the same, their fates and the pace are not."""
    found = []
    for fates in ranks:
        held = HeldSteps()
        for step, fate in enumerate(fates):
            held.note(step * 3, fate)
        found.append(held)
    by_all = HeldSteps.by_all(min(h.newest for h in found), max(h.since for h in found))
    really = [{step * 3 for step, fate in enumerate(fates) if fate} for fates in ranks]
    common = set.intersection(*really)
    assert by_all == NONE or by_all in common
    if all(all(fates) for fates in ranks):
        assert by_all == max(common, default=NONE), "without failures, the newest is always found"
    # what is settled everywhere and newer than what is named may be overwritten: nobody will ever ask for it
    settled = min(h.settled for h in found)
    for held, fates in zip(found, ranks, strict=True):
        for step in range(len(fates), 12):
            held.note(step * 3, held=True)
    later = HeldSteps.by_all(min(h.newest for h in found), max(h.since for h in found))
    assert later in (NONE, by_all) or later > settled
