"""A training whose data loader has workers: signalled_workers.py <root> <loader> <context>

Says "training" once its workers have given batches, and trains until it is told to stop. `loader`: "ours", "stateful",
"hanging" or "ending". The latter two end while an iterator with workers is still held. "hanging" is torch's own loader,
whose workers hang then, where no handler of Python's runs. "ending" is ours, with a `worker_init_fn` that is set late,
by which each worker ends a program that it starts; the trainer ends another process of the same start method. There a
forkserver gets SIGTERM, as all processes do where a scheduler tells a job to stop; workers go on.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import repeat
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

import ckptlib
from ckptlib.data import ResumableSampler, outlast_signals, resumable

STEPS = 20


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    @override
    def __getitem__(self, item: int) -> int:
        return item


class Hanging(Dataset[int]):
    """As behind a lock that another thread held as the worker was forked: at all items beyond those of the training."""

    def __len__(self) -> int:
        return 4 * STEPS

    @override
    def __getitem__(self, item: int) -> int:
        if item >= 2 * STEPS:
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return item


def end_a_program(worker: int) -> None:
    """As a data set that decodes by another program does; and gives the process a name, as setproctitle does."""
    ctypes.CDLL(None).prctl(15, b"decoder")
    program = subprocess.Popen(["sleep", "3600"])
    program.terminate()
    program.wait()


def endless(loader: Any) -> Any:
    for each in repeat(loader):
        yield from each


def main(root: str, kind: str, context: str) -> Any:
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loader: Any
    if kind == "stateful":
        loader = StatefulDataLoader(Numbers(), batch_size=2, worker_init_fn=outlast_signals, **workers)
    elif kind == "hanging":
        loader = DataLoader(Hanging(), batch_size=2, worker_init_fn=outlast_signals, **workers)
    else:
        loader = resumable(DataLoader(Numbers(), batch_sampler=ResumableSampler(8, 2), **workers))
    if kind == "ending":
        loader.loader.worker_init_fn = end_a_program
    state = {} if kind == "hanging" else {"data": loader}
    weight = torch.zeros(3)
    batches = endless(loader)
    with ckptlib.Checkpointer(root, {"weight": weight, **state}, every=10**9) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, STEPS if kind in ("ending", "hanging") else 10**9):
            weight += next(batches).sum()
            if step == 10:
                print("training", flush=True)
                if context == "forkserver":
                    os.kill(vars(forkserver._forkserver)["_forkserver_pid"], signal.SIGTERM)
    if kind == "ending":
        other: Any = multiprocessing.get_context(context)
        process = other.Process(target=time.sleep, args=(3600,))
        process.start()
        process.terminate()
        process.join()
    return batches


if __name__ == "__mp_main__":  # a worker that was spawned: as numpy starts threads where it has several cores
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if __name__ == "__main__":
    held = main(*sys.argv[1:])
    print("ended", flush=True)
