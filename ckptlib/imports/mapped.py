"""Mapped files of a source: their bytes as tensors without being read, and names that stay inside the source."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path, PurePosixPath

import torch

from ckptlib.errors import FormatError
from ckptlib.format import dtypes


class Mapped:
    """One file, mapped for reading. The system may drop its pages at any time, so it takes no memory of its own."""

    def __init__(self, path: Path) -> None:
        """Raises FormatError if there is no such file."""
        self.path = path
        try:
            # opening a FIFO would wait
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise FormatError(f"{path}: is no file")
                self.nbytes = status.st_size
                # private and writable: torch wants memory that it could write to; nothing ever writes to it
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.nbytes else None
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error

    def bytes(self, offset: int, nbytes: int, what: str) -> bytes:
        """Returns a copy. Raises FormatError for a range that is not within the file."""
        self._check(offset, nbytes, what)
        return b"" if self._map is None else self._map[offset : offset + nbytes]

    def tensor(self, offset: int, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Returns a 1-d tensor of the file's own bytes. They may begin anywhere: `aligned` gives one to compute with.

        Raises FormatError for a range that is not within the file.
        """
        nbytes = numel * dtype.itemsize
        self._check(offset, nbytes, what)
        if not nbytes or self._map is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset).view(dtype)

    def _check(self, offset: int, nbytes: int, what: str) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise FormatError(
                f"{self.path}: {what} is said to be at [{offset}:+{nbytes}], but the file has {self.nbytes} bytes; "
                "was it copied whole?"
            )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same elements aligned for torch to compute with: in files, such as DCP's, they begin at any byte.

    The result is a contiguous copy if they do not begin at a multiple of the dtype's size.
    """
    if tensor.data_ptr() % tensor.itemsize == 0:
        return tensor
    raw = tensor.unsqueeze(-1).view(torch.uint8)
    return raw.clone(memory_format=torch.contiguous_format).view(tensor.dtype).squeeze(-1)


def inside(directory: Path, name: str) -> Path:
    """Returns the path of a file that another file names. Raises FormatError for a name that leads outside."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name:
        raise FormatError(f"{directory}: names the file {name[:200]!r}, which is not inside of it; nothing was read")
    path = directory / name
    # hubs keep files as links into another directory of theirs, so links are followed
    if not path.is_file():
        raise FormatError(f"{path}: is missing, but {directory} names it; was it copied whole?")
    return path


def dtype_named(name: str, what: str) -> torch.dtype:
    """Returns torch's dtype of this name. Raises FormatError if there is none that can be saved."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not dtypes.known(name):
        raise FormatError(f"{what}: has the dtype {name[:80]!r}, which this version of ckptlib cannot save")
    return found


def sized(shape: object, what: str) -> tuple[int, ...]:
    """Returns a shape or offset as non-negative ints whose product torch can hold. Raises FormatError."""
    numbers = strided(shape, what)
    if numel_of(tuple(filter(None, numbers))) >= 2**63:
        raise FormatError(f"{what}: {str(shape)[:200]} is no shape: no tensor has so many elements")
    return numbers


def strided(strides: object, what: str) -> tuple[int, ...]:
    """Returns strides as non-negative ints; their product has no limit. Raises FormatError."""
    numbers = tuple(strides) if isinstance(strides, (tuple, list)) else (None,)
    if len(numbers) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise FormatError(f"{what}: {str(strides)[:200]} is no shape")
    return numbers


def numel_of(shape: tuple[int, ...]) -> int:
    """Returns the exact product, whatever a file says."""
    found = 1
    for n in shape:
        found *= n
    return found
