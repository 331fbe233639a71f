"""When waits for a save end: whether by themselves, though another rank died, and after which time-out."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.saving.pending import Pending


class Failed:
    """The device is lost."""

    @property
    def read(self) -> bool:
        raise RuntimeError("the device is lost")


READ, HUNG = SimpleNamespace(read=True), SimpleNamespace(read=False)


@pytest.mark.parametrize(
    ("done", "copies", "ends"),
    [
        (False, [], True),  # of the host's memory
        (False, [READ], True),
        (False, [READ, HUNG], False),  # behind a collective, say
        (True, [HUNG], True),
        (False, [Failed()], False),
    ],
)
def test_a_copy_behind_a_device_that_stands_still_does_not_end(done: bool, copies: list[Any], ends: bool) -> None:
    staging: Any = SimpleNamespace(done=done, device_copies=copies)
    save = SaveId(1, GenerationId(1, "0" * 8))
    nobody: Any = None
    assert Pending(nobody, nobody, save, staging, persists=False, deadline_s=1.0)._ends() is ends


@pytest.mark.parametrize("wait", ["result", "wait_committed", "wait_local", "wait_released", "wait_staged"])
def test_a_wait_takes_seconds_or_a_timedelta(wait: str) -> None:
    asked = list[float]()
    outcomes: Any = SimpleNamespace(
        listener=SimpleNamespace(deliver=lambda: None),
        wait_staged=lambda staging, timeout_s: asked.append(timeout_s),
        **dict.fromkeys(
            ("wait_committed", "wait_local", "wait_released"),
            lambda outcome, staging, timeout_s: asked.append(timeout_s),
        ),
    )
    staging: Any = SimpleNamespace(done=True)
    nobody: Any = None
    pending = Pending(outcomes, nobody, SaveId(1, GenerationId(1, "0" * 8)), staging, persists=False, deadline_s=60.0)
    for timeout in (timedelta(minutes=2), 120, 120.0, timedelta(milliseconds=5), None):
        getattr(pending, wait)(timeout)
    assert asked == [120.0, 120, 120.0, 0.005, None if wait == "wait_staged" else 60.0]
