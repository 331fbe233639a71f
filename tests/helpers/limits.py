"""Shorter limits of requests in writers, which are processes of their own: a fault costs seconds less."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from places import TESTS

IDLE_S = 2.0

VARIABLE = "CKPTLIB_TEST_IO_LIMITS"


def short_limits(idle_s: float = IDLE_S, **limits: float) -> Mapping[str, str]:
    """Variables of the environment of a trainer that calls `hand_limits_on`."""
    return {VARIABLE: json.dumps({"IDLE_S": idle_s, **limits})}


def hand_limits_on() -> None:
    """To the writers of this process: they have its path, and find another sitecustomize there."""
    sys.path.insert(0, str(TESTS / "limits"))
