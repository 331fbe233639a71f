"""How long does a load from the last of many increments take, beside one from a checkpoint that was written whole?

Two cases: a model of which a few layers change between saves, so that its chunks lie in the packs of many saves; and a
table of which few rows are touched, stored as patches, read from stores of 0.2 and 0.5 GB/s. The same state is saved
once more into a root of its own, as it is and by planes. Loads take turns; the page cache is warm.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

import ckptlib
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run

REUSE, PATCHES = "reuse only", "patches"
CASES = (REUSE, PATCHES)
NUM_LAYERS, CHANGED = 100, 3
WIDTH = 64
State = dict[str, dict[str, Tensor]]


def main(arguments: list[str]) -> None:
    run(arguments, "restore_increments", measure, gb=0.25, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in CASES:
        given = {
            "case": case,
            "nbytes": 8_000_000 if options.toy else int(options.gb * 1e9),
            "saves": 6 if options.toy else 100,
            "turns": 1 if options.toy else options.rounds,
            "directory": str(directory / case.replace(" ", "-")),
        }
        for line in figures.attempt(case, "ckptlib", __name__, 1, given, options.timeout_s):
            figures.add(case, "ckptlib", line["what"], line["unit"], [line["value"]])


def work() -> None:
    given = told()
    directory, reuse = Path(given["directory"]), given["case"] == REUSE
    directory.mkdir(parents=True)
    state = _train(directory / "increments", given["nbytes"], given["saves"], reuse)
    for codec in ("raw",) if reuse else ("raw", "planes"):
        _save(directory / codec, state, codec)
    urls = {"local": "{}"} if reuse else {f"{bps:g} GB/s": _throttled(bps) for bps in (0.2, 0.5)}
    for where, url in urls.items():
        for _ in range(given["turns"]):
            seconds = {path.name: _load(url.format(path), state) for path in sorted(directory.iterdir())}
            tell(what=f"load, {where}", unit="s", value=seconds["increments"])
            for other in seconds.keys() - {"increments"}:
                ratio = seconds["increments"] / seconds[other]
                tell(what=f"load, {where}, over that of a whole checkpoint, {other}", unit="ratio", value=ratio)


def _throttled(gb_per_s: float) -> str:
    return f"latency+file://{{}}?latency=0.005&bandwidth={gb_per_s * 1e9}"


def _train(path: Path, nbytes: int, num_saves: int, reuse: bool) -> State:
    """Saves, each after a few changes; returns the last state."""
    generator = torch.Generator().manual_seed(0)
    if reuse:
        rows = nbytes // NUM_LAYERS // (4 * WIDTH)
        layers = {f"layer{i}": torch.randn(rows, WIDTH, generator=generator) for i in range(NUM_LAYERS)}
        state: State = {"model": layers}
    else:
        rows = nbytes // (4 * WIDTH)
        state = {"model": {"table": torch.randn(rows, WIDTH, generator=generator)}}
        weights = 1.0 / torch.arange(1, rows + 1, dtype=torch.float64) ** 1.05
        hashed = torch.randperm(rows, generator=generator)
    with ckptlib.Checkpointer(path, state, every=10**9, codec="raw" if reuse else "planes") as saver:
        for step in range(1, num_saves + 1):
            if reuse:
                for i in torch.randint(0, NUM_LAYERS, (CHANGED,), generator=generator).tolist():
                    layers[f"layer{i}"].add_(1)
            else:
                ids = hashed[torch.multinomial(weights, rows // 55, replacement=True, generator=generator).unique()]
                state["model"]["table"][ids] += 0.01 * torch.randn(len(ids), WIDTH, generator=generator)
            saver.save(step).wait_committed()
    return state


def _save(path: Path, state: State, codec: str) -> None:
    with ckptlib.Checkpointer(path, state, every=10**9, codec=codec) as saver:
        saver.save(1).wait_committed()


def _load(url: str, state: State) -> float:
    """Seconds. What is loaded must be what was saved."""
    into = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    began = time.perf_counter()
    ckptlib.load(url, into)
    seconds = time.perf_counter() - began
    assert all(torch.equal(value, state["model"][name]) for name, value in into["model"].items())
    return seconds


if __name__ == "__main__":
    work()
