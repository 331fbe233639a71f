"""How fast is a save? Seconds until training goes on, and until the step is durable, for every library on one state.

Two states: one of many tensors, over two ranks and over four, and one large tensor on one. Peers take turns, each in
processes of its own; in each round the bare disk is measured, too. Every element changes between saves. The first save
of a state (slots are made, plans are drawn up) is kept apart from those that follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import limits, peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, rotated, run
from benchmarks.peers import PEERS
from benchmarks.turns import Case, cases, directory_of, leave

SAVES = 3
"""In one process: one first, then those that count."""

TOY_PEERS = ("ckptlib", "DCP", "torch.save+fsync", "safetensors+fsync")


def main(arguments: list[str]) -> None:
    run(arguments, "save", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in cases(options.toy, options.gb, options.rounds, [*PEERS], TOY_PEERS):
        _measure(case, options, directory, figures)


def _measure(case: Case, options: Options, directory: Path, figures: Figures) -> None:
    for name, why in case.unable(PEERS):
        figures.failed(case.name, name, why)
    for number in range(case.rounds):
        write_s = limits.disk_seconds(directory, case.nbytes_everywhere).write
        figures.add(case.name, "bare direct write", "durable", "s", [write_s], **case.more)
        for turn in rotated(case.turns, number):
            order = case.order(turn, directory)
            for line in figures.attempt(case.name, turn[0], __name__, case.num_ranks, order, options.timeout_s):
                figures.add(case.name, line["peer"], line["what"], "s", line["seconds"], **case.more)


# In the ranks


def work() -> None:
    """Saves with each of the peers that it was told."""
    given = told()
    peers.start()
    state, small = states.make_state(given["nbytes"], given["tensors"]), states.make_state(4096, 1)
    events = _listen()
    for name in given["peers"]:
        directory = directory_of(given["directory"], name)
        peer = PEERS[name]()
        _timed(peer, small, directory / "small", 1)  # imports, threads and helper processes
        blocked, durable, persist = [], [], []
        for step in range(1, SAVES + 1):
            states.change(state)
            events.clear()
            seconds = _timed(peer, state, directory / "large", step)
            blocked.append(seconds[0])
            durable.append(seconds[1])
            persist += [event["seconds"] for event in events if event["event"] == "released"]
        if states.rank() == 0:
            tell(peer=name, what="first durable", seconds=durable[:1])
            tell(peer=name, what="blocked", seconds=blocked[1:])
            tell(peer=name, what="durable", seconds=durable[1:])
            tell(peer=name, what="persist", seconds=persist[1:])
        peer.close()
        peers.barrier()
        if states.rank() == 0:
            peers.remove(directory)
    leave()


def _timed(peer: peers.Peer, state: states.State, directory: Path, step: int) -> tuple[float, float]:
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
