"""Finds the processors that a device is plugged in beside: memory that they touch first is a hop nearer to it. No
torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYS = Path("/sys")


def processors_near(pci: str, sys: Path = SYS) -> frozenset[int]:
    """Returns the processors of the device's NUMA node; none if the host does not say, or has only one node."""
    try:
        node = int((sys / "bus/pci/devices" / pci / "numa_node").read_text())
        listed = (sys / "devices/system/node" / f"node{node}" / "cpulist").read_text()
        nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
    except (OSError, ValueError):
        return frozenset()
    return parse(listed) if len(nodes) > 1 else frozenset()


def parse(listed: str) -> frozenset[int]:
    """Returns the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextmanager
def running_on(processors: frozenset[int]) -> Iterator[None]:
    """Runs this thread on these processors, as far as it may; it stays where it is if it may run on none of them."""
    before = os.sched_getaffinity(0)
    chosen = before & processors
    if not chosen:
        yield
        return
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
