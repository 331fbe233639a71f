"""`ckptlib gc`: drops old steps and deletes what was dropped long enough ago. What goes is decided by `retention`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import Sweep, sweep
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output, count, duration, size
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Store


@click.command("gc", short_help="Drop old steps and delete what was dropped long ago.")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, metavar="N", help="Keep the N newest steps.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="M", help="Also keep steps that are multiples of M.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=GRACE.total_seconds() / 3600,
    show_default=True,
    metavar="HOURS",
    help="How long to keep the data of a dropped step.",
)
@click.option("--abandoned", is_flag=True, help="Also drop steps that a rewind abandoned.")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_store
@with_output
def command(
    store: Store,
    output: Output,
    keep_last: int,
    keep_every: int | None,
    grace: float,
    abandoned: bool,
    dry_run: bool,
    yes: bool,
) -> bool:
    """Drops old steps, and deletes the data of steps that were dropped longer ago than the grace period.

    Asks first on a terminal. Refuses while the record of a generation is missing, since the history would lack its
    steps.
    """
    catalog = Catalog(store)
    keep = Keep(keep_last, keep_every, timedelta(hours=grace))
    try:
        plan = sweep(catalog, keep, None, dry_run=True, abandoned=abandoned)
    except ValueError as error:  # a grace period that is too short for this root
        raise click.UsageError(str(error)) from None
    sizes = _sizes(store)
    asked = not dry_run and not yes and sys.stdin.isatty() and not _is_idle(plan)
    if dry_run or asked:
        _print(output, plan, sizes, grace, done=False)
    if asked:
        click.confirm(_question(plan), abort=True, err=True)
    result = plan if dry_run else sweep(catalog, keep, None, abandoned=abandoned)
    if not dry_run:
        _print(output, result, sizes, grace, done=True)
    output.document({"url": store.url, "dry_run": dry_run, **_document(result, sizes)})
    return True


def _question(plan: Sweep) -> str:
    dropped = [*plan.dropped, *plan.condemned]
    parts = [f"drop {count(len(dropped), 'step')}"] if dropped else []
    if plan.deleted:
        parts.append(f"delete {count(len(plan.deleted), 'object')} ({size(plan.nbytes_deleted)})")
    return " and ".join(parts).capitalize() + "?"


def _is_idle(sweep: Sweep) -> bool:
    return not (sweep.dropped or sweep.condemned or sweep.deleted)


def _sizes(store: Store) -> dict[SaveId, int]:
    """Bytes of the packs of every save."""
    sizes: dict[SaveId, int] = {}
    for entry in store.scan(keys.PACKS):
        save = keys.pack_save(entry.key)
        if save is not None:
            sizes[save] = sizes.get(save, 0) + entry.nbytes
    return sizes


def _document(result: Sweep, sizes: Mapping[SaveId, int]) -> dict[str, object]:
    def rows(saves: tuple[SaveId, ...]) -> list[dict[str, object]]:
        return [{"step": save.step, "name": str(save), "nbytes": sizes.get(save, 0)} for save in saves]

    return {
        "dropped": rows(result.dropped),
        "condemned": rows(result.condemned),
        "waiting": rows(result.waiting),
        "deleted": [{"key": entry.key, "nbytes": entry.nbytes} for entry in result.deleted],
        "nbytes_deleted": result.nbytes_deleted,
    }


def _print(output: Output, result: Sweep, sizes: Mapping[SaveId, int], grace: float, done: bool) -> None:
    later = f"data deleted in {duration(grace * 3600)}" if grace else "data deleted at the next run"
    groups = [
        ("dropped" if done else "would drop", result.dropped, later),
        ("condemned" if done else "would condemn", result.condemned, f"never committed, {later}"),
    ]
    rows = [
        (word if i == 0 else "", f"step {save.step}", size(sizes.get(save, 0)), why)
        for word, saves, why in groups
        for i, save in enumerate(saves)
    ]
    output.columns((), rows)
    if result.deleted:
        word = "deleted" if done else "would delete"
        output.line(f"{word}  {count(len(result.deleted), 'object')}, {size(result.nbytes_deleted)}")
    held = {*result.waiting} - {*result.dropped}
    if held:
        text = f"{count(len(held), 'dropped step')} in the grace period, {size(sum(sizes.get(s, 0) for s in held))}"
        output.line(Text(text, style="dim"))
    if _is_idle(result):
        output.line("nothing to do")
