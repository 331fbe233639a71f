"""Which shards of a snapshot are the state of one parameter: its weights, and its optimizer's moments.

Names in the layout and the optimizer's options tell. Knows a rank's own share only: if the state of a parameter has
several writers, no rank has all of it. Reads no tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptlib.format.box import Box
from ckptlib.format.layout import Layout
from ckptlib.format.table import Table
from ckptlib.state.optimizers import state_path

MIN_ELEMENTS = 1 << 14
"""Least elements of a shard that is worth a sample of its own: that takes half a millisecond, in which a slow link
moves as much."""

ADAM, LION, SGD = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)
FAMILIES = (ADAM, LION, SGD)
"""The moments that optimizers keep for a parameter, the average of gradients first. An optimizer with `exp_avg_sq` is
no Lion."""

OTHER = "no optimizer's that is known"
SEVERAL = "its parameter's state has several writers"
SMALL = "small"
DTYPE = "neither float32 nor bfloat16"

_WORDS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Span:
    """A shard in the body of a slot."""

    shard: int
    offset: int
    nbytes: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element that the codec knows; 0 for others."""
        return _WORDS.get(self.dtype, 0)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or the part of it that this rank holds."""

    name: str
    optimizer: str
    """The path of the optimizer that updates it."""
    group: int
    """The number of its group in that optimizer."""
    family: tuple[str, ...]
    spans: tuple[Span, ...]
    """The moments, as the family names them, then the weights."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.spans[-1].nbytes // self.spans[-1].itemsize


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of one rank's share."""

    found: tuple[Parameter, ...]
    classes: Mapping[str, str]
    """The class name of each optimizer, by path."""
    scalars: Mapping[str, Span]
    """Tensors of one element, such as steps and learning rates, by name."""
    left: Mapping[str, int]
    """Bytes of shards that belong to no such parameter, by reason."""


def find_parameters(layout: Layout, table: Table) -> Parameters:
    """Returns the parameters of the rank whose table it is."""
    sizes = table.sizes(layout)
    spans: dict[str, dict[Box, Span]] = defaultdict(dict)
    columns = zip(table.tensors, table.boxes, table.begins(sizes), sizes, strict=True)
    for shard, (tensor, box, offset, nbytes) in enumerate(columns):
        entry = layout.tensors[tensor]
        spans[entry.name][box] = Span(shard, offset, nbytes, entry.dtype)
    found: list[Parameter] = []
    reasons: dict[int, str] = {}
    classes = dict(_classes(layout))
    for path, group, name in _named(layout):
        family = _family(layout, path, name)
        names = [state_path(path, name, key) for key in family]
        weights = spans.get(layout.aliases.get(name, name), {}) if family else {}
        for box in {box: None for key in names for box in spans.get(key, {})} | dict.fromkeys(weights):
            state = [*(spans.get(key, {}).get(box) for key in names), weights.get(box)]
            there = tuple(span for span in state if span is not None)
            why = _why_not(there, len(state))
            if why is None:
                found.append(Parameter(name, path, group, family, there))
            reasons.update({span.shard: why or "" for span in there})
    left: Counter[str] = Counter()
    for by_box in spans.values():
        for span in by_box.values():
            left[reasons.get(span.shard, OTHER)] += span.nbytes
    del left[""]
    scalars = {name: span for name, by_box in spans.items() for box, span in by_box.items() if box.numel == 1}
    return Parameters(tuple(found), classes, scalars, left)


def _named(layout: Layout) -> Iterator[tuple[str, int, str]]:
    """Yields the path of an optimizer, the number of a group, and the name of a parameter in it."""
    for path, tree in layout.objects.items():
        match tree:
            case {"optimizer": {"groups": [*groups]}}:
                for i, names in enumerate(groups):
                    yield from ((path, i, name) for name in names if isinstance(name, str))


def _classes(layout: Layout) -> Iterator[tuple[str, str]]:
    for path, tree in layout.objects.items():
        match tree:
            case {"optimizer": {"class": str(name)}}:
                yield path, name


def _family(layout: Layout, path: str, name: str) -> tuple[str, ...]:
    """Returns the family of a parameter's state, on whichever rank that lies; () if it is of none."""
    return next((f for f in FAMILIES if all(state_path(path, name, key) in layout.index for key in f)), ())


def _why_not(there: tuple[Span, ...], expected: int) -> str | None:
    if len(there) < expected:
        return SEVERAL
    if not all(span.itemsize for span in there):
        return DTYPE
    counts = {span.nbytes // span.itemsize for span in there}
    if len(counts) > 1:
        return OTHER
    return SMALL if counts.pop() < MIN_ELEMENTS else None
