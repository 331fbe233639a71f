"""Cuts an object into the parts in which it is sent: all alike but the last, and nothing copied. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from typing_extensions import Buffer

from ckptlib.stores.base import as_bytes

_STEP_NBYTES = 1 << 20


def cut(pieces: Iterable[Buffer], first_nbytes: int, nbytes: int) -> Iterator[list[memoryview]]:
    """Yields views of the first `first_nbytes` bytes of the pieces, then of `nbytes` each; the last is the rest.

    None of them is empty. A piece is taken when its bytes are due, and not before.
    """
    views: list[memoryview] = []
    left = first_nbytes
    for piece in pieces:
        view = as_bytes(piece)
        while view.nbytes:
            views.append(view[:left])
            left, view = left - views[-1].nbytes, view[left:]
            if not left:
                yield views
                views, left = [], nbytes
    if views:
        yield views


def part_nbytes(nbytes: int, least: int, most: int, even: int, num: int) -> int:
    """Returns the size of an object's parts: `least` for `even` parts or fewer, then more, up to `most`.

    Beyond that only if there would be more than `num` of them.
    """
    wanted = max(min(-(-nbytes // even), most), -(-nbytes // num))
    return max(least, -(-wanted // _STEP_NBYTES) * _STEP_NBYTES)


def num_head_parts(head_nbytes: int, nbytes: int) -> int:
    """Returns how many parts of `nbytes` bytes hold a head of `head_nbytes`; the last has a byte of the body."""
    return head_nbytes // nbytes + 1
