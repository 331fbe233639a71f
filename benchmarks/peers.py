"""The libraries that ckptlib is measured against, each used as its own documentation says.

A state is a flat dict of tensors, DTensors where there are several ranks. Every save is durable when it is waited for:
where a library does not flush what it wrote, `flush` does it for it, and its name ends in "+fsync". Imports happen
inside the classes, so that a process pays only for the peer that it runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.states import State, local, rank

Wait = Callable[[], None]


class Peer(ABC):
    """One library. Collective: all ranks make it and call it alike."""

    needs: str | None = None
    """The module that must be installed."""
    max_ranks: int | None = None
    """It is not made for more."""

    @abstractmethod
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        """Saves, and blocks as long as training would be blocked; call the result to wait until it is durable."""

    def wait_staged(self) -> None:  # noqa: B027  (most have copied all when `begin` returns)
        """Returns when what was begun last has been copied, and the state may be written to."""

    def load(self, state: State, directory: Path, step: int) -> None:
        """Fills `state` in place."""
        raise NotImplementedError(f"{type(self).__name__} does not load in this benchmark")

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Lets go of processes and threads."""


def done() -> None:
    """Nothing more to wait for."""


def path_of(directory: Path, step: int) -> Path:
    """A directory of its own for each step."""
    path = directory / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def flush(directory: Path) -> None:
    """What a save needs to survive a power loss: every file and directory flushed."""
    for path in [directory, *directory.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def barrier() -> None:
    """A step exists when all ranks have written their share."""
    if dist.is_initialized():
        dist.barrier()


def start() -> None:
    """Joins the other ranks, where there are any."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")


class Ckptlib(Peer):
    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        import ckptlib

        ckptlib.save(directory, state, step)
        return done

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        import ckptlib

        ckptlib.load(directory, state, step)


class CkptlibAsync(Ckptlib):
    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        import ckptlib

        return ckptlib.save_async(directory, state, step).wait_committed


class CkptlibDcp(Peer):
    """The drop-in for DCP, as `stall` takes checkpoints by it: each a step of one root."""

    def __init__(self) -> None:
        self.overlap: torch.optim.Optimizer | None = None
        """Whose tensors are copied beside the training."""
        self._wait_copied: Wait = done

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        from ckptlib import dcp

        future = dcp.async_save(state, checkpoint_id=directory / f"step-{step}", overlap=self.overlap)
        self._wait_copied = future.wait_copied
        return lambda: _result(future)

    @override
    def wait_staged(self) -> None:
        self._wait_copied()

    @override
    def close(self) -> None:
        from ckptlib.saving.registry import registry

        registry.close()


class TorchSave(Peer):
    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        path = path_of(directory, step)
        with (path / f"rank-{rank()}.pt").open("wb") as file:
            torch.save(local(state), file)
            file.flush()
            os.fsync(file.fileno())
        barrier()
        return done

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        self._fill(state, torch.load(path_of(directory, step) / f"rank-{rank()}.pt"))

    def _fill(self, state: State, loaded: State) -> None:
        with torch.no_grad():
            for name, tensor in local(state).items():
                tensor.copy_(loaded.pop(name))


class TorchSaveMapped(TorchSave):
    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        self._fill(state, torch.load(path_of(directory, step) / f"rank-{rank()}.pt", mmap=True))


class Safetensors(TorchSave):
    needs = "safetensors"

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        from safetensors.torch import save_file

        file = path_of(directory, step) / f"rank-{rank()}.safetensors"
        save_file(local(state), file)
        _sync(file)
        barrier()
        return done

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        from safetensors.torch import load_file

        self._fill(state, load_file(path_of(directory, step) / f"rank-{rank()}.safetensors"))


class Dcp(Peer):
    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=directory / f"step-{step}", no_dist=not dist.is_initialized())
        return done

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(state, checkpoint_id=directory / f"step-{step}", no_dist=not dist.is_initialized())


class DcpAsync(Dcp):
    """With a gloo group of its own: on the trainer's, a background save under FSDP2 hangs."""

    processes = False

    def __init__(self) -> None:
        if not dist.is_initialized():  # async_save has no other way
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        self._group = dist.new_group(backend="gloo")

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self.processes else AsyncCheckpointerType.THREAD
        future = dcp.async_save(
            state, checkpoint_id=directory / f"step-{step}", process_group=self._group, async_checkpointer_type=kind
        )
        return lambda: _result(future)


class DcpAsyncProcess(DcpAsync):
    processes = True


def _result(future: object) -> None:
    future.result()  # type: ignore[attr-defined]
    barrier()


class TorchCheckpointing(Peer):
    """Its defaults ask for CUDA, and for direct I/O, which fails for lengths that are not whole pages.

    With several ranks, the metadata that resharding needs is gathered on CUDA devices; without one, it goes without.
    """

    needs = "torch_checkpointing"
    flushes = True

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        reshards = not dist.is_initialized() or torch.cuda.is_available()
        on_gpu = torch.cuda.is_available()
        staging = CheckpointStagerConfig(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={"state": ItemSpec(resharder=DefaultResharder() if reshards else None)},
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        path = directory / f"step-{step}"
        future = self._manager.save(str(path), {"state": state})

        def wait() -> None:
            if future is not None:
                future.result()
            barrier()
            if self.flushes:
                if rank() == 0:
                    flush(path)
                barrier()

        return wait

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        self._manager.load(str(directory / f"step-{step}"), into={"state": state}, strict=True)

    @override
    def wait_staged(self) -> None:
        with self._manager.lock():
            pass

    @override
    def close(self) -> None:
        self._manager.close()


class TorchCheckpointingUnflushed(TorchCheckpointing):
    """As it comes: flushing is left to the kernel."""

    flushes = False


class Torchsnapshot(Peer):
    """Knows no DTensors, as torch makes them now: every rank saves its own tensors, which cannot be resharded."""

    needs = "torchsnapshot"

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        from torchsnapshot import Snapshot, StateDict

        path = directory / f"step-{step}"
        Snapshot.take(str(path), {"state": StateDict(**local(state))})
        if rank() == 0:
            flush(path)
        barrier()
        return done

    @override
    def load(self, state: State, directory: Path, step: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot(str(directory / f"step-{step}")).restore({"state": StateDict(**local(state))})


class LightningAsync(Peer):
    """Writes one file from one rank: FSDP goes through DCP there."""

    needs = "lightning"
    max_ranks = 1

    @override
    def begin(self, state: State, directory: Path, step: int) -> Wait:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        path = path_of(directory, step)
        plugin = AsyncCheckpointIO(TorchCheckpointIO())
        plugin.save_checkpoint(state, str(path / "all.ckpt"))

        def wait() -> None:
            plugin.teardown()
            flush(path)

        return wait


PEERS: dict[str, type[Peer]] = {
    "ckptlib": Ckptlib,
    "ckptlib async": CkptlibAsync,
    "DCP": Dcp,
    "DCP async thread": DcpAsync,
    "DCP async process": DcpAsyncProcess,
    "torch.save+fsync": TorchSave,
    "safetensors+fsync": Safetensors,
    "torch_checkpointing+fsync": TorchCheckpointing,
    "torchsnapshot+fsync": Torchsnapshot,
    "lightning async+fsync": LightningAsync,
}

LOADERS: dict[str, type[Peer]] = {
    "ckptlib": Ckptlib,
    "DCP": Dcp,
    "torch.load": TorchSave,
    "torch.load mmap": TorchSaveMapped,
    "safetensors": Safetensors,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": Torchsnapshot,
}


def why_not(peer: type[Peer], num_ranks: int) -> str | None:
    """Why a peer cannot take part; None when it can be tried."""
    if peer.needs is not None and importlib.util.find_spec(peer.needs) is None:
        return f"{peer.needs} is not installed"
    if peer.max_ranks is not None and num_ranks > peer.max_ranks:
        return f"is made for {peer.max_ranks} rank"
    return None


def remove(directory: Path) -> None:
    """What one measurement left, so that the next one finds the disk as empty."""
    shutil.rmtree(directory, ignore_errors=True)
