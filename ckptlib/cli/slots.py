"""`ckptlib slots`: shows the snapshots in this host's memory, and which losses their job survives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Cell, Output
from ckptlib.format.manifest import Generation
from ckptlib.slots import files
from ckptlib.slots.files import SlotFile
from ckptlib.slots.placement import ReplicaMap, place
from ckptlib.words import count, plain, size


@click.command("slots", short_help="Show the snapshots in this host's memory.")
@click.argument("url", required=False)
@click.option("--arena", multiple=True, help="Another directory to search; may be repeated.")
@click.option("--clean", is_flag=True, help="Remove slots that their jobs left behind.")
@with_storage_options
@with_output
def command(url: str | None, output: Output, option: tuple[str, ...], arena: tuple[str, ...], clean: bool) -> bool:
    """Lists this user's snapshots in this host's memory; with URL, only that job's, and which losses it survives."""
    generation, root_id = None, None
    if url is not None:
        with open_url(url, storage_options(option)) as store:
            catalog = Catalog(store)
            root_id = catalog.root().id
            newest = max(catalog.generations.ids(), default=None)
            generation = None if newest is None else catalog.generations.record(newest)
    directories = [*files.usual(), *map(Path, arena)]
    prefix = "ckptlib-" if root_id is None else f"ckptlib-{root_id[:16]}-"
    rows = [row for row in files.find(directories) if row.path.name.startswith(prefix)]
    removed = [row for row in rows if clean and not row.in_use]
    for row in removed:
        row.path.unlink(missing_ok=True)
    if clean:
        files.clean_locks(directories, prefix)
    rows = [row for row in rows if row not in removed]
    placement = None if generation is None or not generation.domains else _placement(generation)
    output.document(
        {
            "slots": [_document(row) for row in rows],
            "removed": [str(row.path) for row in removed],
            "placement": None if placement is None else _placement_document(placement),
        }
    )
    _print(output, rows, removed)
    if generation is not None:
        _print_placement(output, generation, placement)
    return True


def _placement(generation: Generation) -> ReplicaMap | None:
    try:
        return place(generation.domains, generation.copies, generation.kinds)
    except ValueError:
        return None  # no job can have made such a record


def _document(row: SlotFile) -> dict[str, object]:
    header = row.header
    return {
        "path": str(row.path),
        "nbytes": row.nbytes,
        "state": row.state,
        "step": None if header is None else header.save.step,
        "rank": None if header is None else header.rank,
        "world_size": None if header is None else header.world_size,
        "snapshot": None if header is None else str(header.save),
    }


def _placement_document(placement: ReplicaMap) -> dict[str, object]:
    return {
        "domains": list(placement.domains),
        "holders": [list(holders) for holders in placement.holders],
        "num_losses_survived": placement.num_losses_survived,
    }


def _print(output: Output, rows: Sequence[SlotFile], removed: Sequence[SlotFile]) -> None:
    header = ["STEP", "RANK", "SIZE", "STATE", "PATH"]
    if rows:
        output.columns(header, [_cells(row) for row in rows], right=("STEP", "RANK", "SIZE"))
        output.line(Text(f"{count(len(rows), 'slot')}, {size(sum(row.nbytes for row in rows))}", style="dim"))
    else:
        output.line("no slots on this host")
    if removed:
        output.line(f"removed {count(len(removed), 'slot')}, {size(sum(row.nbytes for row in removed))}")


def _cells(row: SlotFile) -> list[Cell]:
    header = row.header
    step = "-" if header is None else str(header.save.step)
    rank = "-" if header is None else f"{header.rank}/{header.world_size}"
    return [Text(plain(cell)) for cell in (step, rank, size(row.nbytes), row.state, str(row.path))]


def _print_placement(output: Output, generation: Generation, placement: ReplicaMap | None) -> None:
    if placement is None:
        output.line(f"generation {generation.id.number} keeps snapshots in memory only until they are persisted")
        return
    hosts = dict.fromkeys(placement.domains)
    output.line(
        f"generation {generation.id.number}: {count(len(placement.domains), 'rank')} in "
        f"{count(len(hosts), 'failure domain')}, copies={generation.copies}: survives the loss of any "
        f"{placement.num_losses_survived}"
    )
    for domain in hosts:
        ranks = [rank for rank, d in enumerate(placement.domains) if d == domain]
        homes = dict.fromkeys(placement.domains[h] for rank in ranks for h in placement.holders[rank])
        output.line(
            f"  {plain(domain)}: ranks {ranks[0]}-{ranks[-1]}, replicas in {', '.join(map(plain, homes)) or '-'}"
        )
