"""Ctrl-C at a place in ckptlib."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def interrupted_at(function: str, name: str | None = None) -> Iterator[None]:
    """As by Ctrl-C at the moment when this function of ckptlib is first called in here; of an object of that name."""

    def trace(frame: FrameType, event: str, arg: object) -> None:
        whose = frame.f_locals.get("self")
        is_it = f"{type(whose).__name__}.{frame.f_code.co_name}" == function
        if is_it and name in (None, getattr(whose, "name", None)):
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)
