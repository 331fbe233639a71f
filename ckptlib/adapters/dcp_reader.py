"""DCP's StorageReader for a committed step of ckptlib, with any of its load planners."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future
from typing_extensions import override

from ckptlib.adapters.checkpoint_id import place_of
from ckptlib.errors import StateError, StateMismatch
from ckptlib.exporting.dcp_files import StandIns, leaves_of
from ckptlib.exporting.names import Naming
from ckptlib.exporting.stream import BATCH_BYTES
from ckptlib.format.box import Box
from ckptlib.reading.arrays import Raw, empty
from ckptlib.reading.frameworks import TORCH, present
from ckptlib.reading.nested import nested
from ckptlib.reading.opened import CheckpointReader
from ckptlib.reading.opened import open as open_step
from ckptlib.reading.reader import Want
from ckptlib.staging.fence import wait_for_copies
from ckptlib.state.leaf import dtype_name, is_converted, torch_dtype


class StorageReader(TorchStorageReader):
    """Reads a committed step for `torch.distributed.checkpoint.load(storage_reader=)`, with a planner of your choice.

    Only what the planner asks for is read, every chunk is compared with its digest, and nothing that was stored is
    unpickled. Optimizers that were saved as they are have the names that `get_optimizer_state_dict` gives.

    checkpoint_id: as for `ckptlib.dcp.load`.
    cast:          allow a tensor's dtype to differ from the saved one; else that raises StateMismatch.

    The steps of a load raise what `ckptlib.open` raises, which DCP puts into a CheckpointException.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        cast: bool = False,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self._storage_options = storage_options
        self._cast = cast
        self._opened: CheckpointReader | None = None
        self._saved: dict[str, str] = {}
        """A tensor's name in the step, by DCP's name."""
        self._values: dict[str, object] = {}
        """Plain values, by DCP's name."""
        self._stand_ins: StandIns | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def close(self) -> None:
        """Ends the connection to the store; a load does so by itself when it has read everything."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @override
    def read_metadata(self, *_: Any, **others: Any) -> Metadata:
        """Returns the step's content, each tensor as one chunk, as any part can be read. Reads a few documents."""
        self.close()
        url, step = place_of(self.checkpoint_id)
        opened = self._opened = _open(url, "latest" if step is None else step, self._storage_options)
        stand_ins = self._stand_ins = StandIns(opened)
        described: dict[str, Any] = {}
        paths = {}
        self._saved, self._values = {}, {}
        for leaf in leaves_of(nested(stand_ins), stand_ins, Naming(None, "", {})):
            paths[leaf.name] = leaf.path
            saved = stand_ins.saved_as(leaf.value)
            if saved is None:
                self._values[leaf.name] = leaf.value
                described[leaf.name] = BytesStorageMetadata()
            else:
                self._saved[leaf.name] = saved
                described[leaf.name] = _described(leaf.value)
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._name)
        return Metadata(described, planner_data=paths, storage_meta=meta)

    @property
    def _name(self) -> str:
        """Name of the save that is read; ranks compare it."""
        assert self._opened is not None, "read_metadata was not called"
        return str(self._opened.metadata()["name"])

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **others: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._name)

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises StateError if ranks would read different saves."""
        names = {str(plan.storage_data) for plan in plans}
        if len(names) > 1:
            raise StateError(
                f"{self.checkpoint_id}: ranks read different saves, {', '.join(sorted(names))}: one was committed, or "
                "removed, between their looks. Load again, or name a step that nobody saves now; a planner of your own "
                "must keep the storage_data of its plans"
            )
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the planner gives for each item, after checking the digests of the chunks it lies in.

        First waits for copies of a save under way.
        """
        opened = self._opened
        assert opened is not None, "read_metadata was not called"
        wait_for_copies()
        pieces: list[_Piece] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
            else:
                pieces += self._pieces(item, planner)
        for batch in _batches(pieces):
            wants = [Want(piece.saved, ((piece.box, piece.room()),)) for piece in batch]
            opened.fill(wants)
            for piece, want in zip(batch, wants, strict=True):
                piece.target.copy_(present(TORCH, piece.saved, want.pieces[0][1]))
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, name: str) -> io.BytesIO:
        """Returns a value as planners expect it: as a pickle, made here of a value that was read as data."""
        assert self._stand_ins is not None
        buffer = io.BytesIO()
        torch.save(self._stand_ins.filled(self._values[name]), buffer)
        buffer.seek(0)
        return buffer

    def _pieces(self, item: ReadItem, planner: LoadPlanner) -> Iterator[_Piece]:
        assert self._opened is not None
        saved = self._saved[item.storage_index.fqn]
        spec = self._opened.spec(saved)
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise StateMismatch(
                f"{item.dest_index.fqn}: the planner asks for {list(item.lengths)} and gives {list(target.shape)}"
            )
        dtype = torch_dtype(spec.dtype)
        if dtype != target.dtype and not (self._cast and is_converted(dtype, target.dtype)):
            allow = "cast=True does not" if self._cast else "or allow it: StorageReader(..., cast=True)"
            raise StateMismatch(
                f"{item.dest_index.fqn}: target is {dtype_name(target)}, checkpoint has {spec.dtype}; convert the "
                f"target, {allow}"
            )
        itemsize = dtype.itemsize
        for part in Box.whole(item.lengths).split(BATCH_BYTES // itemsize):
            if part.numel:
                offset = tuple(a + b for a, b in zip(item.storage_offsets, part.offset, strict=True))
                within = target[part.slices()] if part.ndim else target
                yield _Piece(saved, spec.dtype, Box(offset, part.shape), within)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


class _Piece(NamedTuple):
    """A part of a tensor that is read at once."""

    saved: str
    dtype: str
    box: Box
    """In global coordinates."""
    target: torch.Tensor

    def room(self) -> Raw:
        """Returns memory for it. Raises NoRoom."""
        return empty(self.saved, self.dtype, self.box.shape)


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yields lists of pieces that are read together, of some megabytes."""
    batch: list[_Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.target.nbytes > BATCH_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.target.nbytes
    if batch:
        yield batch


def _open(url: str, step: int | str, options: Mapping[str, object] | None) -> CheckpointReader:
    """Opens a step, with this rank's own values if it was a rank of the save, too."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    opened = open_step(url, step, TORCH, storage_options=options)
    known = opened.metadata()
    if 0 < rank < int(str(known["world_size"])):
        opened.close()
        return open_step(url, str(known["name"]), TORCH, rank=rank, storage_options=options)
    return opened


def _described(tensor: torch.Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [whole])
