"""What becomes of the last save where its snapshot comes to nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import ckptlib
from ckptlib.errors import ReplicasDiffer, StateChanged, TornSnapshot
from ckptlib.saving.attempts import Attempts
from ckptlib.saving.ballots import Ballot
from ckptlib.saving.due import DueSaves
from ckptlib.saving.snapshots import InFlight


class Session:
    """What Attempts asks of a session for saves that are owed again."""

    def __init__(self) -> None:
        self.differing: list[Ballot] = []
        self.torn: InFlight | None = None
        self.snapshots = SimpleNamespace(take_torn=lambda: self.torn, overlap=True, take_changed=set)
        self.verdicts = SimpleNamespace(take_differing=lambda: self.differing)
        self.listener = SimpleNamespace(tell=lambda event: None)


def snapshot(error: Exception | None = None) -> Any:
    return SimpleNamespace(error=error, changed=())


@pytest.mark.parametrize("kind", [ReplicasDiffer, TornSnapshot])
def test_a_snapshot_that_comes_to_nothing_unmakes_its_own_save_alone(kind: type[Exception]) -> None:
    """Another of the same step, as by `save` behind one that was due, is as good as before."""
    session: Any = Session()
    due = DueSaves(ckptlib.Steps(1000), None)
    attempts = Attempts(session, due)
    first, second = snapshot(kind("as planned")), snapshot(kind("as planned"))
    last: Any = SimpleNamespace(step=3, staging=second)
    attempts.last = last
    for staging, is_last in [(first, False), (second, True)]:
        if kind is ReplicasDiffer:
            session.differing = [Ballot(3, 1, True, staging, None)]
        else:
            session.torn = InFlight(3, staging, True, None)
        assert attempts.owe_again() is (kind is ReplicasDiffer)
        assert due.to_store
        assert attempts.has(3) is not is_last
        assert (attempts.missed is not None) is is_last
    assert attempts.missed is not None
    assert attempts.missed[0] == 3
    assert isinstance(attempts.missed[1], kind)


@pytest.mark.parametrize("kind", [ReplicasDiffer, StateChanged])
def test_a_save_that_is_not_taken_since_ranks_do_not_agree_is_owed(kind: type[Exception]) -> None:
    """Though no step is due for long."""
    session: Any = Session()
    due = DueSaves(ckptlib.Steps(1000), None)
    attempts = Attempts(session, due)

    def take() -> Any:
        raise kind("as planned")

    assert attempts.make(3, True, take) is None
    assert due.to_store
    assert attempts.missed is not None
