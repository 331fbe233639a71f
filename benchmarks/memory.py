"""How much memory does a checkpoint take beside the state? The trainer's own, beyond its slots, and the writer's.

Anonymous memory (RssAnon) and private memory of a process, sampled every 2 ms while it saves and while it loads; slots
are shared memory and counted apart. Targets are touched before the load.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peers, states
from benchmarks.common import resident_bytes, tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import LOADERS

SAMPLE_S = 0.002
SUBJECTS = ("ckptlib", "DCP", "torch.load", "safetensors")
CASE = "one rank"


def main(arguments: list[str]) -> None:
    run(arguments, "memory", measure, gb=1.0)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = 16_000_000 if options.toy else int(options.gb * 1e9)
    turns = [SUBJECTS[:2]] if options.toy else [(name,) for name in SUBJECTS]
    for _ in range(1 if options.toy else options.rounds):
        for turn in turns:
            given = {"peers": turn, "nbytes": nbytes, "directory": str(directory)}
            for line in figures.attempt(CASE, turn[0], __name__, 1, given, options.timeout_s):
                figures.add(CASE, line["peer"], line["what"], "MB", line["samples"], nbytes=nbytes)


def work() -> None:
    """Saves twice and loads twice: what is allocated once shows in the first."""
    given = told()
    state, small = states.make_state(given["nbytes"], 30), states.make_state(4096, 1)
    for name in given["peers"]:
        peer, directory = LOADERS[name](), Path(given["directory"]) / name
        peer.begin(small, directory / "small", 1)()
        peer.load(small, directory / "small", 1)
        with _peak() as peak:
            for step in (1, 2):
                states.change(state)
                peer.begin(state, directory / "large", step)()
        tell(peer=name, what="extra while saving", samples=[peak.extra / 1e6])
        with _peak() as peak:
            for _ in range(2):
                peer.load(state, directory / "large", 2)
        tell(peer=name, what="extra while loading", samples=[peak.extra / 1e6])
        writers = [resident_bytes(pid)[0] / 1e6 for pid in children("ckptlib.writer")]
        if name == "ckptlib" and writers:
            tell(peer=name, what="writer, private", samples=[max(writers)])
        peer.close()
        peers.remove(directory)


class _Peak:
    def __init__(self) -> None:
        self._before = _anonymous()
        self.extra = 0
        """Bytes beyond what there was, at most."""

    def look(self) -> None:
        self.extra = max(self.extra, _anonymous() - self._before)


@contextmanager
def _peak() -> Iterator[_Peak]:
    peak, over = _Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            peak.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _anonymous() -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "RssAnon:")


def children(text: str) -> list[int]:
    """Processes of this one whose command line holds `text`."""
    pids = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]
    return [pid for pid in pids if text.encode() in _read(Path(f"/proc/{pid}/cmdline")) and pid != os.getpid()]


def _read(path: Path) -> bytes:
    """Empty where the thread or process has ended since it was listed."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


if __name__ == "__main__":
    work()
