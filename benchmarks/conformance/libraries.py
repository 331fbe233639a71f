"""The libraries, each used as its own documentation says. Imports of them happen in the methods."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from benchmarks.conformance.library import Library, Wait, done, elsewhere, module, sharded, tensors_of

if TYPE_CHECKING:
    from benchmarks.conformance.library import Tensors


class Ckptlib(Library):
    takes_s3 = True
    imports = ("torch.distributed.tensor", "ckptlib.checkpointer", "ckptlib.saving.registry")
    finds_newest = True
    has_helpers = True
    shared = ("ckptlib.json", "layouts/*", "generations/*")

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import ckptlib

        ckptlib.save(self.url, self._state(tensors), step)
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        import ckptlib

        ckptlib.load(self.url, self._state(tensors), "latest" if step is None else step)
        return tensors

    @override
    def close(self) -> None:
        from ckptlib.saving.registry import registry

        registry.close()

    def _state(self, tensors: Tensors) -> dict[str, object]:
        return sharded(tensors, self.world_size)


class CkptlibAsync(Ckptlib):
    same_files_as = "ckptlib.save"
    is_async = True

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import ckptlib

        return ckptlib.save_async(self.url, self._state(tensors), step).wait_committed


class CkptlibCheckpointer(Ckptlib):
    """`restore` skips a damaged step by itself, and logs why."""

    is_async = True
    _held: Any = None

    @override
    def held(self, tensors: Tensors) -> Tensors:
        return self._tensors

    def _checkpointer(self, tensors: Tensors) -> Any:
        """One for a run, whose state stays where it is."""
        import ckptlib

        if self._held is None:
            self._state_held = self._state(tensors)
            self._tensors = tensors
            arena = self.scratch / "arena"
            arena.mkdir(exist_ok=True)
            self._held = ckptlib.Checkpointer(self.url, self._state_held, every=ckptlib.Steps(1000), arena=arena)
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
    takes_s3 = True

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
    is_async = True
    needs_group = True

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(sharded(tensors, self.world_size), checkpoint_id=self._path(step))
        return lambda: future.result() and None


class TorchSave(Library):
    """A file for each step, by the tutorial "Saving and Loading Models". It knows one process."""

    max_ranks = 1
    pattern = r"step-(\d+)\.pt"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch

        Path(self.url).mkdir(exist_ok=True)
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
        return Path(self.url, f"step-{step}.pt")


class TorchSaveRenamed(TorchSave):
    """What its documentation does not say and careful programs do: a temporary file, flushed, renamed."""

    same_files_as = "torch.save"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        import torch

        Path(self.url).mkdir(exist_ok=True)
        temporary = self._file(step).with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(module(tensors).state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file(step))
        folder = os.open(self.url, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return done


class Safetensors(Library):
    imports = ("safetensors.torch",)
    needs = "safetensors"
    max_ranks = 1
    pattern = r"step-(\d+)\.safetensors"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from safetensors.torch import save_file

        Path(self.url).mkdir(exist_ok=True)
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
        return Path(self.url, f"step-{step}.safetensors")


class Torchsnapshot(Library):
    """It knows no DTensors as torch makes them now: every rank saves its own tensors."""

    imports = ("torchsnapshot",)
    takes_s3 = True
    needs = "torchsnapshot"

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from torchsnapshot import Snapshot

        Snapshot.take(self._path(step), {"model": module(tensors)})
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        from torchsnapshot import Snapshot

        held = module(tensors)
        Snapshot(self._path(step)).restore({"model": held})
        return tensors_of(held)


class TorchsnapshotAsync(Torchsnapshot):
    same_files_as = "torchsnapshot take"
    is_async = True

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from torchsnapshot import Snapshot

        pending = Snapshot.async_take(self._path(step), {"model": module(tensors)})
        return lambda: pending.wait() and None


class TorchCheckpointing(Library):
    """Its asynchronous default, by the configuration that its page on troubleshooting gives for a CPU."""

    imports = ("torch_checkpointing", "torch.distributed.tensor")
    is_slow = True
    is_async = True
    needs = "torch_checkpointing"
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
        future = self._open().save(self._path(step), {"state": sharded(tensors, self.world_size)})
        return lambda: future.result() and None

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        self._open().load(self._path(step), into={"state": sharded(tensors, self.world_size)}, strict=True)
        return tensors

    @override
    def changing(self) -> AbstractContextManager[object]:
        return self._open().lock()  # type: ignore[no-any-return]

    @override
    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


class Nvrx(Library):
    """Its local checkpoints, each rank's own. They keep the newest step and stand before a global checkpoint."""

    imports = ("benchmarks.nvrx", "torch.distributed.tensor")
    needs = "nvidia_resiliency_ext"
    finds_newest = True
    needs_group = True
    keeps_one = True
    _manager: Any = None

    def _open(self) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        if self._manager is None:
            self._manager = LocalCheckpointManager(self.url)
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
    max_ranks = 1
    finds_newest = True
    finds_newest_on_s3 = False  # 2.6.6 looks for what it lists in a bucket on the local disk, and begins anew
    takes_s3 = True
    pattern = r"step=(\d+)\.ckpt"
    background: ClassVar[bool] = False

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        from benchmarks.conformance import lightning

        lightning.train(self.url, tensors, step, self.background)
        return done

    @override
    def load(self, tensors: Tensors, step: int | None) -> Tensors:
        from benchmarks.conformance import lightning

        return lightning.resume(self.url, tensors, step)


class LightningAsync(Lightning):
    """Saved by AsyncCheckpointIO."""

    same_files_as = "Lightning ModelCheckpoint"
    background = True


class LightningTmpElsewhere(Lightning):
    """Where TMPDIR is on another file system than the checkpoints, as on most clusters: there a file cannot be renamed
    into its place."""

    same_files_as = "Lightning ModelCheckpoint"
    takes_s3 = False

    @override
    def begin(self, tensors: Tensors, step: int) -> Wait:
        folder = elsewhere(self.scratch)
        folder.mkdir(exist_ok=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        return super().begin(tensors, step)


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
    "Lightning, TMPDIR elsewhere": LightningTmpElsewhere,
    "NVRx local": Nvrx,
    "torch.save": TorchSave,
    "torch.save, renamed": TorchSaveRenamed,
    "safetensors": Safetensors,
}
