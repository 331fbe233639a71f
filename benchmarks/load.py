"""How fast is a load from a cold disk? Seconds to fill a state that is there already, for every library.

Each library loads what it saved itself, in fresh processes that have loaded something tiny before (imports and helper
processes are not counted), into memory that was touched. Files are dropped from the page cache first; the fraction of
pages that stayed in it is part of each figure. What was loaded is compared with what was saved, by digest.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import limits, peers, states
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from benchmarks.peers import LOADERS
from benchmarks.turns import Case, cases, directory_of, leave

STEP = 1
TOY_PEERS = ("ckptlib", "DCP", "torch.load", "safetensors")


def main(arguments: list[str]) -> None:
    run(arguments, "load", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in cases(options.toy, options.gb, options.rounds, [*LOADERS], TOY_PEERS):
        _measure(case, options, directory, figures)


def _measure(case: Case, options: Options, directory: Path, figures: Figures) -> None:
    for name, why in case.unable(LOADERS):
        figures.failed(case.name, name, why)

    def ask(turn: tuple[str, ...], doing: str) -> list[Line]:
        order = case.order(turn, directory, doing=doing)
        return figures.attempt(case.name, turn[0], __name__, case.num_ranks, order, options.timeout_s)

    saved = {(line["peer"], line["rank"]): line["digest"] for turn in case.turns for line in ask(turn, "save")}
    for number in range(case.rounds):
        disk = limits.disk_seconds(directory, case.nbytes_everywhere)
        figures.add(case.name, "bare direct read", "load", "s", [disk.read], **case.more)
        figures.add(case.name, "bare direct reads, 8 under way", "load", "s", [disk.reads], **case.more)
        for turn in rotated(case.turns, number):
            for line in ask(turn, "load"):
                if line["digest"] != saved[line["peer"], line["rank"]]:
                    figures.failed(case.name, line["peer"], "loaded other bytes than it had saved")
                elif line["rank"] == 0:
                    known = {**case.more, "resident": line["resident"]}
                    figures.add(case.name, line["peer"], "load", "s", [line["seconds"]], **known)
    for turn in case.turns:
        for name in turn:
            peers.remove(directory_of(directory, name))


# In the ranks


def work() -> None:
    """Saves or loads with each of the peers that it was told."""
    given = told()
    peers.start()
    state = states.make_state(given["nbytes"], given["tensors"])
    for name in given["peers"]:
        directory = directory_of(given["directory"], name)
        peer = LOADERS[name]()
        if given["doing"] == "save":
            peer.begin(state, directory / "large", STEP)()
            peer.begin(states.make_state(4096, 1), directory / "small", STEP)()
            found: Line = {}
        else:
            found = _load(peer, state, directory)
        tell(peer=name, digest=states.digest(state), **found)
        peer.close()
    leave()


def _load(peer: peers.Peer, state: states.State, directory: Path) -> Line:
    peer.load(states.make_state(4096, 1), directory / "small", STEP)
    states.clear(state)
    resident = limits.evict(directory / "large")
    peers.barrier()
    began = time.perf_counter()
    peer.load(state, directory / "large", STEP)
    peers.barrier()
    return {"seconds": time.perf_counter() - began, "resident": resident}


if __name__ == "__main__":
    work()
