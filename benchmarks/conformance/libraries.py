"""The libraries, each used as its own documentation says. Imports of them happen in the methods.

A library that names its newest step itself is asked for that. Of the others, every step has a directory or a file of
its own, and whoever resumes takes the one with the highest number; that is what their tutorials do.
"""

from __future__ import annotations

import importlib.util
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

Wait = Callable[[], None]


class Library(ABC):
    """One library in one process. Collective: all ranks make it and call it alike."""

    needs: ClassVar[str | None] = None
    """The module that must be there."""
    package: ClassVar[str] = "torch"
    """Whose version counts."""
    max_ranks: ClassVar[int] = 2
    finds_newest: ClassVar[bool] = False
    """It knows by itself which step a run goes on from."""
    imports: ClassVar[tuple[str, ...]] = ("torch.distributed.checkpoint", "torch.distributed.tensor")
    """What the process that all jobs are forked from imports once, since they would spend most of their time on it."""
    same_files_as: ClassVar[str | None] = None
    """Another one of LIBRARIES: damage to files is tried with that one only."""
    is_slow: ClassVar[bool] = False
    """It starts for seconds: it is killed half as often."""
    has_helpers: ClassVar[bool] = False
    """Its saves go on in processes that may outlive the trainer."""
    needs_group: ClassVar[bool] = False
    """A process group, with one rank, too."""
    keeps_one: ClassVar[bool] = False
    """A new step replaces the one before."""
    pattern: ClassVar[str] = r"step-(\d+)"
    """Of the names of steps in its directory, for those who look by hand."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Of files that all steps need."""

    def __init__(self, root: Path, rank: int, world_size: int) -> None:
        self.root, self.rank, self.world_size = root, rank, world_size

    @abstractmethod
    def begin(self, tensors: Tensors, step: int) -> Wait:
        """Saves; what it returns waits until the library says that the step is there."""

    @abstractmethod
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        """Fills `tensors`, or returns others. None: the newest, as the library finds it."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Lets go of processes and threads."""

    @classmethod
    def steps(cls, root: Path) -> list[int]:
        """What somebody who looks into the directory would take for steps; newest first."""
        found = (re.fullmatch(cls.pattern, path.name) for path in root.iterdir()) if root.is_dir() else ()
        return sorted({int(match[1]) for match in found if match}, reverse=True)

    @classmethod
    def why_not(cls) -> str | None:
        """Why it cannot take part."""
        if cls.needs is not None and importlib.util.find_spec(cls.needs) is None:
            return f"{cls.needs} is not installed"
        return None

    def _path(self, step: int) -> Path:
        return self.root / f"step-{step}"


def done() -> None:
    """Nothing to wait for."""


class Ckptlib(Library):
    imports = ("torch.distributed.tensor", "ckptlib.checkpointer", "ckptlib.saving.registry")
    package = "ckptlib"
    finds_newest = True
    has_helpers = True
    shared = ("ckptlib.json", "layouts/*", "generations/*")

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import ckptlib

        ckptlib.save(self.root, self._state(tensors), step)
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        import ckptlib

        ckptlib.load(self.root, self._state(tensors), "latest" if step is None else step)
        return tensors

    @override
    def close(self) -> None:
        from ckptlib.saving.registry import registry

        registry.close()

    def _state(self, tensors: Tensors) -> dict[str, object]:
        return sharded(tensors, self.world_size)


class CkptlibAsync(Ckptlib):
    same_files_as = "ckptlib.save"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import ckptlib

        return ckptlib.save_async(self.root, self._state(tensors), step).wait_committed


class CkptlibCheckpointer(Ckptlib):
    """`restore` skips a damaged step by itself, and logs why."""

    _held: Any = None

    def _checkpointer(self, tensors: Tensors) -> Any:
        """One for a run, whose state stays where it is."""
        import ckptlib

        if self._held is None:
            self._state_held = self._state(tensors)
            self._tensors = tensors
            arena = self.root.parent / "arena"
            arena.mkdir(exist_ok=True)
            self._held = ckptlib.Checkpointer(self.root, self._state_held, every=ckptlib.Steps(1000), arena=arena)
        else:
            for name, tensor in tensors.items():
                self._tensors[name].copy_(tensor)
        return self._held

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        return self._checkpointer(tensors).save(step).wait_committed  # type: ignore[no-any-return]

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        self._checkpointer(tensors).restore(step=step)
        return tensors

    @override
    def close(self) -> None:
        if self._held is not None:
            self._held.close()


class Dcp(Library):
    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        dcp.save(sharded(tensors, self.world_size), checkpoint_id=self._path(step))
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        import torch.distributed.checkpoint as dcp

        assert step is not None
        dcp.load(sharded(tensors, self.world_size), checkpoint_id=self._path(step))
        return tensors


class DcpAsync(Dcp):
    same_files_as = "DCP save"
    needs_group = True

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(sharded(tensors, self.world_size), checkpoint_id=self._path(step))
        return lambda: future.result() and None


class TorchSave(Library):
    """One file for each rank and step, by the tutorial "Saving and Loading Models"."""

    pattern = r"step-(\d+)-rank-\d+\.pt"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch

        self.root.mkdir(exist_ok=True)
        torch.save(module(tensors).state_dict(), self._file(step))
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        import torch

        assert step is not None
        held = module(tensors)
        held.load_state_dict(torch.load(self._file(step), weights_only=True))
        return tensors_of(held)

    def _file(self, step: int) -> Path:
        return self.root / f"step-{step}-rank-{self.rank}.pt"


class TorchSaveRenamed(TorchSave):
    """What its documentation does not say and careful programs do: a temporary file, flushed, renamed."""

    same_files_as = "torch.save"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch

        self.root.mkdir(exist_ok=True)
        temporary = self._file(step).with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(module(tensors).state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file(step))
        folder = os.open(self.root, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return done


class Safetensors(Library):
    imports = ("safetensors.torch",)
    needs = "safetensors"
    package = "safetensors"
    pattern = r"step-(\d+)-rank-\d+\.safetensors"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from safetensors.torch import save_file

        self.root.mkdir(exist_ok=True)
        save_file(tensors, self._file(step))
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        from safetensors.torch import load_file

        assert step is not None
        held = module(tensors)
        held.load_state_dict(load_file(self._file(step)))
        return tensors_of(held)

    def _file(self, step: int) -> Path:
        return self.root / f"step-{step}-rank-{self.rank}.safetensors"


class Torchsnapshot(Library):
    """It knows no DTensors as torch makes them now: every rank saves its own tensors."""

    imports = ("torchsnapshot",)
    needs = "torchsnapshot"
    package = "torchsnapshot"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from torchsnapshot import Snapshot

        Snapshot.take(str(self._path(step)), {"model": module(tensors)})
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        from torchsnapshot import Snapshot

        held = module(tensors)
        Snapshot(str(self._path(step or 0))).restore({"model": held})
        return tensors_of(held)


class TorchsnapshotAsync(Torchsnapshot):
    same_files_as = "torchsnapshot take"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from torchsnapshot import Snapshot

        pending = Snapshot.async_take(str(self._path(step)), {"model": module(tensors)})
        return lambda: pending.wait() and None


class TorchCheckpointing(Library):
    """Its asynchronous default, by the configuration that its page on troubleshooting gives for a CPU."""

    imports = ("torch_checkpointing", "torch.distributed.tensor")
    is_slow = True
    needs = "torch_checkpointing"
    package = "torch-checkpointing"
    has_helpers = True
    _manager: Any = None

    def _open(self) -> Any:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        if self._manager is None:
            staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
            resharder = DefaultResharder() if self.world_size == 1 else None
            self._manager = CheckpointManager(
                CheckpointManager.Config(
                    items={"state": ItemSpec(resharder=resharder)},
                    save=AsyncCheckpointSaverConfig(staging_config=staging),
                    storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                )
            )
        return self._manager

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        future = self._open().save(str(self._path(step)), {"state": sharded(tensors, self.world_size)})
        return lambda: future.result() and None

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        self._open().load(str(self._path(step or 0)), into={"state": sharded(tensors, self.world_size)}, strict=True)
        return tensors

    @override
    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


class Nvrx(Library):
    """Its local checkpoints, each rank's own. They keep the newest step and stand before a global checkpoint."""

    imports = ("benchmarks.nvrx", "torch.distributed.tensor")
    needs = "nvidia_resiliency_ext"
    package = "nvidia-resiliency-ext"
    finds_newest = True
    needs_group = True
    keeps_one = True
    _manager: Any = None

    def _open(self) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        if self._manager is None:
            self._manager = LocalCheckpointManager(self.root)
        return self._manager

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from benchmarks.nvrx import _HostState

        self._open().save(_HostState(tensors), step)
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        if step is not None:
            raise LookupError("NVRx loads the newest local checkpoint and no other")
        manager = self._open()
        if manager.find_latest() == -1:
            return tensors
        found, _ = manager.load()
        return dict(found.held)


class Lightning(Library):
    """A Trainer's ModelCheckpoint; a run goes on by `ckpt_path="last"`. Rank 0 writes for all."""

    imports = ("benchmarks.conformance.lightning", "adlfs", "gcsfs", "s3fs")
    """It asks for the last three before it saves."""
    needs = "lightning"
    package = "lightning"
    max_ranks = 1
    finds_newest = True
    pattern = r"step=(\d+)\.ckpt"
    background: ClassVar[bool] = False

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from benchmarks.conformance import lightning

        lightning.train(self.root, tensors, step, self.background)
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        from benchmarks.conformance import lightning

        return lightning.resume(self.root, tensors, step)


class LightningAsync(Lightning):
    """Saved by AsyncCheckpointIO."""

    same_files_as = "Lightning ModelCheckpoint"
    background = True


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


LIBRARIES: dict[str, type[Library]] = {
    "ckptlib.save": Ckptlib,
    "ckptlib.save_async": CkptlibAsync,
    "ckptlib.Checkpointer": CkptlibCheckpointer,
    "DCP save": Dcp,
    "DCP async_save": DcpAsync,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot take": Torchsnapshot,
    "torchsnapshot async_take": TorchsnapshotAsync,
    "Lightning ModelCheckpoint": Lightning,
    "Lightning AsyncCheckpointIO": LightningAsync,
    "NVRx local": Nvrx,
    "torch.save": TorchSave,
    "torch.save, renamed": TorchSaveRenamed,
    "safetensors": Safetensors,
}
