"""How many functions of Python a piece of work calls: what it costs, told without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(work: Callable[[], object]) -> int:
    """By this thread."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found
