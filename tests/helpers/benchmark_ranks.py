"""The ranks of a benchmark, forked from the server that has torch; `benchmarks.common.launch` pays for torchrun."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import launch
import pytest

from benchmarks import common, figures
from benchmarks.common import Line


def fork_benchmark(
    module: str, num_ranks: int, arguments: Mapping[str, object], timeout_s: float, restarts: int = 0
) -> list[Line]:
    """As `benchmarks.common.launch`. Ranks that are started again when one dies are torchrun's own business."""
    if restarts:
        return common.launch(module, num_ranks, arguments, timeout_s, restarts)
    with tempfile.TemporaryDirectory() as directory:
        variables = {"BENCHMARK_ARGUMENTS": json.dumps(arguments), "BENCHMARK_RESULTS": directory}
        codes, output = launch.forked(module, num_ranks, timeout_s=min(timeout_s, 200), variables=variables)
        if codes != [0] * num_ranks:
            raise RuntimeError(f"{module} on {num_ranks} ranks ended with {codes}:\n{output[-8000:]}")
        return common.lines_of_ranks(Path(directory))


def fork_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of benchmarks that run in this process."""
    monkeypatch.setattr(figures, "launch", fork_benchmark)
