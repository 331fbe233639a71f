"""How fast is a load from a cold disk? Seconds to fill a state that is there already, for every library.

Each library loads what it saved itself, in fresh processes that have loaded something tiny before (imports and helper
processes are not counted), into memory that was touched. Files are dropped from the page cache first; the fraction of
pages that stayed in it is part of each figure. What was loaded is compared with what was saved, by digest.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from benchmarks import limits, peers
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from benchmarks.peers import LOADERS, why_not

STEP = 1
TOY_PEERS = ("ckptlib", "DCP", "torch.load", "safetensors")


def main(arguments: list[str]) -> None:
    run(arguments, "load", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    if options.toy:
        _case(options, directory, figures, "one rank", 1, 6, 0.006, [TOY_PEERS])
        return
    alone = [(name,) for name in LOADERS]
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
    given = {"nbytes": nbytes, "tensors": num_tensors, "directory": str(directory)}
    for name in (name for turn in turns for name in turn):
        if (why := why_not(LOADERS[name], num_ranks)) is not None:
            figures.failed(case, name, why)

    def ask(turn: tuple[str, ...], doing: str) -> list[Line]:
        order = {**given, "peers": turn, "doing": doing}
        return figures.attempt(case, turn[0], __name__, num_ranks, order, options.timeout_s)

    saved = {(line["peer"], line["rank"]): line["digest"] for turn in turns for line in ask(turn, "save")}
    for number in range(1 if options.toy else options.rounds):
        _, read_s = limits.disk_seconds(directory, nbytes * num_ranks)
        figures.add(case, "bare direct read", "load", "s", [read_s], **more)
        for turn in rotated(turns, number):
            for line in ask(turn, "load"):
                if line["digest"] != saved[line["peer"], line["rank"]]:
                    figures.failed(case, line["peer"], "loaded other bytes than it had saved")
                elif line["rank"] == 0:
                    known = {**more, "resident": line["resident"]}
                    figures.add(case, line["peer"], "load", "s", [line["seconds"]], **known)
    for turn in turns:
        for name in turn:
            peers.remove(directory / name.replace(" ", "-"))


# In the ranks


def work() -> None:
    """Saves or loads with each of the peers that it was told."""
    given = told()
    peers.start()
    state = peers.make_state(given["nbytes"], given["tensors"])
    for name in given["peers"]:
        directory = Path(given["directory"]) / name.replace(" ", "-")
        peer = LOADERS[name]()
        if given["doing"] == "save":
            peer.begin(state, directory / "large", STEP)()
            peer.begin(peers.make_state(4096, 1), directory / "small", STEP)()
            found: Line = {}
        else:
            found = _load(peer, state, directory)
        tell(peer=name, digest=peers.digest(state), **found)
        peer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(peer: peers.Peer, state: peers.State, directory: Path) -> Line:
    peer.load(peers.make_state(4096, 1), directory / "small", STEP)
    peers.clear(state)
    resident = limits.evict(directory / "large")
    peers.barrier()
    began = time.perf_counter()
    peer.load(state, directory / "large", STEP)
    peers.barrier()
    return {"seconds": time.perf_counter() - began, "resident": resident}


if __name__ == "__main__":
    work()
