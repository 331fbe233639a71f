"""What the checks train, and where they run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

import torch

GIB = 1 << 30

SCALE = float(os.environ.get("CKPTLIB_GPU_CHECK_SCALE", "1"))
"""Of the states that are saved: less for a machine whose memory is slow when it is first used."""


def gib(number: float) -> int:
    return int(number * SCALE * GIB)


def machine() -> dict[str, Any]:
    """Whose answers they are."""
    found: dict[str, Any] = {"host": platform.platform(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError as error:
        return str(error)


def seconds(call: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_child(
    module: str, function: str, *arguments: object, env: dict[str, str] | None = None, timeout: float = 280
) -> Any:
    """What a function of a module returns, called in a process of its own."""
    code = f"import json, {module} as g; print(json.dumps(g.{function}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Training:
    """Layers with AdamW, of about so many bytes; every number follows from the step."""

    def __init__(self, nbytes: int, num_tensors: int = 48, seed: int = 0) -> None:
        torch.manual_seed(seed)
        each = max(nbytes // 12 // num_tensors, 16)
        self.params = [torch.nn.Parameter(torch.randn(each, device="cuda")) for _ in range(num_tensors)]
        self.model = torch.nn.ParameterList(self.params)
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        for n, p in enumerate(self.params):
            p.grad = torch.full_like(p, 0.1 * (n + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        found = hashlib.sha256()
        for p in self.params:
            for tensor in (p.detach(), *self.optimizer.state[p].values()):
                found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()
