"""The faults, and what becomes of a library's steps in each: one trial after another, by seeds."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.conformance import tracer
from benchmarks.conformance.lab import Lab, Place, Rank
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.outcomes import Outcome, Said


@dataclass(frozen=True)
class Trial:
    """One fault that one library met."""

    point: str
    """Where, or when."""
    said: Said | None
    """None: the fault came after the save."""
    outcome: Outcome

    def line(self) -> dict[str, str]:
        """What is to be written of it."""
        said = {} if self.said is None else {"said": self.said.name.lower()}
        found = {"found": self.outcome.found.name.lower(), "detail": self.outcome.detail}
        return {"point": self.point, **said, **found}


CONTROL = "no fault"


@dataclass(frozen=True)
class Amount:
    """How many trials of each fault."""

    calls: int = 16
    times: int = 6
    flips: int = 32
    cuts: int = 15
    sizes: int = 5
    ranks: int = 4
    puts: int = 2
    torn: int = 6


TOY = Amount(calls=2, times=2, flips=3, cuts=2, sizes=1, ranks=2, puts=1, torn=2)
OTHER_RANK_S = 10.0
"""What the rank that lives may take to say something."""
Fault = Callable[[Lab, str, Amount], Iterator[Trial]]


def unharmed(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """No fault at all: what is found here is no fault's doing."""
    with lab.place() as place:
        place.saved(library)
        yield Trial("", Said.DONE, place.resume(library))


def written_to(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """The training writes to its tensors while they are saved, as soon as the library's documentation allows."""
    if not LIBRARIES[library].is_async:
        return
    for number in range(_fewer(library, amount.torn)):
        with lab.place() as place:
            [rank] = place.savers(library)
            rank.tell("go on")
            said = said_of(rank.hear(lab.limit_s))
            rank.tell("close")
            rank.wait(lab.limit_s)
            rank.kill()
            yield Trial(f"turn {number + 1}", said, place.resume(library))


def killed_at_calls(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """SIGKILL to all processes of the job, right before a call by which its last save changes files."""
    yield from _killed_at_calls(lab, library, amount.calls, spare_helpers=False)


def trainer_killed(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """The same, but processes that the library started live on, as they do when the kernel kills one for its memory."""
    if LIBRARIES[library].has_helpers:
        yield from _killed_at_calls(lab, library, amount.times, spare_helpers=True)


def _killed_at_calls(lab: Lab, library: str, count: int, spare_helpers: bool) -> Iterator[Trial]:
    num_calls = _count_calls(lab, library)
    for call in spread(num_calls, _fewer(library, count)):
        with lab.place() as place:
            [rank] = place.savers(library)
            watch = place.trace(rank, call, spare_helpers)
            rank.tell("go")
            before = _watched(watch, rank, lab.limit_s)["before"]
            if spare_helpers:
                _await_helpers(place, lab.limit_s)
            rank.kill()
            # which of a library's threads comes first may change: it then ends before that call
            point = f"call {call} of {num_calls}: {before or 'after the last one'}"
            yield Trial(point, Said.KILLED, place.resume(library))


def _fewer(library: str, count: int) -> int:
    return count // 2 if LIBRARIES[library].is_slow else count


def _count_calls(lab: Lab, library: str) -> int:
    """Those of the last save."""
    with lab.place() as place:
        [rank] = place.savers(library)
        watch = place.trace(rank)
        rank.tell("go")
        word = rank.hear(4 * lab.limit_s)
        rank.tell("die")
        calls = int(_watched(watch, rank, lab.limit_s)["calls"])
        rank.kill()
        if word is None or word[0] != "saved":
            raise RuntimeError(f"{library} cannot save while it is watched: {word}\n{place.printed()}")
        return calls


def _watched(watch: subprocess.Popen[str], rank: Rank, limit_s: float) -> dict[str, Any]:
    """What the tracer says at the end; the process is told to die where it is not killed before."""
    word = rank.hear(4 * limit_s)
    if word is not None and word[0] != "died":
        rank.tell("die")
    said, _ = watch.communicate(timeout=4 * limit_s)
    found: dict[str, Any] = json.loads(said)
    return found


def _await_helpers(place: Place, limit_s: float) -> None:
    """Until no file changes any more."""
    end = time.monotonic() + limit_s
    before = None
    while time.monotonic() < end and (now := place.files()) != before:
        before = now
        time.sleep(1.0)


def killed_at_times(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """SIGKILL to all processes of the job, some time after its last save began; also within long writes."""
    with lab.place() as place:
        seconds = place.saved(library)
    drawn = random.Random(library)
    for _ in range(_fewer(library, amount.times)):
        after = drawn.uniform(0, 1.1 * seconds)
        with lab.place() as place:
            [rank] = place.savers(library)
            rank.tell("go")
            time.sleep(after)
            rank.kill()
            yield Trial(f"{after * 1e3:.1f} ms", Said.KILLED, place.resume(library))


def flipped(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """One bit of the last step's files is flipped. Half draw a file by its size, half take all in turn."""
    yield from _damaged(lab, library, amount.flips, _flip)


def cut(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """One file of the last step ends early, or is gone."""
    yield from _damaged(lab, library, amount.cuts, _cut)


def _damaged(lab: Lab, library: str, count: int, damage: Callable[[random.Random, Path, int], str]) -> Iterator[Trial]:
    if LIBRARIES[library].same_files_as is not None:
        return
    with lab.place() as whole:
        files = _saved_with_files(whole, library)
        drawn = random.Random(f"{library} {damage.__name__}")
        for number in range(count):
            if number % 2:
                path = drawn.choices([*files], [*files.values()])[0]
            else:
                path = [*files][number // 2 % len(files)]
            with lab.place() as place:
                place.fill_from(whole)
                point = damage(drawn, place.root / path, number)
                yield Trial(f"{path}: {point}", None, place.resume(library))


def _saved_with_files(place: Place, library: str) -> dict[Path, int]:
    """Saves all steps; sizes of the files that the last one made or changed, or that all need."""
    [rank] = place.savers(library)
    before = place.files()
    rank.tell("go")
    word = rank.hear(4 * place.lab.limit_s)
    rank.tell("close")
    ended = rank.wait(4 * place.lab.limit_s)
    rank.kill()
    if not ended or word is None or word[0] != "saved":
        raise RuntimeError(f"{library} cannot save without a fault: {word}\n{place.printed()}")
    shared = LIBRARIES[library].shared
    return {
        path: size
        for path, (size, at) in sorted(place.files().items())
        if size and (before.get(path) != (size, at) or any(fnmatch(str(path), one) for one in shared))
    }


def _flip(drawn: random.Random, path: Path, number: int) -> str:
    at, bit = drawn.randrange(path.stat().st_size), drawn.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {path.stat().st_size}"


def _cut(drawn: random.Random, path: Path, number: int) -> str:
    nbytes = path.stat().st_size
    if number % 5 == 4:
        path.unlink()
        return "gone"
    left = (drawn.randrange(nbytes), nbytes - 1, 0, nbytes // 2)[number % 5]
    os.truncate(path, left)
    return f"{left} of {nbytes} bytes left"


def full(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """The disk has room for a part of the last step only."""
    with lab.place() as place:
        more = sum(_saved_with_files(place, library).values())
    for number in range(amount.sizes):
        room = more * (number + 1) // (amount.sizes + 1)
        with lab.place() as place, _tmpfs(place.seen) as resize:
            place.temporary.mkdir()
            [rank] = place.savers(library)
            resize(_used(place.seen) + room)
            rank.tell("go")
            said = said_of(rank.hear(lab.limit_s))
            rank.kill()
            yield Trial(f"room for {room / more:.0%}", said, place.resume(library))


def said_of(word: Any) -> Said:
    """Of what a rank said of its last save."""
    if word is None:
        return Said.WAITING
    return {"saved": Said.DONE, "error": Said.ERROR, "died": Said.ERROR}[word[0]]


@contextmanager
def _tmpfs(path: Path) -> Iterator[Callable[[int], None]]:
    """A file system of its own; gives a function that changes its size. Only root may mount one."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    try:
        yield lambda size: _resize(path, size)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _resize(path: Path, nbytes: int) -> None:
    pages = -(-nbytes // resource.getpagesize())
    subprocess.run(["mount", "-o", f"remount,nr_blocks={pages}", path], check=True)


def _used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def limited(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """No file may grow beyond a part of the last step's largest one (RLIMIT_FSIZE): where no disk can be made full."""
    with lab.place() as place:
        largest = max(_saved_with_files(place, library).values())
    for number in range(amount.sizes):
        nbytes = largest * (number + 1) // (amount.sizes + 1)
        with lab.place() as place:
            [rank] = place.savers(library)
            for pid in tracer.family(rank.pid):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, nbytes))
            rank.tell("go")
            said = said_of(rank.hear(lab.limit_s))
            rank.kill()
            yield Trial(f"{nbytes / largest:.0%}", said, place.resume(library))


def can_mount() -> bool:
    """Whether `full` can run here."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("mount", "umount", "unshare"))):
        return False
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return done.returncode == 0


def rank_killed(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """Of two ranks, all processes of the second are killed right before a call of the last save."""
    if LIBRARIES[library].max_ranks < 2:
        return
    num_calls = _count_calls_of_two(lab, library)
    for call in spread(num_calls, _fewer(library, amount.ranks)):
        with lab.place() as place:
            ranks = place.savers(library, 2)
            watch = place.trace(ranks[1], call)
            for rank in ranks:
                rank.tell("go")
            before = _watched(watch, ranks[1], lab.limit_s)["before"]
            said = said_of(ranks[0].hear(OTHER_RANK_S))
            for rank in ranks:  # as a launcher does
                rank.kill()
            point = f"call {call} of {num_calls}: {before or 'after the last one'}"
            yield Trial(point, said, place.resume(library, 2))


def _count_calls_of_two(lab: Lab, library: str) -> int:
    with lab.place() as place:
        ranks = place.savers(library, 2)
        watch = place.trace(ranks[1])
        for rank in ranks:
            rank.tell("go")
        words = [rank.hear(4 * lab.limit_s) for rank in ranks]
        for rank in ranks:
            rank.tell("die")
        said, _ = watch.communicate(timeout=4 * lab.limit_s)
        for rank in ranks:
            rank.kill()
        if any(word is None or word[0] != "saved" for word in words):
            raise RuntimeError(f"{library} cannot save on two ranks: {words}\n{place.printed()}")
        return int(json.loads(said)["calls"])


def spread(num_calls: int, count: int) -> Sequence[int]:
    """Numbers from 1, the first and the last among them."""
    if num_calls <= count:
        return range(1, num_calls + 1)
    return sorted({1 + round(k * (num_calls - 1) / max(count - 1, 1)) for k in range(count)})


FAULTS: dict[str, Fault] = {
    CONTROL: unharmed,
    "killed before a call": killed_at_calls,
    "killed at a time": killed_at_times,
    "trainer killed, helpers alive": trainer_killed,
    "one bit flipped": flipped,
    "file cut or gone": cut,
    "disk full": full,
    "files limited": limited,
    "one of two ranks killed": rank_killed,
    "tensors written to": written_to,
}
