"""The server from which tests fork processes: it has imported torch, which takes each of them three seconds else."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os

from places import ROOT, TESTS

context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Unless it runs."""
    context.set_forkserver_preload(["ckptlib.checkpointer", "pytest", "helpers.preloaded", "workers.crash_jobs"])
    before = os.environ.copy()
    path = os.pathsep.join(map(str, (TESTS, ROOT)))  # it is not given sys.path
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=path)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
