"""What only a GPU can tell, in order: each check in a process of its own, the answers in one JSON file.

Checks that are in the file are not run again, so that it can be stopped and gone on with. None takes ten minutes. A
check that fails says why and is run again the next time; the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpuchecks import memory, snapshots, training

TIMEOUT_S = 590.0


def check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; needs no GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the answers")
    parser.add_argument("--only", type=int, action="append", help="the number of a check; may be repeated")
    parser.add_argument("--again", action="store_true", help="run checks that have an answer, too")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(CHECKS[options.child - 1]()))
        return 0
    chosen = [n for n in range(1, len(CHECKS) + 1) if not options.only or n in options.only]
    for number in chosen:
        print(f"{number:2}. {_says(CHECKS[number - 1])}")
    if options.dry_run:
        return 0
    if not torch.cuda.is_available():
        print("this machine has no CUDA device; --dry-run says what would be done", file=sys.stderr)
        return 1
    return _run(chosen, options.out, options.again)


def _run(chosen: list[int], out: Path, again: bool) -> int:
    answers: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    answers["machine"] = training.machine()
    failed = 0
    for number in chosen:
        name = CHECKS[number - 1].__name__
        if not again and answers.get(name, {}).get("ok"):
            print(f"{name}: has an answer")
            continue
        answers[name] = answer = _ask(number)
        failed += not answer["ok"]
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(answers, indent=1) + "\n")
        os.replace(partial, out)
        print(f"{name}: {'ok' if answer['ok'] else 'FAILED: ' + answer['error'][-300:]} ({answer['seconds']:.0f} s)")
    return min(failed, 1)


def _ask(number: int) -> dict[str, Any]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpucheck", "--child", str(number)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not done within {TIMEOUT_S:.0f} s", "seconds": time.monotonic() - began}
    seconds = time.monotonic() - began
    if done.returncode:
        return {"ok": False, "error": done.stderr[-4000:], "seconds": seconds}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"ok": not found.get("wrong"), "error": str(found.get("wrong", "")), "seconds": seconds, **found}


def _says(check: Callable[[], object]) -> str:
    return " ".join((check.__doc__ or "").split())


def benchmark() -> dict[str, Any]:
    """Runs `scripts/bench gpu`: stalls, turns with and without, and the copy's share of the link."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", "gpu"], capture_output=True, text=True, timeout=580)
    return {"output": done.stdout[-8000:], "wrong": [] if done.returncode == 0 else [done.stderr[-1500:]]}


CHECKS: list[Callable[[], dict[str, Any]]] = [
    memory.registration,
    snapshots.snapshots,
    snapshots.host_cost,
    memory.device_memory,
    snapshots.restore,
    snapshots.two_processes,
    snapshots.capture,
    snapshots.killed,
    memory.descriptors,
    benchmark,
]


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:]))
