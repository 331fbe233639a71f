"""The content of a chunk of a slot, as codecs see it. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from ckptlib.codecs.codec import Content
from ckptlib.format import dtypes
from ckptlib.format.layout import Layout
from ckptlib.format.table import Table


class TensorChunk(NamedTuple):
    """A chunk in which one shard lies, or a piece of one."""

    tensor: str
    """Name of the tensor."""
    position: int
    """Position among the chunks of the shard."""
    num: int
    """Number of chunks of the shard."""
    content: Content


def tensor_chunk(table: Table, layout: Layout, chunk: int) -> TensorChunk | None:
    """Returns the content of a chunk; None if several small shards share it: such chunks are never coded."""
    shards = table.shards_in(chunk)
    if len(shards) > 1 or table.is_shared(shards[0]):
        return None
    shard = shards[0]
    tensor, box, chunks = layout.tensors[table.tensors[shard]], table.boxes[shard], table.chunks(shard)
    row = math.prod(box.shape[1:])
    at = (table.offsets[chunk] - table.offsets[chunks.start]) // dtypes.itemsize(tensor.dtype)
    content = Content(tensor.dtype, row, at % row if row else 0)
    return TensorChunk(tensor.name, chunk - chunks.start, len(chunks), content)
