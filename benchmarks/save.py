"""How fast is a save? Seconds until training goes on, and until the step is durable, for every library on one state.

Two states: one of many tensors, over two ranks and over four, and one large tensor on one. Peers take turns, each in
processes of its own; in each round the bare disk is measured, too. Every element changes between saves. The first save
of a state (slots are made, plans are drawn up) is kept apart from those that follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import limits, peers
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, rotated, run
from benchmarks.peers import PEERS, why_not

SAVES = 3
"""In one process: one first, then those that count."""

TOY_PEERS = ("ckptlib", "DCP", "torch.save+fsync", "safetensors+fsync")


def main(arguments: list[str]) -> None:
    run(arguments, "save", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    if options.toy:
        _case(options, directory, figures, "one rank", 1, 6, 0.006, [TOY_PEERS])
        return
    alone = [(name,) for name in PEERS]
    _case(options, directory, figures, "two ranks", 2, 150, options.gb, alone)
    once = replace(options, rounds=1)  # 2 and 4 GB for each of ten: a round takes minutes
    _case(once, directory, figures, "four ranks", 4, 150, options.gb, alone)
    _case(once, directory, figures, "one tensor", 1, 1, 8 * options.gb, alone)


def _case(
    options: Options,
    directory: Path,
    figures: Figures,
    case: str,
    num_ranks: int,
    num_tensors: int,
    gb: float,
    turns: list[tuple[str, ...]],
) -> None:
    nbytes = int(gb * 1e9)
    more = {"nbytes": nbytes * num_ranks, "ranks": num_ranks}
    for name in (name for turn in turns for name in turn):
        if (why := why_not(PEERS[name], num_ranks)) is not None:
            figures.failed(case, name, why)
    for number in range(1 if options.toy else options.rounds):
        write_s, _ = limits.disk_seconds(directory, nbytes * num_ranks)
        figures.add(case, "bare direct write", "durable", "s", [write_s], **more)
        for turn in rotated(turns, number):
            given = {"peers": turn, "nbytes": nbytes, "tensors": num_tensors, "directory": str(directory)}
            for line in figures.attempt(case, turn[0], __name__, num_ranks, given, options.timeout_s):
                figures.add(case, line["peer"], line["what"], "s", line["seconds"], **more)


# In the ranks


def work() -> None:
    """Saves with each of the peers that it was told."""
    given = told()
    peers.start()
    state, small = peers.make_state(given["nbytes"], given["tensors"]), peers.make_state(4096, 1)
    events = _listen()
    for name in given["peers"]:
        directory = Path(given["directory"]) / name.replace(" ", "-")
        peer = PEERS[name]()
        _timed(peer, small, directory / "small", 1)  # imports, threads and helper processes
        blocked, durable, persist = [], [], []
        for step in range(1, SAVES + 1):
            peers.change(state)
            events.clear()
            seconds = _timed(peer, state, directory / "large", step)
            blocked.append(seconds[0])
            durable.append(seconds[1])
            persist += [event["seconds"] for event in events if event["event"] == "released"]
        if peers.rank() == 0:
            tell(peer=name, what="first durable", seconds=durable[:1])
            tell(peer=name, what="blocked", seconds=blocked[1:])
            tell(peer=name, what="durable", seconds=durable[1:])
            tell(peer=name, what="persist", seconds=persist[1:])
        peer.close()
        peers.barrier()
        if peers.rank() == 0:
            peers.remove(directory)
    if dist.is_initialized():
        dist.destroy_process_group()


def _timed(peer: peers.Peer, state: peers.State, directory: Path, step: int) -> tuple[float, float]:
    peers.barrier()
    began = time.perf_counter()
    wait = peer.begin(state, directory, step)
    blocked = time.perf_counter() - began
    wait()
    peers.barrier()
    return blocked, time.perf_counter() - began


def _listen() -> list[dict[str, Any]]:
    """What ckptlib's writer says, as it comes; `released` has the seconds from a slot's lock to the durable part."""
    from ckptlib.writer.client import Writer

    events: list[dict[str, Any]] = []
    note: Callable[[Writer, dict[str, Any]], None] = Writer._note

    def listen(self: Writer, event: dict[str, Any]) -> None:
        events.append(event)
        note(self, event)

    Writer._note = listen  # type: ignore[method-assign]
    return events


if __name__ == "__main__":
    work()
