"""Reads a step into tensors: on the host, or through pinned buffers onto devices."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from ckptlib.devices import accelerator
from ckptlib.loading.landing import Landing
from ckptlib.reading import requests
from ckptlib.reading.reader import StepReader
from ckptlib.reading.requests import WHOLE, ByteCopy, ChunkRead, Target, move_out, thread_buffer
from ckptlib.state.leaf import dtype_name, torch_dtype
from ckptlib.state.raw_bytes import bytes_of, copyable, is_bytes


class TensorTarget(Target):
    """A tensor to be filled."""

    __slots__ = ("_flat", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        is_row_major = tensor.is_contiguous()
        on_host = is_row_major and accelerator.device_of(tensor) is None
        address = tensor.data_ptr() if on_host and is_bytes(tensor) else None
        super().__init__(tensor, dtype_name(tensor), tensor.numel(), is_row_major, address)
        self._tensor = tensor
        self._flat: torch.Tensor | None = None

    @override
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._tensor.view(-1)
        return self._flat


class Landed(NamedTuple):
    """A stretch that was read into a buffer, to be copied to a device."""

    at: int
    """Its first byte in the buffer."""
    copy: ByteCopy


class TensorLanding(requests.Landing):
    """Places bytes for the host chunk by chunk, and bytes for a device buffer by buffer."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._devices = Landing(tensors)
        self._local = threading.local()

    @override
    def buffer(self, nbytes: int, reads: Sequence[ChunkRead]) -> memoryview:
        if not self._devices.needed:
            return thread_buffer("placed", nbytes)
        self._local.landed = {}
        device = next((d for read in reads for copy in read.copies if (d := self._device(copy))), None)
        return thread_buffer("placed", nbytes) if device is None else self._devices.buffer(nbytes, device)

    def _device(self, copy: ByteCopy) -> torch.device | None:
        return self._devices.device(_tensor_of(copy))

    @override
    @torch.inference_mode()  # otherwise a target made in inference mode, such as a whole model, could not be written to
    def place(self, read: ChunkRead, data: memoryview, start: int) -> None:
        move_out(read, data)
        for copy in read.copies:
            device = self._device(copy)
            if device is None:
                self.put(copy, data[copy.first : copy.first + copy.nbytes])
            else:
                landed: dict[torch.device, list[Landed]] = self._local.landed
                landed.setdefault(device, []).append(Landed(start + copy.first, copy))

    @override
    def put(self, copy: ByteCopy, data: memoryview) -> None:
        _cut_into(torch.frombuffer(data, dtype=torch.uint8), copy)

    @override
    def finish(self, buffer: memoryview) -> None:
        if self._devices.needed:
            for device, copies in self._local.landed.items():
                with self._devices.on(device):
                    _land(torch.frombuffer(buffer, dtype=torch.uint8), copies, device)

    @override
    def close(self) -> None:
        """Waits until copies to devices have arrived."""
        self._devices.close()


class Reader(StepReader[torch.Tensor]):
    """Reads one step for one rank, into tensors."""

    @override
    def target(self, memory: torch.Tensor) -> Target:
        return TensorTarget(memory)

    @override
    def landing(self, memory: Iterable[torch.Tensor]) -> requests.Landing:
        return TensorLanding(memory)


def _tensor_of(copy: ByteCopy) -> torch.Tensor:
    assert isinstance(copy.target, torch.Tensor)
    return copy.target


@torch.inference_mode()
def _land(buffer: torch.Tensor, copies: list[Landed], device: torch.device) -> None:
    """Copies from a pinned buffer to a device, on the current stream.

    Copies in one piece, unless it is for one tensor that takes it as it is. The device does the rest: the host would
    cast a differing dtype first.
    """
    if len(copies) == 1:
        at, copy = copies[0]
        target = _tensor_of(copy)[copy.outside]
        if copy.inside == WHOLE and torch_dtype(copy.dtype) == target.dtype and is_bytes(target):
            bytes_of(target).copy_(buffer[at : at + copy.nbytes], non_blocking=True)
            return
    first, stop = min(each.at for each in copies), max(each.at + each.copy.nbytes for each in copies)
    landed = torch.empty(stop - first, dtype=torch.uint8, device=device)
    landed.copy_(buffer[first:stop], non_blocking=True)
    for at, copy in copies:
        stretch = landed[at - first : at - first + copy.nbytes]
        aligned = stretch.storage_offset() % torch_dtype(copy.dtype).itemsize == 0
        _cut_into(stretch if aligned else stretch.clone(), copy)


def _cut_into(stretch: torch.Tensor, copy: ByteCopy) -> None:
    """Copies the wanted part of a stretch of a chunk, whose bytes are on the target's device."""
    source = stretch.view(torch_dtype(copy.dtype)).view(copy.shape)[copy.inside]
    target = _tensor_of(copy)[copy.outside]
    if source.dtype == target.dtype and source.is_contiguous() and is_bytes(target):
        # dtypes that torch cannot copy element by element are bytes all the same
        bytes_of(target).copy_(bytes_of(source))
    elif source.dtype == target.dtype:
        copyable(target).copy_(copyable(source))
    else:
        target.copy_(source)
