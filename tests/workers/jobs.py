"""Jobs that end in ways that need a process of their own: jobs.py KIND URL ARENA."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import torch
from helpers.inside import owe_a_save

import ckptlib
from ckptlib.policy import stop_signal


def hang(ckpt: ckptlib.Checkpointer, told: bool) -> None:
    """As in a collective that a dead rank will never join: where no signal's handler runs. `told`: to stop, before."""
    ckpt.save(8).wait_committed()
    if told:
        os.kill(os.getpid(), signal.SIGTERM)
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)


def compute() -> None:
    """As in a long call of C, where no signal's handler runs; until somebody writes a line."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)

    def end() -> None:
        sys.stdin.readline()
        libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=end).start()
    print("computes", flush=True)
    libc.pthread_mutex_lock(mutex)


def main() -> None:
    kind, url, arena = sys.argv[1:]
    stop_signal.LEFT_ALONE_S = 0.5  # far below what the tests wait
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptlib.Checkpointer(url, {"model": model, "optim": optimizer}, every=100, arena=arena) as ckpt:
        start = ckpt.restore().step
        print("start", start, flush=True)
        for step in ckpt.loop(start, start + 20):
            model(torch.randn(4, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "terminated" and step == start + 7:
                os.kill(os.getpid(), signal.SIGTERM)
            if kind in ("terminated twice", "terminated again later") and step == start + 7:
                os.kill(os.getpid(), signal.SIGTERM)
                if kind == "terminated again later":
                    stop_signal.SAME_NOTICE_S = 0.0
                os.kill(os.getpid(), signal.SIGTERM)
            if kind in ("hangs", "told, hangs") and step == start + 7:
                hang(ckpt, told=kind != "hangs")
            if kind == "computes" and step == start + 7:
                compute()
            if kind == "saves" and step == start + 7:  # as many as there are slots, and one more
                ckpt.save(6)
                ckpt.save(7)
                print("saves", flush=True)
                ckpt.save(8)
            if kind == "ends without a slot" and step == start + 19:
                ckpt.save(18)
                ckpt.save(19)
                print("last", flush=True)
            if kind == "raises" and step == start + 7:
                owe_a_save(ckpt)  # due at the step after next
            if kind == "raises" and step == start + 9:
                raise KeyError("the trainer's own trouble")
        print("ended", step + 1, ckpt.stopping, flush=True)
    print("closed", flush=True)


if __name__ == "__main__":
    main()
