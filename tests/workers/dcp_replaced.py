"""A process that saves the same checkpoint again and again by `ckptlib.dcp`, until it is killed."""

from __future__ import annotations

import torch
from workers.crash_jobs import Teller

from ckptlib import dcp


def replace_for_ever(tell: Teller, rank: int, *, where: str, saved: int) -> None:
    """`saved`: the number in what is there, which the next one follows."""
    while True:
        dcp.save({"w": torch.full((200_000,), float(saved)), "n": saved}, checkpoint_id=where)
        saved += 1
        tell("saved", number=saved)
