"""What a rank says of the store, as its writer tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from ckptlib.format.keys import GenerationId
from ckptlib.saving.store_state import StoreState


class FakeLineage:
    """What a StoreState asks of a lineage."""

    generation = GenerationId(3, "0" * 8)

    def __init__(self) -> None:
        self.again = False

    def note_recorded(self) -> None:
        self.again = False

    def note_not_recorded(self) -> None:
        self.again = True


def test_a_record_that_cannot_be_put_is_told_once_until_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried with each snapshot. With a local tier also by a writer in the place of one that died."""
    nobody: Any = None
    lineage: Any = FakeLineage()
    state = StoreState(nobody, nobody, lineage, 1)

    def fails(why: str) -> None:
        state.note({"event": "not-begun", "kind": "StoreTimeout", "error": why})

    fails("first")
    fails("second")
    state.note({"event": "begun", "warning": None})
    assert not lineage.again
    fails("third")
    assert lineage.again
    assert [record.getMessage().rsplit(": ", 1)[1] for record in caplog.records] == ["first", "third"]
