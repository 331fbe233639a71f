"""Starts a script of tests/workers on several ranks, for tests whose claim is about ranks."""

from __future__ import annotations

import os
import subprocess
import sys

from places import TESTS, WORKERS


def environment() -> dict[str, str]:
    """Of a worker: it finds the tests' own modules, and leaves the other cores to the other ranks."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def torchrun(script: str, num_ranks: int, *args: object, timeout_s: float) -> str:
    """Both outputs of all ranks. Raises AssertionError with them when a rank fails, or when not all end in time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    process = subprocess.Popen(
        [*command, str(WORKERS / script), *map(str, args)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s + 10)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which have sessions of their own
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"{script} did not end within {timeout_s:.0f} s:\n{output[-20000:]}") from None
    assert process.returncode == 0, output[-20000:]
    return output
