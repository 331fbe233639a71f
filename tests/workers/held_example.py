"""A script as it is, but held behind one optimizer step: `held_example.py <step> <root> <on | killed> <script> ...`

"on": until a step of the root is committed. "killed": then it prints the number of its process, and waits to be killed.
Step 0: not at all. As it ends, it prints how many steps this process has made.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch

import ckptlib

WAIT_S = 300.0


def main(held_at: int, root: str, then: str, script: str) -> None:
    step, made = torch.optim.AdamW.step, 0

    def held(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        found = step(self, *args, **kwargs)
        if made == held_at:
            end = time.monotonic() + WAIT_S
            while not [*ckptlib.checkpoints(root)]:
                assert time.monotonic() < end, f"{root} has no step"
                time.sleep(0.01)
            if then == "killed":
                print("held", os.getpid(), flush=True)
                signal.pause()
        return found

    torch.optim.AdamW.step = held  # type: ignore[method-assign]
    atexit.register(lambda: print(f"process {os.getpid()} made {made} steps", flush=True))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    held_at, root, then, script = sys.argv[1:5]
    sys.argv = sys.argv[4:]
    main(int(held_at), root, then, script)
