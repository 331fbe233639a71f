"""Traps: SIGKILL in the midst of the real code, and other things done there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptlib.codecs.optimizer_step import OptimizerStep
from ckptlib.loading.reader import Reader
from ckptlib.peers import replicator
from ckptlib.ranks import link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.staging import stager

CHUNK_BYTES = 1 << 14
"""Per message of a link, here: a small body takes several."""


def mark_sealed(rank: int, gates: str) -> None:
    """A file for each snapshot that this rank has sealed: no trap may depend on who is faster."""

    def mark(staging: stager.Staging, before: object) -> None:
        Path(gates, f"sealed{staging.step}.rank{rank}").touch()

    wrap(stager, "_seal", after=mark)


def set_trap(gates: Path, size: int, *, stage: str, rank: int, step: int | None = None) -> None:
    """Kills this process at a stage of a snapshot, when all ranks, or all others, have sealed theirs of this `step`.

    staging     copied, not sealed
    sealing     before the header that makes it ready
    sealed      after it
    sending     in the middle of a body
    receiving   in the middle of a body
    coding      in the middle of increments
    decoding    in the middle of increments
    received    before the header of the replica
    replicated  after it, before the peer is told
    reading     in the middle of what another host reads out to it, for a restore
    serving     in the middle of what it reads out itself
    loading     some tensors are filled
    loaded      all of them are; nothing of the new generation is anywhere
    """

    def die() -> None:
        if step is not None:
            others = [r for r in range(size) if r != rank or _in("to") or _in("from")]
            while not all((gates / f"sealed{step}.rank{r}").exists() for r in others):
                time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_header(thread: str) -> Callable[..., None]:
        def check(slot: Slot, header: SlotHeader) -> None:
            if _in(thread) and header.ready and step in (None, header.save.step):
                die()

        return check

    def on_message(thread: str) -> Callable[..., None]:
        def check(self: link.Link, peer: int, data: torch.Tensor, tag: int) -> None:
            if not _in(thread) or data.numel() != CHUNK_BYTES:
                return
            if step is None or begun[-1] == step:
                die()

        return check

    def on_thread(thread: str) -> Callable[..., None]:
        return lambda *args: die() if _in(thread) else None

    def on_increment(thread: str) -> Callable[..., None]:
        return lambda *args: die() if _in(thread) and begun[-1] == step else None

    begun: list[int] = []
    wrap(
        replicator.Replicator, "begin", before=lambda itself, now, staging, local_replicas: begun.append(now.save.step)
    )

    def on_staging(staging: Any, before: object) -> None:
        if staging.step == step:
            die()

    match stage:
        case "staging":
            wrap(stager, "_seal", before=on_staging)
        case "sealing":
            wrap(Slot, "write_header", before=on_header("stage"))
        case "sealed":
            wrap(Slot, "write_header", after=on_header("stage"))
        case "sending":
            wrap(link.Link, "_begin_send", after=on_message("to"))
        case "receiving":
            wrap(link.Link, "_begin_recv", after=on_message("from"))
        case "coding":
            wrap(OptimizerStep, "encode", after=on_increment("encode"))
        case "decoding":
            wrap(OptimizerStep, "decode", after=on_increment("decode"))
        case "received":
            wrap(Slot, "write_header", before=on_header("from"))
        case "replicated":
            wrap(Slot, "write_header", after=on_header("from"))
        case "reading":
            wrap(link.Link, "_wait", before=on_thread("read"))
        case "serving":
            wrap(link.Link, "answer", before=on_thread("serve"))
        case "loading":
            wrap(Reader, "_run", after=lambda *args: die())
        case "loaded":
            wrap(replicator.Replicator, "begin", before=lambda *args: die())
        case _:
            raise AssertionError(stage)


def wrap(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Calls these with the arguments of the original, which is called as ever."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def on_chunk(call: Callable[[], None]) -> Callable[..., None]:
    def check(self: link.Link, peer: int, data: torch.Tensor, tag: int) -> None:
        if data.numel() == CHUNK_BYTES:
            call()

    return check


def _in(thread: str) -> bool:
    return threading.current_thread().name.startswith(f"ckptlib-{thread}")
