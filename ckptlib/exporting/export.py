"""Exports a step, or a part of it, as files for other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptlib.exporting.casting import dtype_of, target_of
from ckptlib.exporting.direct_file import DirectFile
from ckptlib.exporting.files import INDEX, FilePlan, Item, cut, index_of, parse_size, plan_file, shard_names
from ckptlib.exporting.names import Naming
from ckptlib.exporting.outputs import Outputs, outputs
from ckptlib.exporting.stream import write
from ckptlib.reading.opened import CheckpointReader, open
from ckptlib.stores import is_url

SAFETENSORS, HF, TORCH, DCP = "safetensors", "hf", "torch", "dcp"
FORMATS = (SAFETENSORS, HF, TORCH, DCP)

_ENDS = {SAFETENSORS: (".safetensors",), TORCH: (".pt", ".pth", ".bin", ".ckpt")}
"""File name suffixes by which other libraries take a file for one of this format."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    step: int
    format: str
    files: tuple[Path, ...]
    """The files, the index last if there is one."""
    num_tensors: int
    nbytes: int
    """Bytes of all tensors, as they are in the files."""
    nbytes_read: int
    """Bytes read from the checkpoint's packs."""
    ties: Mapping[str, str]
    """Further names of tied weights, each with the name that holds the data."""
    rounded: Mapping[str, float]
    """The tensors that the checkpoint itself has rounded; see `LoadReport.rounded`."""


def export(
    url: str | Path,
    out: str | Path,
    step: int | str = "latest",
    *,
    format: str = SAFETENSORS,
    only: str | Sequence[str] | None = None,
    strip: str = "",
    map: Mapping[str, str] | None = None,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    storage_options: Mapping[str, object] | None = None,
) -> ExportReport:
    """Writes tensors of a committed step into files that other libraries read.

        ckptlib.export("s3://bucket/run7", "gpt", format="hf", only="model", strip="model/", dtype="bf16")

    Takes memory for some buffers, however large the tensors are. Every chunk is compared with its digest on the way. A
    file has its name only when all of it is durable, and an index is written last. What is there is never overwritten.

    format:  "safetensors": one file. "hf": a directory as transformers reads it, in files of at most `max_shard_size`,
             with an index where there are several. "torch": one file with a flat dict for `torch.load`; needs torch.
             "dcp": a directory for `torch.distributed.checkpoint`, nested as the state was, with plain values; needs
             torch.
    only:    names, path prefixes or patterns of the checkpoint, as for `ckptlib.load`. Default: all tensors but the RNG
             state.
    strip:   a prefix that names lose, such as "model/".
    map:     from a name, or its beginning up to a "/" or ".", to what the files have instead; after `strip`.
    dtype:   "bf16", "fp16" or "fp32": what floating-point tensors of 16 to 64 bits are converted to.

    Weights that are tied are written once, under their first name; a file's metadata tells the others. Plain values are
    exported to "dcp" only. Of tensors that each rank had its own, rank 0's are. Raises as `ckptlib.open` does;
    StateMismatch and UnsupportedState by name; ObjectExists, NoRoom.
    """
    path = local_path(out, format)
    naming = Naming([only] if isinstance(only, str) else only, strip, map or {})
    with open(url, step, "numpy", storage_options=storage_options) as opened:
        order = ExportOrder(format, naming, dtype_of(dtype), parse_size(max_shard_size))
        return export_opened(opened, path, order)


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """The format and options of an export."""

    format: str
    naming: Naming
    dtype: str | None
    """torch's name of the dtype to convert to; None: as saved."""
    most: int
    """The most bytes of one file of "hf"; a file of one larger tensor may have more."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format {self.format!r}: expected one of {', '.join(FORMATS)}")


def local_path(out: str | Path, format: str) -> Path:
    """Returns the path. Raises ValueError for a URL, a path below "~", and a file name of another format."""
    if is_url(str(out)):
        raise ValueError(f"{out}: an export goes to a path of this machine; copy the files from there")
    if Path(out).parts[:1] == ("~",):
        raise ValueError(
            f"{out} would be below a directory called ~, since only a shell makes the home directory of it: pass "
            f"{os.path.expanduser(out)}, or {os.path.abspath(out)} if the directory is meant"
        )
    for other, ends in _ENDS.items():
        if format in _ENDS and format != other and Path(out).suffix in ends:
            raise ValueError(
                f"{out} is the name of a file of {other}, and the format is {format}, which {other} does not read: "
                f"give format {other}, or another name"
            )
    return Path(out)


def nothing(nbytes: int) -> None:
    """Ignores progress."""


def export_opened(
    opened: CheckpointReader,
    out: Path,
    order: ExportOrder,
    progress: Progress = nothing,
    expect: Progress = nothing,
) -> ExportReport:
    """Exports an opened step, as `export` does. `expect` is called with the number of bytes that there will be,
    `progress` with bytes as they are done."""
    before = opened.nbytes_read
    opened.read_once()
    directory = out if order.format == HF else out.parent
    items = [] if order.format == DCP else _items(opened, order)
    if items:
        expect(sum(item.nbytes for item in items))
    with outputs(directory) as files:
        if order.format == DCP:
            from ckptlib.exporting.dcp_files import write_dcp

            items = write_dcp(opened, out.name, order.naming, order.dtype, files, progress, expect)
            written = [out.name]
        elif order.format == TORCH:
            written = _to_torch(opened, out.name, items, files, progress)
        else:
            written = _to_safetensors(opened, out.name, items, files, progress, order)
        files.publish()
    return ExportReport(
        step=opened.step,
        format=order.format,
        files=tuple(directory / name for name in written),
        num_tensors=len(items),
        nbytes=sum(item.nbytes for item in items),
        nbytes_read=opened.nbytes_read - before,
        ties={tie: item.chosen.name for item in items for tie in item.chosen.ties},
        rounded=opened.rounded,
    )


def _items(opened: CheckpointReader, order: ExportOrder) -> list[Item]:
    items = []
    for chosen in order.naming.choose(opened.keys(), opened.aliases(), f"step {opened.step} of {opened.url}"):
        spec = opened.spec(chosen.saved)
        items.append(Item(chosen, spec.dtype, target_of(spec.dtype, order.dtype), spec.shape))
    return items


def _to_safetensors(
    opened: CheckpointReader,
    name: str,
    items: Sequence[Item],
    files: Outputs,
    progress: Progress,
    order: ExportOrder,
) -> list[str]:
    groups = cut(items, order.most) if order.format == HF else [list(items)]
    names = shard_names(len(groups)) if order.format == HF else [name]
    metadata = {"format": "pt", "ckptlib.step": str(opened.step), "ckptlib.name": str(opened.metadata()["name"])}
    plans = {file: plan_file(group, metadata) for file, group in zip(names, groups, strict=True)}
    written = [*names, INDEX] if len(names) > 1 else names
    # transformers prefers the single file to an index, so it could take old weights for the new ones, or mix them
    others = [*shard_names(1), INDEX] if order.format == HF else []
    files.make_room(sum(plan.nbytes for plan in plans.values()), *written, *others)
    _check_there(opened, items)
    for file, plan in plans.items():
        _write(opened, files, file, plan, progress)
    if len(names) > 1:
        index = index_of(plans)
        files.write(INDEX, len(index), lambda fd: _write_whole(fd, index))
    return written


def _write_whole(fd: int, data: bytes) -> None:
    with DirectFile(fd) as file:  # a disk that is nearly full takes a part of one call, and that is no error
        file.write(data)
        file.finish()


def _write(opened: CheckpointReader, files: Outputs, name: str, plan: FilePlan, progress: Progress) -> None:
    files.write(name, plan.nbytes, lambda fd: write(opened, plan, fd, progress))


def _to_torch(
    opened: CheckpointReader, name: str, items: Sequence[Item], files: Outputs, progress: Progress
) -> list[str]:
    from ckptlib.exporting.torch_file import write_torch

    nbytes = sum(item.nbytes for item in items)
    files.make_room(nbytes, name)
    _check_there(opened, items)
    write_torch(opened, items, files, name, progress)
    return [name]


def _check_there(opened: CheckpointReader, items: Sequence[Item]) -> None:
    """Checks that tensors are there, before the disk is filled for data that a document claims and no pack has."""
    for item in items:
        opened.check_there(item.chosen.saved)
