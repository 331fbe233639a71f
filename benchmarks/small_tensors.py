"""What do many small tensors cost? 20,000 of 4 B to 4 KB: seconds to save and load, bytes on disk beside the data.

One process. The page cache is warm at the load: what is measured is the work per tensor, not the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import LOADERS

SUBJECTS = ("ckptlib", "DCP", "torch.load", "safetensors")
CASE = "4 B to 4 KB each"


def main(arguments: list[str]) -> None:
    run(arguments, "small_tensors", measure, gb=0.04)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    num_tensors = 200 if options.toy else int(options.gb * 500_000)
    turns = [SUBJECTS] if options.toy else [(name,) for name in SUBJECTS]
    for _ in range(1 if options.toy else options.rounds):
        for turn in turns:
            given = {"peers": turn, "tensors": num_tensors, "directory": str(directory)}
            for line in figures.attempt(CASE, turn[0], __name__, 1, given, options.timeout_s):
                figures.add(CASE, line["peer"], line["what"], line["unit"], line["samples"], tensors=num_tensors)


def work() -> None:
    """Each of the peers that this process was told."""
    given = told()
    for name in given["peers"]:
        _one(name, given["tensors"], Path(given["directory"]) / name)


def _one(name: str, num_tensors: int, directory: Path) -> None:
    """Saves twice, loads twice, and looks at what lies on the disk."""
    peer, state = LOADERS[name](), _state(num_tensors)
    before = sum(tensor.nbytes for tensor in state.values())
    digest = states.digest(state)
    first = _timed(lambda: peer.begin(state, directory, 1)())
    at_first = _nbytes(directory)
    states.change(state)  # what has not changed is not written again
    digest = states.digest(state)
    later = _timed(lambda: peer.begin(state, directory, 2)())
    at_second = _nbytes(directory) - at_first
    states.clear(state)
    loads = [_timed(lambda: peer.load(state, directory, 2)) for _ in range(2)]
    assert states.digest(state) == digest, "loaded other bytes than it had saved"
    tell(peer=name, what="first save", unit="s", samples=[first])
    tell(peer=name, what="save", unit="s", samples=[later])
    tell(peer=name, what="load", unit="s", samples=loads[1:])
    for what, nbytes in (("beside the data, first step", at_first), ("beside the data", at_second)):
        tell(peer=name, what=what, unit="B per tensor", samples=[(nbytes - before) / num_tensors])
    peer.close()
    peers.remove(directory)


def _state(num_tensors: int) -> states.State:
    """Names as a model of experts has them; sizes from 4 B to 4 KB, as often in each octave."""
    generator = torch.Generator().manual_seed(0)
    sizes = (2 ** (torch.rand(num_tensors, generator=generator) * 10)).int().tolist()
    return {
        f"model.layers.{i // 64}.experts.{i % 64}.scale": torch.rand(size, generator=generator)
        for i, size in enumerate(sizes)
    }


def _timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _nbytes(directory: Path) -> int:
    """Of all files below: their lengths, not the blocks that the file system took for them."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


if __name__ == "__main__":
    work()
