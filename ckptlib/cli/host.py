"""Checks a host as a job would find it: memory for slots, limits, kernel, versions, existing slots. Changes nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from ckptlib.libc import populate
from ckptlib.slots import files
from ckptlib.slots.files import MEMORY, SlotFile
from ckptlib.words import size

LEAST_FREE_BYTES = 1 << 30
"""Less free memory than this in /dev/shm holds no model worth a checkpoint; containers come with 64 MB."""


FIRST_TORCH = (2, 6)

Verdict = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    verdict: Verdict
    """bad: saves will fail."""
    found: str
    advice: str = ""
    """The remedy."""
    numbers: Mapping[str, object] = field(default_factory=dict)
    """The numbers for programs."""
    details: tuple[str, ...] = ()
    """Further lines for people."""


def checks() -> Iterator[Check]:
    """Makes all checks, the most telling first."""
    if sys.platform != "linux":
        yield Check("kernel", "bad", sys.platform, "only Linux can save; load, ls, show and verify work here")
        yield versions()
        return
    yield shared_memory(MEMORY)
    yield cgroup_memory(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    yield remove_ipc(Path("/"), os.geteuid())
    yield locked_memory()
    yield kernel()
    yield versions()
    yield from slots(files.usual())


def shared_memory(path: Path) -> Check:
    """Checks the room for slots."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Check("shared memory", "bad", f"{path}: {error.strerror}", "mount a tmpfs there for snapshots")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    numbers = {"nbytes": total, "nbytes_free": free}
    text = f"{path}: {size(free)} free of {size(total)}"
    if not os.access(path, os.W_OK):
        return Check("shared memory", "bad", f"{path} is not writable", "snapshots are created there", numbers)
    if free < LEAST_FREE_BYTES:
        advice = "each rank needs twice its share of the state: docker run --shm-size, or mount -o remount,size="
        return Check("shared memory", "warning", text, advice, numbers)
    return Check("shared memory", "ok", text, "", numbers)


def cgroup_memory(mount: Path, membership: Path) -> Check:
    """Checks the tightest limit of this process's cgroup and those above it. Files in /dev/shm count against it."""
    tightest: tuple[int, int, str] | None = None
    for directory, limit_name, usage_name in _cgroup_directories(mount, membership):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is not None and limit < 1 << 62 and (tightest is None or limit < tightest[0]):
            tightest = (limit, usage or 0, str(directory))
    if tightest is None:
        return Check("cgroup memory", "ok", "no limit")
    limit, usage, where = tightest
    numbers = {"nbytes_limit": limit, "nbytes_used": usage}
    text = f"{size(usage)} used of {size(limit)}"
    if limit - usage < LEAST_FREE_BYTES:
        advice = f"/dev/shm counts too, and the kernel kills the trainer at the limit; raise it in {where}"
        return Check("cgroup memory", "warning", text, advice, numbers)
    return Check("cgroup memory", "ok", text, "", numbers)


def _cgroup_directories(mount: Path, membership: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields directories of cgroups, innermost first, each with the names of its limit and usage files.

    v2 has one hierarchy and an empty list of controllers; v1 names the controllers.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        steps = [step for step in path.split("/") if step not in ("", "..")]
        for depth in range(len(steps), -1, -1):  # in a container, the path may be the host's; then only the top exists
            yield base.joinpath(*steps[:depth]), *names


def _number(path: Path) -> int | None:
    """Returns the number in a file; None for "max", and if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def remove_ipc(root: Path, uid: int) -> Check:
    """Checks whether logind deletes a user's files in /dev/shm when the last session ends: slots would be lost."""
    if uid < 1000:  # system users are exempt: logind.conf(5)
        return Check("RemoveIPC", "ok", f"does not concern user {uid}")
    if not (root / "run/systemd/seats").exists() and not (root / "run/systemd/sessions").exists():
        return Check("RemoveIPC", "ok", "logind does not run here")
    setting = "yes"  # its default
    files = [root / "etc/systemd/logind.conf"]
    for directory in ("usr/lib", "run", "etc"):
        files += sorted((root / directory / "systemd/logind.conf.d").glob("*.conf"))
    for file in files:
        try:
            text = file.read_text()
        except OSError:
            continue
        for value in re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", text, re.MULTILINE):
            setting = value.lower()
    if setting in ("no", "false", "off", "0"):
        return Check("RemoveIPC", "ok", "no")
    advice = "slots are deleted when your last session ends: RemoveIPC=no in logind.conf, or loginctl enable-linger"
    return Check("RemoveIPC", "warning", setting, advice)


def locked_memory() -> Check:
    """Reports the limit of locked memory. Slots, which CUDA's driver pins, do not count; RDMA's registrations do."""
    import resource  # not on Windows, where the other commands work

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= 1 << 40:
        return Check("ulimit -l", "ok", "no limit")
    return Check("ulimit -l", "ok", f"{size(soft)}; enough, unless an RDMA network needs more")


def kernel() -> Check:
    """Checks that the kernel has what makes the slots quick."""
    release = platform.release()
    area = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        populate(ctypes.addressof(ctypes.c_char.from_buffer(area)), mmap.PAGESIZE)
    except OSError:
        advice = "first snapshots are slow, since slots are mapped page by page; use Linux 5.14 or later"
        return Check("kernel", "warning", f"{release}: no MADV_POPULATE_WRITE", advice)
    return Check("kernel", "ok", f"{release}: MADV_POPULATE_WRITE")


def versions() -> Check:
    """Checks the versions of Python, ckptlib and torch. Does not import torch."""
    found = {"python": platform.python_version()}
    for package in ("ckptlib", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    numbers = [int(number) for number in re.findall(r"\d+", found["torch"])[:2]]
    if not numbers:
        return Check("versions", "warning", text, "saves and loads need torch; this command does not", found)
    if tuple(numbers) < FIRST_TORCH:
        return Check("versions", "bad", text, f"torch {'.'.join(map(str, FIRST_TORCH))} or later is needed", found)
    return Check("versions", "ok", text, "", found)


def slots(directories: Iterable[Path]) -> Iterator[Check]:
    """Checks the slots of this user: those of live jobs, and those that killed jobs left."""
    found = [*files.find(directories)]
    alive = [slot for slot in found if slot.in_use]
    abandoned = [slot for slot in found if not slot.in_use]
    if alive or not abandoned:
        text = f"{len(alive)} in use, {_sum(alive)}" if alive else "none"
        yield Check("slots", "ok", text, "", {"slots": [*map(_document, alive)]})
    if abandoned:
        advice = "their processes are gone; the next run on the same root takes them back, or remove the files:"
        yield Check(
            "slots",
            "warning",
            f"{len(abandoned)} abandoned, {_sum(abandoned)}",
            advice,
            {"slots": [*map(_document, abandoned)]},
            tuple(f"{slot.path}  {size(slot.nbytes)}  {_content(slot)}" for slot in abandoned),
        )


def _sum(slots: Iterable[SlotFile]) -> str:
    return size(sum(slot.nbytes for slot in slots))


def _document(slot: SlotFile) -> dict[str, object]:
    return {"path": str(slot.path), "nbytes": slot.nbytes, "alive": slot.in_use, "content": _content(slot)}


def _content(slot: SlotFile) -> str:
    header = slot.header
    if header is None:
        return "empty"
    state = "" if header.ready else " (unfinished)"
    return f"step {header.save.step}{state} of rank {header.rank} of {header.world_size}"
