"""Saves and loads of one process, bit by bit, for tests of what happens in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from helpers.registry import forget_session
from torch import nn

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part
from ckptlib.loading.report import LoadReport
from ckptlib.stores import open_store


class Root:
    """A root whose steps ascend by themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)
        self.step = 0

    def save(self, state: Mapping[str, object]) -> int:
        """Saves as the next step, which a failed save does not use up."""
        ckptlib.save(self.url, state, self.step + 1)
        self.step += 1
        return self.step

    def load(self, state: Mapping[str, object], **options: Any) -> LoadReport:
        """The newest step."""
        return ckptlib.load(self.url, state, self.step, **options)

    def move(self, source: Mapping[str, object], target: Mapping[str, object], **options: Any) -> LoadReport:
        """From one state into another, by way of the disk."""
        self.save(source)
        return self.load(target, **options)

    def saved(self) -> tuple[Part, Layout]:
        """What the newest step holds, as its part tells."""
        with open_store(self.url) as store:
            catalog = Catalog(store)
            part = catalog.part(catalog.manifest(catalog.resolve(self.step)).parts[0])
            return part, catalog.layout(part.table.layout)

    def nbytes_of(self, name: str) -> int:
        """Bytes that the newest step keeps under a name."""
        part, layout = self.saved()
        sizes = zip(part.table.tensors, part.table.sizes(layout), strict=True)
        return sum(nbytes for tensor, nbytes in sizes if layout.tensors[tensor].name == name)

    def close(self) -> None:
        session = forget_session(self.url)
        if session is not None:
            session.close(timedelta(seconds=60), clean=True)


@contextmanager
def opened(path: Path) -> Iterator[Root]:
    root = Root(path)
    try:
        yield root
    finally:
        root.close()


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as bytes; NaN payloads and signs of zero included."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = (plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(left: object, right: object) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def same_modules(left: nn.Module, right: nn.Module) -> bool:
    return same(dict(left.state_dict()), dict(right.state_dict()))


class Holder:
    """An object that gives and takes its state, and counts how often."""

    def __init__(self, content: object = None) -> None:
        self.content = content
        self.given = 0
        self.taken = 0

    def state_dict(self) -> object:
        self.given += 1
        return self.content

    def load_state_dict(self, content: object) -> None:
        self.taken += 1
        self.content = content
