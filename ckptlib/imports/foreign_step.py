"""A foreign checkpoint as a step that can be loaded at once, without being saved first.

Its tensors are views of mapped files. A rank reads the pages in which its own shards lie, straight into its tensors.
There are no digests to compare: other libraries save none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from typing_extensions import override

from ckptlib.errors import CorruptData
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part
from ckptlib.imports.mapped import aligned
from ckptlib.loading.reader import Reader
from ckptlib.ranks.group import SoloGroup
from ckptlib.reading.reader import Want
from ckptlib.saving.agreement import within
from ckptlib.saving.planner import Planner
from ckptlib.state.collector import Flat
from ckptlib.state.leaf import Leaf
from ckptlib.state.raw_bytes import bytes_of, copyable, is_bytes
from ckptlib.stores.io_limits import IoLimits

PIECE_BYTES = 64 * 1024 * 1024
"""Bytes copied or compared at once: the step of progress, and the most memory that this takes."""


class ForeignStep:
    """A StepSource of one rank, as if one process had saved the checkpoint."""

    def __init__(self, flat: Flat, where: str, step: int) -> None:
        group = SoloGroup()
        planner = Planner(group)
        plan = planner.agree(flat, planner.rows(flat))
        self.leaves: Mapping[str, Leaf] = {leaf.name: leaf for leaf in flat.leaves}
        self.save = SaveId(step, GenerationId(0, "00000000"))
        self.world_size, self.where, self.in_memory = 1, where, False
        self.layouts: Mapping[str, tuple[int, ...]] = {plan.layout.digest: (0,)}
        self.limits = IoLimits(reads=1)
        self._layout = plan.layout
        self._part = Part(
            save=self.save,
            rank=0,
            world_size=1,
            attempt="00000000",
            table=plan.table,
            packs=(),
            algorithm="",
            digests=(),
            values=flat.values,
            metrics={},
            created=time.time(),
        )

    def layout(self, digest: str) -> Layout:
        return self._layout

    def part(self, rank: int) -> Part:
        return self._part

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        raise AssertionError("a foreign checkpoint has no packs")

    def near(self, ranks: Collection[int]) -> None:
        """Returns None: its files are equally far from all ranks."""

    def bring(self, ranks: Collection[int]) -> None:
        """Does nothing: every rank has mapped the files."""

    def reader(self, rank: int) -> ForeignReader:
        """Returns a reader for one rank of the job."""
        return ForeignReader(self, rank)


class ForeignReader(Reader):
    """Copies from mapped files what a Reader reads from packs."""

    def __init__(self, source: ForeignStep, rank: int) -> None:
        super().__init__(source, rank)
        self._leaves = source.leaves

    @override
    def part(self, rank: int) -> Part:
        return self._source.part(rank)

    @override
    def read(self, wants: Sequence[Want[torch.Tensor]], progress: Callable[[int], None]) -> None:
        for want in wants:
            for box, target in want.pieces:
                for part, piece in rows_of(box, target):
                    self._fill(want.name, part, piece, progress)

    def _fill(self, name: str, box: Box, target: torch.Tensor, progress: Callable[[int], None]) -> None:
        """Fills a box of a tensor. Raises CorruptData if the source lacks elements of it."""
        left = box.numel
        for common, source in self._within(name, box):
            _copy(aligned(source), within(common, box, target))
            left -= common.numel
            self.nbytes_read += source.nbytes
            progress(source.nbytes)
        if left:
            raise CorruptData(f"{name}{box}: {self._source.where} lacks {left:,} of its elements")

    def _within(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields the parts of a box that the source has, in boxes that do not overlap."""
        for held, tensor in self._leaves[name].pieces:
            common = held.intersect(box)
            if common is not None:
                yield common, within(common, held, tensor)

    @override
    def same_bytes(self, first: str, second: str, boxes: Sequence[Box] | None = None) -> bool:
        one, other = self._leaves[first], self._leaves[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return all(
            torch.equal(_bytes(within(both, common, tensor)), _bytes(counterpart))
            for box in boxes or [Box.whole(one.shape)]
            for common, tensor in self._within(first, box)
            for both, counterpart in self._within(second, common)
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(aligned(tensor).contiguous())


@torch.inference_mode()  # otherwise a target made in inference mode, such as a whole model, could not be written to
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype != target.dtype:
        target.copy_(source)
    elif is_bytes(source) and is_bytes(target):
        # dtypes that torch cannot copy element by element are bytes all the same
        bytes_of(target).copy_(bytes_of(source))
    else:
        copyable(target).copy_(copyable(source))


def rows_of(box: Box, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields parts along the first dim, of PIECE_BYTES or one row; none for an empty box."""
    if not box.shape:
        yield box, tensor
    elif box.numel:
        rows = max(1, PIECE_BYTES * box.shape[0] // tensor.nbytes)
        for i in range(0, box.shape[0], rows):
            part = tensor[i : i + rows]
            yield Box((box.offset[0] + i, *box.offset[1:]), tuple(part.shape)), part
