"""Real agents of torchrun, on nodes with memory of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.server_process import free_ports
from workers.peers_bench import MEMORY, Node, gold


@pytest.mark.root
def test_torchrun_restarts_the_ranks(nodes: Any, tmp_path: Path) -> None:
    """One rank is killed; torchrun ends the other, and starts both again on the same host."""
    node = nodes("node", 2, ["--standalone", "--max-restarts", "1"])
    node.wait_for("paused", 2)
    os.kill(node.told("made")[0]["pid"], signal.SIGKILL)
    nodes.gate.write_text("{}")
    found = node.wait_for("restored", 4)[2:]
    assert [(line["step"], line["in_memory"], line["received"]) for line in found] == [(5, MEMORY, 0)] * 2
    node.finish()
    assert sorted(line["digest"] for line in node.told("done")) == sorted(gold(tmp_path, "fsdp", 2, True, 12))


@pytest.mark.slow
@pytest.mark.root
def test_a_node_is_lost_and_another_takes_its_place(nodes: Any, tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def agent(name: str, is_host: int) -> Node:
        conf = f"is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=2"
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
        return nodes(name, 1, [*options, "--rdzv-conf", conf, "--max-restarts", "3"])

    first, lost = agent("first", 1), agent("lost", 0)
    first.wait_for("paused")
    lost.wait_for("paused")
    lost.lose()
    nodes.gate.write_text("{}")
    other = agent("other", 0)
    (again,) = first.wait_for("restored", 2)[1:]
    (here,) = other.wait_for("restored")
    assert (again["step"], again["in_memory"], again["received"]) == (5, MEMORY, 0)
    assert (here["step"], here["in_memory"], here["received"]) == (5, MEMORY, 1)
    first.finish()
    other.finish()
    done = [*first.told("done"), *other.told("done")]
    assert sorted(line["digest"] for line in done) == sorted(gold(tmp_path, "fsdp", 2, True, 12))


class Nodes:
    """Makes them; all ranks pause behind step 5 until the gate is there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "gates").mkdir()
        self.gate = directory / "gates" / "5"
        self.made: list[Node] = []

    def __call__(self, name: str, num_ranks: int, options: list[str]) -> Node:
        self.made.append(
            Node(
                self._directory,
                name,
                num_ranks,
                options,
                url=str(self._directory / "root"),
                hosts=["A", "B"],
                arenas={},
                total=12,
                pauses=[5],
                gates=str(self.gate.parent),
            )
        )
        return self.made[-1]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for node in nodes.made:
        node.lose()
