"""`ckptlib diff`: what changed between two steps, by tensor and value."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.reading import each, in_order
from ckptlib.catalog.resolving import resolve_manifest
from ckptlib.catalog.shards import PartIndex
from ckptlib.cli.changes import Changed, ShardDiffer, ValueChanges, count_rank, count_tensor
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Cell, Output
from ckptlib.cli.show import MAX_VALUE_WIDTH, Tensor, merged, part_of
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.stores import Store
from ckptlib.stores.io_limits import THREADS
from ckptlib.words import count, cut, percent, size


@dataclass(slots=True)
class Diff:
    """The differences between two steps."""

    changed: dict[str, Changed] = field(default_factory=dict)
    """The changed tensors by name, of those that both steps have with the same dtype and shape."""
    values: ValueChanges = field(default_factory=ValueChanges)
    cut_alike: bool = True
    """Whether each rank cut the same tensors alike in both steps, so that digests were enough."""


@click.command("diff", short_help="Show what changed between two steps.")
@click.option("--deep", is_flag=True, help="Read chunks that differ, and count the elements in them that do.")
@with_store
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@with_output
def command(store: Store, output: Output, first: str, second: str, deep: bool) -> bool:
    """Shows what changed from step A to step B: tensors, by how many bytes, and values.

    Chunks of equal digest are equal and are not read. Without --deep a chunk that differs counts whole. Where the steps
    cut a tensor differently, as other world sizes do, its bytes are read. A, B: as STEP of `ckptlib show`.
    """
    catalog = Catalog(store)
    ends = [resolve_manifest(catalog, step) for step in (first, second)]
    layouts = [dict(zip(m.layouts, each(catalog.layout, m.layouts), strict=True)) for m in ends]
    before, after = ({t.entry.name: t for t in merged(m, of)} for m, of in zip(ends, layouts, strict=True))
    both = [name for name in before if name in after]
    same = [name for name in both if _kind(before[name]) == _kind(after[name])]
    found = compare(catalog, ends[0], ends[1], same, deep)
    for name, changed in found.changed.items():  # shards cut by hand may overlap, and count twice
        changed.nbytes = min(changed.nbytes, after[name].nbytes)
    document: dict[str, object] = {
        "url": store.url,
        "a": {"step": ends[0].save.step, "name": str(ends[0].save)},
        "b": {"step": ends[1].save.step, "name": str(ends[1].save)},
        "granularity": "elements" if deep else "chunks",
        "cut_alike": found.cut_alike,
        "num_tensors": len(same),
        "nbytes": sum(after[name].nbytes for name in same),
        "nbytes_changed": sum(changed.nbytes for changed in found.changed.values()),
        "changed": [_changed_document(after[name], found.changed[name], deep) for name in sorted(found.changed)],
        "added": [_tensor_document(after[name]) for name in after if name not in before],
        "removed": [_tensor_document(before[name]) for name in before if name not in after],
        "replaced": [
            {"name": name, "a": _tensor_document(before[name]), "b": _tensor_document(after[name])}
            for name in both
            if _kind(before[name]) != _kind(after[name])
        ],
        "values": [
            {"path": path, "kind": v.kind, "rank": v.rank, "num_ranks": v.num_ranks, "a": v.before, "b": v.after}
            for path, v in found.values.found.items()
        ],
    }
    output.document(document)
    if not output.as_json:
        _print(output, before, after, same, found, deep)
    return True


def compare(catalog: Catalog, first: Manifest, second: Manifest, names: list[str], deep: bool) -> Diff:
    """Compares the tensors of these names, and the values of ranks that both steps have.

    If every rank is cut alike, this needs memory for the parts of THREADS ranks; else for all tables of both steps. To
    this come 64 MiB of chunks for each thread.
    """
    found = Diff()
    tables = [[name.table for name in manifest.parts] for manifest in (first, second)]
    found.cut_alike = tables[0] == tables[1]
    local = threading.local()

    def differ() -> ShardDiffer:
        if not hasattr(local, "differ"):
            local.differ = ShardDiffer(catalog.store.get_into)
        mine: ShardDiffer = local.differ
        return mine

    def index(part: Part) -> PartIndex:
        return PartIndex(part, catalog.layout(part.table.layout))

    def of_rank(rank: int) -> tuple[Part, Part, dict[str, Changed]]:
        one, other = (part_of(catalog, manifest, manifest.parts[rank]) for manifest in (first, second))
        return one, other, count_rank(differ(), index(one), index(other), deep)

    with ThreadPoolExecutor(THREADS, "ckptlib-diff") as executor:
        if found.cut_alike:
            for one, other, changed in in_order(executor, of_rank, range(first.world_size)):
                found.values.add(one, other)
                for name, more in changed.items():
                    found.changed.setdefault(name, Changed()).add(more.nbytes, more.elements)
            return found
        ones, others = (
            [*in_order(executor, partial(part_of, catalog, manifest), manifest.parts)] for manifest in (first, second)
        )
        for one, other in zip(ones, others, strict=False):  # ranks that only one of them has are left out
            found.values.add(one, other)
        before, after = ({part.rank: index(part) for part in parts} for parts in (ones, others))
        counts = in_order(executor, lambda name: count_tensor(differ(), name, before, after, deep), names)
        found.changed = {name: changed for name, changed in zip(names, counts, strict=True) if changed.nbytes}
    return found


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return tensor.entry.dtype, tensor.entry.shape


def _tensor_document(tensor: Tensor) -> dict[str, object]:
    entry = tensor.entry
    return {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "nbytes": tensor.nbytes}


def _changed_document(tensor: Tensor, changed: Changed, deep: bool) -> dict[str, object]:
    elements = {"num_elements_changed": changed.elements} if deep else {}
    return {**_tensor_document(tensor), "nbytes_changed": changed.nbytes, **elements}


def _print(
    output: Output,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    same: list[str],
    found: Diff,
    deep: bool,
) -> None:
    header = ["TENSOR", "CHANGED", "OF", "SHARE", *(["ELEMENTS"] if deep else [])]
    rows = [_cells(after[name], found.changed[name], deep) for name in sorted(found.changed)]
    if rows:
        output.columns(header, rows, right=header[1:])
        output.line()
    others = [*_other_tensors(before, after)]
    if others:
        output.columns(("TENSOR", "BEFORE", "AFTER"), others)
        output.line()
    if found.values.found:
        values = [
            (path, str(v.num_ranks), _value(v.before, v.kind != "added"), _value(v.after, v.kind != "removed"))
            for path, v in found.values.found.items()
        ]
        output.columns(("VALUE", "RANKS", "BEFORE", "AFTER"), values, right=("RANKS",))
        output.line()
    nbytes = sum(changed.nbytes for changed in found.changed.values())
    how = "counted by elements" if deep else "in chunks that differ; --deep counts elements"
    total = size(sum(after[name].nbytes for name in same))
    output.line(f"{len(found.changed):,} of {count(len(same), 'tensor')} changed, {size(nbytes)} of {total}, {how}")
    if not found.cut_alike:
        output.line(Text("the steps are cut differently: where digests do not compare, bytes were read", style="dim"))


def _value(value: object, is_there: bool) -> str:
    return cut(json.dumps(value), MAX_VALUE_WIDTH) if is_there else "-"


def _cells(tensor: Tensor, changed: Changed, deep: bool) -> list[Cell]:
    share = percent(min(changed.nbytes / max(tensor.nbytes, 1), 1))
    elements = [f"{changed.elements:,}"] if deep else []
    return [tensor.entry.name, size(changed.nbytes), size(tensor.nbytes), share, *elements]


def _other_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        if one is None or other is None or _kind(one) != _kind(other):
            yield name, _described(one), _described(other)


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "-"
    return f"{tensor.entry.dtype} {'x'.join(map(str, tensor.entry.shape)) or 'scalar'}"
