"""Who reads a spoiled root, each in a process of its own, and what that took."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from hostile_root import Body, Root, dumps

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.finishing import finish_saves
from ckptlib.cli.app import run
from ckptlib.errors import CkptError, UnsupportedState
from ckptlib.format import values
from ckptlib.format.keys import GenerationId
from ckptlib.stores.local import LocalStore

LIMIT_S = 20
"""Processor time after which a reader is killed."""

LIMIT_BYTES = 2**31
"""Address space above what the process had, after which memory runs out."""

# Who reads


def consumers(root: Root) -> dict[str, Callable[[], object]]:
    url = str(root.path)
    catalog = Catalog(LocalStore(url))
    target = lambda: {"w": target_of(root.target)}  # noqa: E731
    return {
        "ls": lambda: run(["ls", url, "--all"]),
        "show": lambda: run(["show", url, "--tensors", "*", "--values"]),
        "show --json": lambda: run(["show", url, "--tensors", "*", "--values", "--json"]),
        "verify": lambda: run(["verify", url, "--all"]),
        "gc": lambda: run(["gc", url, "--keep-last", "1", "--dry-run"]),
        "checkpoints": lambda: list(ckptlib.checkpoints(url)),
        "load": lambda: ckptlib.load(url, target(), strict=False),
        "load all": lambda: ckptlib.load(url, {}, strict=False),
        "load object": lambda: from_deep(300, lambda: ckptlib.load(url, {"a": Thing()}, strict=False)),
        "values": lambda: read_values(root, url),
        "failed": lambda: raise_if_failed(catalog, root.other),
        "restore": lambda: restore(root, target()),
        "finish": lambda: finish(root, url),
    }


class Thing:
    """An object with a state."""

    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def from_deep(depth: int, call: Callable[[], object]) -> object:
    """As programs do, with frames of their own below."""
    return from_deep(depth - 1, call) if depth else call()


def target_of(shape: list[int]) -> object:
    if np.prod([float(max(n, 1)) for n in shape]) < 2**20:
        return torch.zeros(shape)
    if not 0 < np.prod([float(n) for n in shape]) <= 2**60:
        return torch.zeros(1)
    return ckptlib.Sharded(torch.zeros([1] * len(shape)), [0] * len(shape), shape)


def restore(root: Root, state: Body) -> None:
    arena = root.path.parent / "arena"
    arena.mkdir(exist_ok=True)
    with ckptlib.Checkpointer(root.path, state, every=10**6, arena=arena) as checkpointer:
        try:
            checkpointer.restore(strict=False)
        except UnsupportedState as error:
            raise AssertionError("the step before is not tried") from error


def finish(root: Root, url: str) -> None:
    """The next job commits what is whole."""
    (root.path / root.save.manifest_key).unlink(missing_ok=True)
    finish_saves(Catalog(LocalStore(url)), GenerationId(9, "0" * 8))


def read_values(root: Root, url: str) -> None:
    catalog = Catalog(LocalStore(url))
    for name in catalog.manifest(root.save).parts:
        for value in catalog.part(name).values.values():
            values.decode(value)


def in_child(what: str, readers: dict[str, Callable[[], object]]) -> Iterator[dict[str, object]]:
    """How each of them ends, one after the other, in a process that is forked for them. Nothing here has threads."""
    out, into = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (address_space + LIMIT_BYTES,) * 2)
        for reader, call in readers.items():
            used = time.process_time()
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + LIMIT_S, resource.RLIM_INFINITY))
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            ended = outcome(call)
            told = {"what": what, "reader": reader, "ended": ended, "seconds": round(time.process_time() - used, 3)}
            os.write(into, dumps({**told, "mb": resident("VmHWM") - before}).encode() + b"\n")
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as lines:
        found = [json.loads(line) for line in lines]
    _, status = os.waitpid(pid, 0)
    yield from found
    if len(found) < len(readers):
        reader = [*readers][len(found)]
        ended = f"! killed by signal {os.WTERMSIG(status)}"
        yield {"what": what, "reader": reader, "ended": ended, "seconds": float(LIMIT_S), "mb": 0}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (CkptError, SystemExit) as error:
        return type(error).__name__
    except BaseException as error:  # a traceback, in whatever form, is what is looked for
        return f"! {type(error).__name__}: {str(error)[:200]}"
    return "good"


def resident(name: str) -> int:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024
