"""Which processors are beside a device, by a /sys of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptlib.devices.numa import parse, processors_near, running_on

PCI = "0000:3b:00.0"


@pytest.mark.parametrize(
    ("listed", "found"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_lists(listed: str, found: set[int]) -> None:
    assert parse(listed) == found


def make(sys: Path, node: str, num_nodes: int = 2) -> Path:
    (sys / "bus/pci/devices" / PCI).mkdir(parents=True)
    (sys / "bus/pci/devices" / PCI / "numa_node").write_text(node)
    for n in range(num_nodes):
        (sys / "devices/system/node" / f"node{n}").mkdir(parents=True)
        (sys / "devices/system/node" / f"node{n}" / "cpulist").write_text(f"{4 * n}-{4 * n + 3}\n")
    return sys


def test_a_device_on_the_second_node(tmp_path: Path) -> None:
    assert processors_near(PCI, make(tmp_path, "1\n")) == {4, 5, 6, 7}


@pytest.mark.parametrize(("node", "num_nodes"), [("-1\n", 2), ("0\n", 1), ("", 2), ("7\n", 2)])
def test_where_the_host_does_not_say(tmp_path: Path, node: str, num_nodes: int) -> None:
    assert processors_near(PCI, make(tmp_path, node, num_nodes)) == frozenset()
    assert processors_near("0000:00:00.0", tmp_path) == frozenset()


def test_a_thread_goes_back_to_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with running_on(frozenset({one, 10_000})):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    with running_on(frozenset({10_000})):
        assert os.sched_getaffinity(0) == before
