"""How long does one tensor of 64 MiB take out of a large checkpoint, where there is no torch, beside a bare read of it?

A checkpoint of one rank with 1,000 tensors. A process in which torch cannot be imported opens it and reads one tensor;
imports are done before. The bare read is a `pread` of as many bytes of the same pack into fresh memory, in the same
process, before or after it. Amplification: all bytes that the process read, documents included, over the tensor's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from benchmarks.common import tell, told
from benchmarks.exports import set_cache
from benchmarks.figures import Figures, Options, run

SUBJECT, BARE = "ckptlib", "bare read"
NUM_LARGE, NUM_SMALL = 30, 970
LARGE_BYTES = 64 * 1024 * 1024


def main(arguments: list[str]) -> None:
    run(arguments, "open_one", measure, gb=4.0, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    given = {"toy": options.toy, "gb": options.gb, "directory": str(directory)}
    figures.attempt("-", SUBJECT, __name__, 1, {**given, "what": "make"}, options.timeout_s)
    for turn in range(1 if options.toy else options.rounds):
        for cache in ("cold", "warm"):
            asked = {**given, "what": "read", "cold": cache == "cold", "bare_first": turn % 2 == 0}
            for line in figures.attempt(cache, SUBJECT, __name__, 1, asked, options.timeout_s):
                figures.add(cache, SUBJECT, "open and read", "s", [line["seconds"]])
                figures.add(
                    cache, SUBJECT, "open and read, beyond the bare read", "s", [line["seconds"] - line["bare_s"]]
                )
                figures.add(cache, SUBJECT, "amplification", "ratio", [line["amplification"]])
                figures.add(cache, BARE, "read", "s", [line["bare_s"]])


def work() -> None:
    given = told()
    root = Path(given["directory"]) / "root"
    if given["what"] == "make":
        _make(root, 0.01 if given["toy"] else given["gb"], given["toy"])
        return
    sys.meta_path.insert(0, NoTorch())
    ckptlib = importlib.import_module("ckptlib")
    for module in ("ckptlib.reading.opened", "ckptlib.stores.local"):
        importlib.import_module(module)
    packs = sorted(root.rglob("*.*"))
    found: dict[str, float] = {}

    def bare() -> None:
        pack = max(packs, key=lambda path: path.stat().st_size)
        fd, nbytes = os.open(pack, os.O_RDONLY), min(LARGE_BYTES, pack.stat().st_size)
        buffer, done = memoryview(bytearray(nbytes)), 0
        while done < nbytes:
            done += os.preadv(fd, [buffer[done:]], done)
        os.close(fd)

    def one() -> None:
        before = _bytes_read()
        with ckptlib.open(root, framework="numpy") as step:
            tensor = step.get_tensor("model/large.7")
        found["amplification"] = (_bytes_read() - before) / tensor.nbytes

    turns: Sequence[tuple[str, Callable[[], None]]] = [("bare_s", bare), ("seconds", one)]
    for name, run_one in turns if given["bare_first"] else turns[::-1]:
        for path in packs:
            if path.is_file():
                set_cache(path, given["cold"])
        began = time.perf_counter()
        run_one()
        found[name] = time.perf_counter() - began
    assert "torch" not in sys.modules
    tell(**found)


class NoTorch(importlib.abc.MetaPathFinder):
    """As if it were not installed."""

    @override
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


def _bytes_read() -> int:
    """By all calls of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _make(root: Path, gb: float, toy: bool) -> None:
    torch, ckptlib = importlib.import_module("torch"), importlib.import_module("ckptlib")
    large = LARGE_BYTES // 64 if toy else LARGE_BYTES
    small = 4096 if toy else max(4096, (int(gb * 1e9) - NUM_LARGE * large) // NUM_SMALL)
    model = {f"large.{i}": torch.randn(large // 4096, 1024) for i in range(NUM_LARGE)}
    model |= {f"small.{i}": torch.randn(small // 4096, 1024) for i in range(NUM_SMALL)}
    ckptlib.save(root, {"model": model}, step=1)


if __name__ == "__main__":
    work()
