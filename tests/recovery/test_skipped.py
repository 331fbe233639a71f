"""What is raised where no step is left, by what was wrong with those that were skipped."""

from __future__ import annotations

import pytest

from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectNotFound,
    ObjectUnreadable,
)
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.skipped import Skipped


@pytest.mark.parametrize(
    ("errors", "raised", "says"),
    [
        ([CorruptData, FormatError], CorruptData, "every step is damaged"),
        ([ObjectNotFound, CorruptData], CorruptData, "every step is damaged"),
        ([ObjectUnreadable, CorruptData], ObjectUnreadable, "no step can be read"),
        ([CorruptData, ObjectUnreadable, ObjectNotFound], ObjectUnreadable, "no step can be read"),
        ([ObjectNotFound, CheckpointNotFound], CheckpointNotFound, "every step lacks objects"),
        ([CorruptData, NewerFormat, ObjectUnreadable], NewerFormat, "too old to read any step"),
    ],
)
def test_nobody_is_told_to_begin_anew_where_a_step_may_yet_be_read(
    errors: list[type[CkptError]], raised: type[CkptError], says: str
) -> None:
    """One that the store does not give may be whole, and one that is newer is."""
    skipped = Skipped()
    for step, kind in enumerate(errors):
        skipped.add(Candidate(SaveId(step, GenerationId(1, "0" * 8)), None, committed=True), kind("why"))
    found = skipped.error("file:///run")
    assert type(found) is raised
    assert says in str(found)
    assert ("to begin anew" in str(found)) == (raised is CorruptData)
    assert type(skipped.error_of(1, "file:///run")) is raised, "where one of them was named"
    assert str(found).count(": why") == len(errors)
