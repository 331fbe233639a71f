"""Writes a file for `torch.load`, a flat dict of tensors, in one pass. Functions of this file need torch.

`torch.save` writes from memory, so this module writes the same zip archive itself: it takes what torch puts beside the
tensors from a small archive made by torch, pickles as torch does, and appends the tensors as they are read.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from ckptlib.exporting.direct_file import DirectFile
from ckptlib.exporting.files import Item
from ckptlib.exporting.outputs import Outputs
from ckptlib.exporting.stream import converted, pieces_of, read
from ckptlib.pages import PAGE_BYTES
from ckptlib.reading.frameworks import TORCH, framework_of, torch_dtype
from ckptlib.reading.opened import CheckpointReader

ALIGNED = 64
"""The alignment that torch gives tensors in a file; large ones lie on pages, to be written from where they are."""

PICKLE_PROTOCOL = 2
"""The protocol that torch uses."""

PADDING = b"FB"
"""torch's id of the extra field that pads a member of an archive."""

MEMBER_BYTES = 30 + 20
"""Bytes of a member's header without name and padding: its fixed part, and the 64-bit sizes."""

LAYOUT = (".format_version", ".storage_alignment")
"""Members by which a reader may compute where tensors lie if torch laid them out. Left out: readers do without."""

STORAGES = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""torch's name of the storage class for each dtype, without "Storage". All other dtypes have untyped storages."""


def write_torch(
    opened: CheckpointReader,
    items: Sequence[Item],
    files: Outputs,
    name: str,
    progress: Callable[[int], None],
) -> None:
    """Writes a file of these tensors. Raises as a read does, UnsupportedState as `cast` does, OSError."""
    framework_of(TORCH)
    beside = _beside_tensors()
    pickled = _pickle(items)

    def fill(fd: int) -> None:
        with DirectFile(fd) as file:
            with zipfile.ZipFile(file, "w") as archive:  # type: ignore[call-overload]  # it writes and flushes, no more
                archive.writestr("archive/data.pkl", pickled)
                for member, data in beside.items():
                    archive.writestr(member, data)
                arrays = read(opened, pieces_of(items, opened.chunk_begins))
                for number, item in enumerate(items):
                    info = _padded(f"archive/data/{number}", file.nbytes, item.nbytes)
                    with archive.open(info, "w", force_zip64=True) as out:
                        left = item.numel
                        while left:
                            _, raw = next(arrays)
                            for some in converted(item, raw):
                                progress(out.write(some.data))
                            left -= raw.array.size
            file.finish()

    files.write(name, sum(item.nbytes for item in items), fill)


def save_into(file: DirectFile, value: object) -> None:
    """Appends `value` by `torch.save`. Raises the OSError of a failed write itself: torch's writer turns it into a
    RuntimeError about its position."""
    import torch

    try:
        torch.save(value, file)  # type: ignore[arg-type]  # it writes and flushes, no more
    except RuntimeError:
        file.finish()
        raise


def _beside_tensors() -> dict[str, bytes]:
    """Returns what torch's file of an empty dict has beside the pickle: its version, the byte order."""
    import torch

    empty = io.BytesIO()
    torch.save({}, empty)
    with zipfile.ZipFile(empty) as archive:
        names = {member: member.partition("/")[2] for member in archive.namelist()}
        kept = {member: name for member, name in names.items() if name not in ("data.pkl", *LAYOUT)}
        return {f"archive/{name}": archive.read(member) for member, name in kept.items()}


def _padded(name: str, at: int, nbytes: int) -> zipfile.ZipInfo:
    """Returns a member that begins at byte `at` of the file, padded so that its data is aligned."""
    info = zipfile.ZipInfo(name)
    begin = at + MEMBER_BYTES + len(name) + len(PADDING) + 2
    padding = -begin % (PAGE_BYTES if nbytes >= PAGE_BYTES * ALIGNED else ALIGNED)
    info.extra = PADDING + padding.to_bytes(2, "little") + bytes(padding)
    return info


class _Storage(NamedTuple):
    key: str
    kind: str
    """The name of torch's storage class."""
    size: int
    """The number of elements of that class."""


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor to be pickled as torch pickles it."""

    item: Item
    storage: _Storage


class _Pickler(pickle.Pickler):
    """Writes a `_Tensor` as torch writes a contiguous tensor."""

    @override
    def persistent_id(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, _Storage):
            return None
        return "storage", getattr(torch, obj.kind), obj.key, "cpu", obj.size

    @override
    def reducer_override(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, _Tensor):
            return NotImplemented
        shape = obj.item.shape
        strides = tuple(math.prod(max(extent, 1) for extent in shape[axis + 1 :]) for axis in range(len(shape)))
        like: Any = torch.empty(0, dtype=torch_dtype(obj.item.chosen.saved, obj.item.dtype))
        rebuild, (_, _, _, _, *rest) = like.__reduce_ex__(PICKLE_PROTOCOL)
        return rebuild, (obj.storage, 0, shape, strides, *rest)


def _pickle(items: Sequence[Item]) -> bytes:
    found = {}
    for number, item in enumerate(items):
        word = STORAGES.get(item.dtype)
        storage = _Storage(str(number), f"{word or 'Untyped'}Storage", item.nbytes if word is None else item.numel)
        found.update(dict.fromkeys((item.chosen.name, *item.chosen.ties), _Tensor(item, storage)))
    out = io.BytesIO()
    _Pickler(out, PICKLE_PROTOCOL).dump(found)
    return out.getvalue()
