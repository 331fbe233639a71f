"""`ckptlib ls`: lists the steps of a root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import click
from rich.text import Text

from ckptlib.catalog.begun import unrecorded
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.history import counted
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import TRIES, is_newest_there
from ckptlib.cli.local_disk import Disk, DiskShare, on_disk
from ckptlib.cli.marks import Marks
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Cell, Output
from ckptlib.cli.stands import Stands, stands_of
from ckptlib.cli.tree import Branch, branches, print_tree
from ckptlib.cli.tree import document as tree_document
from ckptlib.errors import CheckpointNotFound, CorruptData, FormatError, NewerFormat, ObjectUnreadable
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.stores import Store
from ckptlib.words import age, count, metrics, plain, size


@dataclass(frozen=True, slots=True)
class Info:
    """The fields of a manifest that `ls` shows; a manifest may be long."""

    world_size: int
    nbytes_state: int
    """Bytes that a load returns."""
    created: float
    metrics: Mapping[str, object]
    stands: Stands


@dataclass(frozen=True, slots=True)
class Row:
    """One save of a root."""

    save: SaveId
    state: str
    """committed, left behind (by a rewind), damaged, newer (than this ckptlib), trash, uncommitted, or local (on local
    disks only)."""
    info: Info | None
    """None unless a manifest can be read."""
    nbytes: int | None
    """Bytes of the packs that were written for it."""
    since: float | None
    """When it was taken; for trash, when it was dropped; for other saves without a manifest, when their newest object
    was put. Seconds since the epoch."""
    problem: str | None = None
    local: DiskShare | None = None
    """Its objects on the local disk that was asked for."""
    kept: tuple[str, ...] = ()
    """Reasons to keep it, whatever its age: pinned, exempt, best."""


@click.command("ls", short_help="List the steps.")
@click.option(
    "--all", "everything", is_flag=True, help="Also list abandoned steps, trash, and saves that never committed."
)
@click.option("--tree", is_flag=True, help="Draw the generations instead: who resumed where, and what was abandoned.")
@click.option("--local", metavar="PATH", help="Also list what this host's disk has: the local= of the Checkpointer.")
@with_store
@with_output
def command(store: Store, output: Output, everything: bool, tree: bool, local: str | None) -> bool:
    """Lists the committed steps.

    SIZE is what a load gives back, WRITTEN what was written for the step: what has not changed lies in the packs of
    earlier saves. USES is how many of these saves the step needs, OLDEST the age of the oldest. LOCAL is of how many
    ranks the disk of this host holds the share, STATE whether the store has the step. KEPT says why a step stays
    however old it is: it is pinned, exempt, or the best by Keep(best=) of the newest job that had one.

    With --tree, each line is a generation, one incarnation of the job: * is on the history, - has left it.
    """
    catalog = Catalog(store)
    disk = None if local is None else on_disk(local, catalog)
    generations = branches(catalog)
    problem = _refusal(catalog) or _incomplete(generations)
    rows = committed(catalog, everything)
    if not (rows or problem):
        catalog.root()  # raises where there is none
    if everything:
        rows = sorted([*rows, *others(catalog, {row.save for row in rows})], key=lambda row: row.save)
    if disk is not None:
        rows = with_disk(catalog, rows, disk, everything)
    about = {"url": store.url, **({"problem": problem} if problem else {})}
    output.document(
        {
            **about,
            "steps": [_document(row, disk is not None) for row in rows],
            "generations": [tree_document(branch) for branch in generations],
        }
    )
    if tree:
        print_tree(output, generations)
    elif rows:
        _table(output, rows, everything, disk is not None)
        if not _incomplete(generations):
            _tell_abandoned(output, generations)
    else:
        output.line(f"{store.url} holds no committed step")
    problems = [text for text in (problem, *(row.problem for row in rows)) if text]
    for text in problems:
        output.problem(text)
    return not problems


def _refusal(catalog: Catalog) -> str | None:
    """Returns why restore, load, save and gc refuse this root; None if they do not."""
    try:
        catalog.generations.check_versions()
    except NewerFormat as error:
        return f"{error} to restore, load, save or gc"
    return None


def _incomplete(generations: Iterable[Branch]) -> str | None:
    """Returns why steps may wrongly seem to be abandoned; None if all records can be read."""
    lost = ", ".join(str(branch.id.number) for branch in generations if branch.record is None)
    if not lost:
        return None
    return (
        f"history is incomplete: the record of generation {lost} is missing or cannot be read, so steps before it are "
        "not listed, and restore does not find them. Make it readable, or put it back from a copy of the root; "
        "ls --all lists all steps"
    )


def committed(catalog: Catalog, everything: bool) -> list[Row]:
    """Returns rows for the steps on the history, or for all saves; also for those with a damaged or newer manifest."""
    for _ in range(TRIES):
        visible = {*catalog.visible(newer=True)}
        rows = _rows(catalog, visible, everything)
        if is_newest_there(catalog, visible):
            break
    return rows


def _rows(catalog: Catalog, visible: set[SaveId], everything: bool) -> list[Row]:
    saves = catalog.saves() if everything else counted(visible)
    marks = Marks.of(catalog, visible)

    def row(save: SaveId) -> Row | None:
        try:
            manifest = catalog.manifest(save)
        except CheckpointNotFound:
            return None  # dropped since it was listed
        except (CorruptData, FormatError, ObjectUnreadable) as error:
            return Row(save, "newer" if isinstance(error, NewerFormat) else "damaged", None, None, None, str(error))
        stands = stands_of(manifest)
        info = Info(manifest.world_size, manifest.nbytes_loaded, manifest.created, manifest.metrics, stands)
        state, kept = "committed" if save in visible else "left behind", marks.on(save, manifest)
        return Row(save, state, info, manifest.nbytes, manifest.created, kept=kept)

    return [found for found in each(row, saves) if found is not None]


def others(catalog: Catalog, known: set[SaveId]) -> Iterator[Row]:
    """Yields rows for saves without a manifest that have objects or a trash record."""
    sizes: dict[SaveId, int] = {}
    newest: dict[SaveId, float] = {}
    for entry in (*catalog.store.scan(keys.PARTS), *catalog.store.scan(keys.PACKS)):
        save = keys.object_save(entry.key)
        if save is not None:
            sizes[save] = sizes.get(save, 0) + (entry.nbytes if entry.key.startswith(keys.PACKS) else 0)
            newest[save] = max(newest.get(save, 0.0), entry.modified)
    trash = {
        save: entry.modified
        for entry in catalog.store.scan(keys.TRASH)
        if (save := keys.parse_trash_key(entry.key)) is not None
    }
    for save in {*sizes, *trash} - known:
        yield Row(
            save, "trash" if save in trash else "uncommitted", None, sizes.get(save, 0), trash.get(save) or newest[save]
        )


def with_disk(catalog: Catalog, rows: Iterable[Row], disk: Disk, everything: bool) -> list[Row]:
    """Returns the rows, each with its objects on a local disk, and rows for steps that are only there."""
    shares = disk.shares
    found = {row.save: replace(row, local=shares.get(row.save)) for row in rows}
    visible = {*catalog.visible(shares, newer=True)}
    entering = {begun.record.id for begun in unrecorded(disk.begun, catalog)}  # the next job puts their records
    committed = {*catalog.saves()}
    for save in shares.keys() - found.keys():
        is_local = save in visible or save.generation in entering
        if save not in committed and (everything or is_local):
            state, share = "local" if is_local else "left behind", shares[save]
            found[save] = Row(save, state, None, share.nbytes, share.since, local=share)
    return [found[save] for save in sorted(found)]


def _document(row: Row, with_local: bool) -> dict[str, object]:
    info, local = row.info, row.local
    return {
        "step": row.save.step,
        "generation": row.save.generation.number,
        "name": str(row.save),
        "state": row.state,
        "created": info.created if info else None,
        "since": row.since,
        "world_size": info.world_size if info else None,
        "nbytes": row.nbytes,
        "nbytes_state": info.nbytes_state if info else None,
        "stands_on": [*map(str, info.stands.on)] if info else None,
        "oldest": info.stands.oldest if info else None,
        "kept": [*row.kept],
        "metrics": dict(info.metrics) if info else {},
        **({"problem": row.problem} if row.problem else {}),
        **({"local": {"ranks": [*local.ranks], "nbytes": local.nbytes} if local else None} if with_local else {}),
    }


def _table(output: Output, rows: list[Row], everything: bool, with_local: bool) -> None:
    header = ["STEP", "GEN", "AGE", "RANKS", "SIZE", "WRITTEN", "USES", "OLDEST", "LOCAL", "STATE", "KEPT", "METRICS"]
    if not any(row.info and row.info.stands.on for row in rows):
        header = [name for name in header if name not in ("USES", "OLDEST")]
    if not with_local:
        header.remove("LOCAL")
        if not everything:
            header.remove("STATE")
    if not any(row.kept for row in rows):
        header.remove("KEPT")
    if not any(row.info and row.info.metrics for row in rows):
        header.remove("METRICS")
    right = [name for name in header if name not in ("STATE", "KEPT", "METRICS")]
    output.columns(header, [_cells(row, header) for row in rows], right)
    output.line(Text(_total(rows, everything), style="dim"))


def _tell_abandoned(output: Output, generations: list[Branch]) -> None:
    number = sum(len(branch.abandoned) for branch in generations)
    if number:
        output.line(Text(f"{count(number, 'step')} abandoned by a rewind (ckptlib ls --tree)", style="dim"))


def _total(rows: list[Row], everything: bool) -> str:
    """Returns the summary. Each pack counts only at the save that it was written for, so the sum is right even if steps
    share packs."""
    infos = [row.info for row in rows if row.info]
    listed = count(len(rows), "save" if everything else "step")
    text = f"{listed}, {size(sum(info.nbytes_state for info in infos))} in {size(sum(row.nbytes or 0 for row in rows))}"
    others = {save for info in infos for save in info.stands.on} - {row.save for row in rows}
    return text + (f", and in packs of {count(len(others), 'other save')} (ckptlib du)" if others else "")


def _cells(row: Row, header: list[str]) -> list[Cell]:
    dim = "" if row.state == "committed" else "red" if row.problem else "dim"
    info = row.info
    cells = {
        "STEP": str(row.save.step),
        "GEN": str(row.save.generation.number),
        "AGE": "-" if row.since is None else age(row.since),
        "RANKS": str(info.world_size) if info else "-",
        "SIZE": size(info.nbytes_state) if info else "-",
        "WRITTEN": "-" if row.nbytes is None else size(row.nbytes),
        "USES": str(len(info.stands.on)) if info else "-",
        "OLDEST": info.stands.oldest_age if info else "-",
        "LOCAL": str(len(row.local.ranks)) if row.local else "-",
        "STATE": row.state,
        "KEPT": ", ".join(row.kept),
        "METRICS": metrics(info.metrics) if info else "",
    }
    return [Text(plain(cells[name]), style=dim) for name in header]
