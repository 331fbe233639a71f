"""Whether what a rank waits for ends by itself, though another rank died."""

from __future__ import annotations

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
