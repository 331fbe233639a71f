"""What the suite asks of a library. Imports of libraries happen in the methods.

A library that names its newest step itself is asked for that. Of the others, every step has a directory or a file of
its own, and whoever resumes takes the one with the highest number; that is what their tutorials do.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

Wait = Callable[[], None]


class Library(ABC):
    """One library in one process. Collective: all ranks make it and call it alike."""

    needs: ClassVar[str | None] = None
    """The module that must be there."""
    max_ranks: ClassVar[int] = 2
    finds_newest: ClassVar[bool] = False
    """It knows by itself which step a run goes on from."""
    imports: ClassVar[tuple[str, ...]] = ("torch.distributed.checkpoint", "torch.distributed.tensor")
    """What the process that all jobs are forked from imports once, since they would spend most of their time on it."""
    same_files_as: ClassVar[str | None] = None
    """Another one of LIBRARIES: damage to files is tried with that one only."""
    is_slow: ClassVar[bool] = False
    """It starts for seconds: it is killed half as often."""
    is_async: ClassVar[bool] = False
    """`begin` returns while the save goes on, and training may go on, too."""
    has_helpers: ClassVar[bool] = False
    """Its saves go on in processes that may outlive the trainer."""
    needs_group: ClassVar[bool] = False
    """A process group, with one rank, too."""
    finds_newest_on_s3: ClassVar[bool] = True
    """With `finds_newest`: there, too."""
    takes_s3: ClassVar[bool] = False
    """Its documentation names S3 as a place for checkpoints, and it reaches a server that is not Amazon's."""
    keeps_one: ClassVar[bool] = False
    """A new step replaces the one before."""
    pattern: ClassVar[str] = r"step-(\d+)"
    """Of the names of steps in its directory, for those who look by hand."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Of files that all steps need."""

    def __init__(self, url: str, scratch: Path, rank: int, world_size: int) -> None:
        """`url`: of a directory or of a prefix of a bucket. `scratch`: a directory of this host."""
        self.url, self.scratch, self.rank, self.world_size = url, scratch, rank, world_size

    @abstractmethod
    def begin(self, tensors: Tensors, step: int) -> Wait:
        """Saves; what it returns waits until the library says that the step is there."""

    @abstractmethod
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        """Fills `tensors`, or returns others. None: the newest, as the library finds it."""

    def held(self, tensors: Tensors) -> Tensors:
        """The training's own tensors, from which `begin` saves what `tensors` are."""
        return tensors

    def changing(self) -> AbstractContextManager[object]:
        """In which its documentation lets the training write to its tensors."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Lets go of processes and threads."""

    @classmethod
    def steps(cls, names: Iterable[str]) -> list[int]:
        """What somebody who looks into the directory would take for steps; newest first."""
        found = (re.fullmatch(cls.pattern, name) for name in names)
        return sorted({int(match[1]) for match in found if match}, reverse=True)

    @classmethod
    def why_not(cls) -> str | None:
        """Why it cannot take part."""
        if cls.needs is not None and importlib.util.find_spec(cls.needs) is None:
            return f"{cls.needs} is not installed"
        return None

    def _path(self, step: int | None) -> str:
        return f"{self.url}/step-{step}"


def done() -> None:
    """Nothing to wait for."""


def elsewhere(scratch: Path) -> Path:
    """A directory for this job on a file system in memory."""
    return Path("/dev/shm", scratch.parent.name)


def sharded(tensors: Tensors, world_size: int) -> dict[str, Any]:
    """As DTensors cut along dim 0 where there are several ranks; their memory is that of `tensors`."""
    if world_size == 1:
        return dict(tensors)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world_size,))
    return {name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for name, t in tensors.items()}


def module(tensors: Tensors) -> torch.nn.Module:
    """A module that holds them as buffers, in their own memory."""
    import torch

    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *folders, last = name.split(".")
        at = root
        for folder in folders:
            if folder not in dict(at.named_children()):
                at.add_module(folder, torch.nn.Module())
            at = at.get_submodule(folder)
        at.register_buffer(last, tensor)
    return root


def tensors_of(held: torch.nn.Module) -> Tensors:
    """What it holds now: a library may have put others in their place."""
    return dict(held.named_buffers())
