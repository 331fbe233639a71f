"""What a user may ask of the memory of peers."""

from __future__ import annotations

from typing import Any

import pytest

from ckptlib import Peers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": -1}, "copies >= 0"),
        ({"every": 0}, "every >= 1"),
        ({"memory": "disk"}, "memory is 'host' or 'device'"),
        ({"link": "zip"}, "link is 'raw' or 'optimizer'"),
        ({"link": "optimizer", "every": 2}, "needs every=1, got every=2"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Peers(**options)


def test_taken() -> None:
    assert Peers().link == "raw"
    assert Peers(copies=2, link="optimizer").link == "optimizer"
