"""A shard of the state and its place in a slot."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ckptlib.devices import accelerator
from ckptlib.state.raw_bytes import is_bytes

OVERLAP_FROM_BYTES = 64 * 1024
"""Below this size, handing a tensor over costs as much as copying it at once."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """One shard to be copied."""

    name: str
    tensor: torch.Tensor
    """This rank's box of it, in the box's shape; any strides."""
    overlap: bool
    """Whether its only writer waits at the fence, or nobody writes to it."""
    outer: torch.Tensor | None = None
    """See `Leaf.outer`."""
    lent: bool = False
    """See `Leaf.lent`."""
    frozen: bool = False
    """Whether nobody writes to it, as far as known, and it is large enough to overlap: if it does, its bytes must be
    those of the snapshot before."""


class Pair:
    """A shard and its place in a slot, with everything that a copy needs looked up once."""

    __slots__ = (
        "_target",
        "body",
        "copied",
        "device",
        "large",
        "late",
        "movable",
        "nbytes",
        "now",
        "offset",
        "source",
        "source_address",
        "target_address",
    )

    def __init__(self, source: CopySource, body: torch.Tensor, offset: int) -> None:
        tensor = source.tensor
        self.source, self.body, self.offset, self.nbytes = source, body, offset, tensor.nbytes
        self._target: torch.Tensor | None = None
        self.device = accelerator.device_of(tensor)
        self.movable = self.device is None and is_bytes(tensor)
        self.source_address, self.target_address = tensor.data_ptr(), body.data_ptr() + offset
        self.large = self.nbytes >= OVERLAP_FROM_BYTES
        self.late = source.overlap and self.large and is_bytes(tensor)
        """Whether it is copied behind the fence."""
        if self.movable and self.late:
            self.now, self.copied = (bytes_at(a, self.nbytes) for a in (self.source_address, self.target_address))

    @property
    def target(self) -> torch.Tensor:
        """The place as a tensor. Made when asked for: most shards are copied by address."""
        if self._target is None:
            self._target = self.place_in(self.body)
        return self._target

    def place_in(self, body: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """Returns the shard's place in a body that is laid out as this slot's, or with `shift` bytes less before it."""
        tensor, at = self.source.tensor, self.offset - shift
        return body[at : at + self.nbytes].view(tensor.dtype).view(tensor.shape)

    def move(self) -> None:
        """Copies by address: no dispatch, no autograd, and no thread pool that would compete with the trainer's;
        releases the GIL."""
        ctypes.memmove(self.target_address, self.source_address, self.nbytes)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Returns a view of memory, which lives as long as its tensor: the caller keeps that. It is not made by numpy,
    after which a tensor cannot be resized."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
