"""`ckptlib show`: shows one step, from its manifest, layouts, parts and listings. Opens no pack."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.codings import Codings, Count
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import resolve_manifest
from ckptlib.cli.marks import Marks
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.cli.stands import stands_of
from ckptlib.codecs.registry import RAW
from ckptlib.format import keys, sharding
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import ByHand, Layout, OwnPerRank, TensorEntry
from ckptlib.format.manifest import Generation, Manifest
from ckptlib.format.part import Part
from ckptlib.policy.best import MODES, Best
from ckptlib.policy.patterns import covers
from ckptlib.stores import Store
from ckptlib.verify.findings import attempt
from ckptlib.words import age, count, cut, last, metrics, moment, plain, ranks, size

MAX_VALUE_WIDTH = 100
"""Longer values are cut for people; JSON has them whole."""

MAX_KINDS = 20
"""The most kinds of tensors that are shown to people, the largest first; JSON has all."""

MAX_ENTRIES = 50
"""The most entries of the state that are shown to people, the largest; a flat state has one for each tensor."""

MAX_STEPS = 8
"""The most steps that a step stands on that are shown to people; JSON has all."""

ATTEMPT_WIDTH = len("000000-00000000")
"""The width of rank and attempt, which begin the name of a pack."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One name of a step, over all its layouts."""

    entry: TensorEntry
    """The entry of the first layout that has it."""
    held: str
    """How ranks hold it; see `held`."""
    nbytes: int
    """Bytes of its data, without replicas."""
    num_ranks: int
    """The number of ranks whose layout has it."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one kind that a step has in the store."""

    number: int
    nbytes: int


@click.command("show", short_help="Show what a step holds.")
@click.option("--tensors", "pattern", metavar="PATTERN", help="List tensors: a name, path prefix or pattern.")
@click.option("--values", "with_values", is_flag=True, help="Print the plain values of rank 0.")
@click.option("--metric", metavar="NAME", help="With the step best: the metric that says which one is.")
@click.option("--mode", type=click.Choice(MODES), help="Whether small or large values of --metric are good.")
@with_store
@click.argument("step", default="latest")
@with_output
def command(
    store: Store,
    output: Output,
    step: str,
    pattern: str | None,
    with_values: bool,
    metric: str | None,
    mode: str | None,
) -> bool:
    """Shows what a step holds.

    STEP: a number, a name as `ls --json` prints it, best, or (default) the latest. The best is the one by --metric and
    --mode, or else by Keep(best=) of the newest job that had one.
    """
    catalog = Catalog(store)
    manifest = resolve_manifest(catalog, step, _best(step, metric, mode))
    save = manifest.save
    layouts = dict(zip(manifest.layouts, each(catalog.layout, manifest.layouts), strict=True))
    codings, problems = Codings(), []
    packs: set[str] = set()
    for part in each(lambda name: attempt(partial(part_of, catalog, manifest, name)), manifest.parts):
        if isinstance(part, Part):
            codings.add(part, layouts[part.table.layout])
            packs.update(pack.key for pack in part.packs)
        else:
            problems.append(str(part))
    records, lost = catalog.generations.records([save], newer=True)
    problems += map(str, lost.values())
    chain = generation_chain(records, save)
    visible = catalog.visible(newer=True)
    kept = Marks.of(catalog, visible).on(save, manifest)
    tensors = merged(manifest, layouts)
    objects = stored(store, manifest, packs)
    chosen = [t for t in tensors if pattern is not None and covers(pattern, t.entry.name)]
    values = dict(catalog.part(manifest.parts[0]).values) if with_values else None
    document: dict[str, object] = {
        "url": store.url,
        "step": save.step,
        "name": str(save),
        "visible": save in visible,
        "kept": [*kept],
        "world_size": manifest.world_size,
        "created": manifest.created,
        "nbytes": manifest.nbytes,
        "nbytes_state": manifest.nbytes_loaded,
        "stands_on": [*map(str, stands_of(manifest).on)],
        "oldest": stands_of(manifest).oldest,
        "metrics": dict(manifest.metrics),
        "generations": [_generation_document(record) for record in chain],
        "layouts": [
            {
                "digest": digest,
                "ranks": ranks(manifest.layouts[digest]),
                "num_tensors": len(layout.tensors),
                "held": dict(Counter(held(entry) for entry in layout.tensors)),
            }
            for digest, layout in layouts.items()
        ],
        "totals": totals(tensors),
        "objects": {name: {"number": o.number, "nbytes": o.nbytes} for name, o in objects.items()},
        "codecs": {codec: found.document() for codec, found in codings.codecs.items()},
        "kinds": {
            kind: {codec: found.document() for codec, found in by_codec.items()}
            for kind, by_codec in sorted(codings.kinds.items())
        },
        "problems": problems,
        **({} if pattern is None else {"tensors": [_tensor_document(t) for t in chosen]}),
        **({} if values is None else {"values": values}),
    }
    output.document(document)
    for problem in problems:
        output.problem(problem)
    if output.as_json:
        return not problems
    _print_head(output, manifest, chain, kept)
    _print_layouts(output, manifest, layouts)
    _print_totals(output, tensors, objects)
    _print_codings(output, codings)
    if pattern is not None:
        _print_tensors(output, chosen, pattern)
    if values is not None:
        _print_values(output, values)
    return not problems


def _best(step: str, metric: str | None, mode: str | None) -> Best | None:
    if (metric is None) != (mode is None) or (metric is not None and step != "best"):
        raise click.UsageError("--metric and --mode say which step is the best; give both, with the step best")
    if metric is None or mode is None:
        return None
    try:
        return Best(metric, mode)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def generation_chain(records: Mapping[GenerationId, Generation], save: SaveId) -> list[Generation]:
    """Returns the generation of a save, the one it resumed from, and so on, as far as they are known."""
    chain: list[Generation] = []
    record = records.get(save.generation)
    while record is not None and record not in chain:
        chain.append(record)
        record = None if record.resumed_from is None else records.get(record.resumed_from.generation)
    return chain


def held(entry: TensorEntry) -> str:
    """Returns how ranks hold a tensor: "S0 on 8", "S0 R on 4x8", "one rank", "per rank", "by hand"."""
    holding = entry.holding
    if isinstance(holding, OwnPerRank):
        return "per rank"
    if isinstance(holding, ByHand):
        return "by hand"
    placements = " ".join(sharding.encode(placement) for placement in holding.placements)
    mesh = "x".join(map(str, holding.mesh.shape))
    return f"{placements} on {mesh}" if mesh else "one rank"


def merged(manifest: Manifest, layouts: Mapping[str, Layout]) -> list[Tensor]:
    """Returns every tensor of a step once, sorted by name. If each rank has its own, their bytes are added."""
    found: dict[str, Tensor] = {}
    for digest, layout in layouts.items():
        num_ranks = len(manifest.layouts[digest])
        for entry in layout.tensors:
            old = found.get(entry.name)
            nbytes = entry.nbytes_global
            if isinstance(entry.holding, OwnPerRank):
                nbytes = nbytes * num_ranks + (old.nbytes if old else 0)
            first = old.entry if old else entry
            total = num_ranks + (old.num_ranks if old else 0)
            found[entry.name] = Tensor(first, held(first), nbytes, total)
    return [found[name] for name in sorted(found)]


def totals(tensors: list[Tensor]) -> dict[str, dict[str, int]]:
    """Returns the number and bytes of tensors, by the first component of their names."""
    found: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = found.setdefault(tensor.entry.name.partition("/")[0], {"num_tensors": 0, "nbytes": 0})
        total["num_tensors"] += 1
        total["nbytes"] += tensor.nbytes
    return found


def part_of(catalog: Catalog, manifest: Manifest, name: PartName) -> Part:
    """Returns a part. Raises as `Catalog.part` does, and FormatError if the manifest does not name its layout."""
    part = catalog.part(name)
    manifest.check_layout(name, part.table.layout)
    return part


def stored(store: Store, manifest: Manifest, named: Collection[str]) -> dict[str, Objects]:
    """Returns the objects that were put for a step and that it needs, by kind; from listings.

    `named`: the packs that its parts name. They may be of an earlier attempt than the part. For a part that cannot be
    read, the packs of its own attempt are counted. Other packs that failed attempts left are not counted.
    """
    save = manifest.save
    attempts = {f"{name.rank:06d}-{name.attempt}" for name in manifest.parts}
    listed = store.scan(save.packs_prefix)
    packs = [e for e in listed if e.key in named or e.key.rpartition("/")[2][:ATTEMPT_WIDTH] in attempts]
    names = {name.key for name in manifest.parts}
    parts = [e for e in store.scan(save.parts_prefix) if e.key in names]
    wanted = {keys.layout_key(digest) for digest in manifest.layouts}
    layouts = [e for e in store.scan(keys.LAYOUTS) if e.key in wanted]
    found = {"packs": packs, "parts": parts, "layouts": layouts}
    return {name: Objects(len(entries), sum(e.nbytes for e in entries)) for name, entries in found.items()}


def _generation_document(record: Generation) -> dict[str, object]:
    return {
        "generation": record.id.number,
        "name": str(record.id),
        "world_size": record.world_size,
        "created": record.created,
        "host": record.host,
        "versions": dict(record.versions),
        "tags": dict(record.tags),
        "rewind": record.rewind,
        "run": dict(record.run),
        "resumed_from": None if record.resumed_from is None else str(record.resumed_from),
    }


def _tensor_document(tensor: Tensor) -> dict[str, object]:
    return {
        "name": tensor.entry.name,
        "dtype": tensor.entry.dtype,
        "shape": list(tensor.entry.shape),
        "held": tensor.held,
        "nbytes": tensor.nbytes,
    }


def _print_head(output: Output, manifest: Manifest, chain: list[Generation], kept: tuple[str, ...]) -> None:
    output.line(
        Text(f"step {manifest.save.step}", style="bold"),
        f"  {size(manifest.nbytes_loaded)} by {count(manifest.world_size, 'rank')}",
        f", {size(manifest.nbytes)} written for it" if stands_of(manifest).on else "",
        f", {moment(manifest.created)} ({age(manifest.created)} ago)",
    )
    rows = [("save", str(manifest.save))]
    stands = stands_of(manifest)
    if stands.on:
        steps = f"step{'s' * (len(stands.on) > 1)} {last([save.step for save in stands.on], MAX_STEPS)}"
        text = f"{count(len(stands.on), 'other save')} ({steps}); its oldest chunk is {stands.oldest_age} old"
        rows.append(("stands on", text))
    if kept:
        rows.append(("kept", ", ".join(kept)))
    if manifest.metrics:
        rows.append(("metrics", metrics(manifest.metrics)))
    rows += [("generation" if i == 0 else "resumed from", text) for i, text in enumerate(_chain_lines(chain))]
    rows += _run_rows(chain)
    if chain and chain[-1].resumed_from is not None:
        rows.append(("resumed from", f"{chain[-1].resumed_from}, whose generation has no record"))
    output.columns((), [(Text(name, style="dim"), value) for name, value in rows])


def _chain_lines(chain: list[Generation]) -> Iterator[str]:
    at: SaveId | None = None
    for record in chain:
        where = f"step {at.step} of generation " if at is not None else ""
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        tags = "".join(f", {name}={value}" for name, value in record.tags.items())
        by = f"{count(record.world_size, 'rank')} on {record.host or '?'}"
        yield f"{where}{record.id.number}, {moment(record.created)}, {by}{', ' if versions else ''}{versions}{tags}"
        at = record.resumed_from


def _run_rows(chain: list[Generation]) -> Iterator[tuple[str, str]]:
    """Yields facts about the run that saved the step, as far as the job recorded them."""
    run = chain[0].run if chain else {}
    if isinstance(argv := run.get("argv"), list):
        yield "command", " ".join(shlex.quote(str(argument)) for argument in argv)
    if isinstance(git := run.get("git"), dict):
        dirty = git.get("dirty")
        changes = ", with changes" if dirty is True else "" if dirty is False else ", with changes or without"
        yield "git", f"{git.get('commit')}{changes}"
    if chain and isinstance(init := chain[-1].run.get("init_from"), dict):
        yield "begun from", plain(" ".join(str(init[key]) for key in ("kind", "url", "step") if key in init))
    config = run.get("config")
    for name, value in config.items() if isinstance(config, dict) else ():
        yield f"config.{plain(name)}", cut(value if isinstance(value, str) else json.dumps(value), MAX_VALUE_WIDTH)


def _print_layouts(output: Output, manifest: Manifest, layouts: Mapping[str, Layout]) -> None:
    rows = []
    for digest, layout in layouts.items():
        first = True
        for how, number in Counter(held(entry) for entry in layout.tensors).most_common():
            who = (digest[:8], ranks(manifest.layouts[digest])) if first else ("", "")
            rows.append((*who, how, f"{number:,}"))
            first = False
    output.line()
    output.columns(("LAYOUT", "RANKS", "HELD", "TENSORS"), rows, right=("TENSORS",))


def _print_totals(output: Output, tensors: list[Tensor], objects: Mapping[str, Objects]) -> None:
    output.line()
    found = totals(tensors)
    rest = sorted(found, key=lambda name: found[name]["nbytes"], reverse=True)[MAX_ENTRIES:]
    others = [found.pop(name) for name in rest]
    rows = [(name, f"{t['num_tensors']:,}", size(t["nbytes"])) for name, t in found.items()]
    if others:
        number, nbytes = (sum(t[of] for t in others) for of in ("num_tensors", "nbytes"))
        rows.append((f"{len(others):,} others (--tensors)", f"{number:,}", size(nbytes)))
    rows.append(("total", f"{len(tensors):,}", size(sum(tensor.nbytes for tensor in tensors))))
    output.columns(("STATE", "TENSORS", "SIZE"), rows, right=("TENSORS", "SIZE"))
    output.line()
    rows = [(name, f"{o.number:,}", size(o.nbytes)) for name, o in objects.items()]
    output.columns(("OBJECTS", "NUMBER", "SIZE"), rows, right=("NUMBER", "SIZE"))


def _print_codings(output: Output, codings: Codings) -> None:
    output.line()
    if codings.codecs.keys() <= {RAW}:
        output.line("all chunks are stored as they are")
        return
    number = ("CHUNKS", "SIZE", "STORED", "RATIO")
    rows = [(codec, *_count_cells(found)) for codec, found in codings.codecs.items()]
    output.columns(("CODEC", *number), rows, right=number)
    output.line()
    kinds = {kind: Count.sum(by_codec.values()) for kind, by_codec in codings.kinds.items()}
    largest = sorted(kinds, key=lambda kind: kinds[kind].nbytes, reverse=True)
    of_kinds = [
        (kind, *_count_cells(kinds[kind]), ", ".join(sorted(codings.kinds[kind]))) for kind in largest[:MAX_KINDS]
    ]
    output.columns(("KIND", *number, "CODECS"), of_kinds, right=number)
    if len(largest) > MAX_KINDS:
        output.line(Text(f"and {len(largest) - MAX_KINDS:,} more kinds", style="dim"))


def _count_cells(found: Count) -> tuple[str, str, str, str]:
    return f"{found.chunks:,}", size(found.nbytes), size(found.stored), found.ratio


def _print_tensors(output: Output, tensors: list[Tensor], pattern: str) -> None:
    output.line()
    if not tensors:
        output.line(f"no tensor's name matches {pattern}")
        return
    rows = [
        (t.entry.name, t.entry.dtype, "x".join(map(str, t.entry.shape)) or "-", t.held, size(t.nbytes)) for t in tensors
    ]
    output.columns(("TENSOR", "DTYPE", "SHAPE", "HELD", "SIZE"), rows, right=("SIZE",))


def _print_values(output: Output, values: Mapping[str, object]) -> None:
    output.line()
    rows = [(path, cut(json.dumps(value), MAX_VALUE_WIDTH)) for path, value in values.items()]
    if rows:
        output.columns(("VALUE", "OF RANK 0"), rows)
    else:
        output.line("rank 0 has no values")
