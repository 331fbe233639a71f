"""`ckptlib gc`: drops old steps and deletes what was dropped long enough ago. `retention` decides which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import Sweep, sweep
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output, somebody_answers
from ckptlib.cli.quantities import HOURS
from ckptlib.format import keys
from ckptlib.format.keys import PackSet, SaveId
from ckptlib.policy.best import MODES
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Store
from ckptlib.words import count, duration, last, size

MAX_USERS = 5
"""The most users of a dropped step that are shown to people; JSON has all."""


@click.command("gc", short_help="Drop old steps and delete what was dropped long ago.")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, metavar="N", help="Keep the N newest steps.")
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="M", help="Also keep the first step from each multiple of M on."
)
@click.option(
    "--keep-within",
    type=HOURS,
    metavar="TIME",
    help="Also keep steps taken no longer than this before the newest, such as 36h or 2d; a bare number is hours.",
)
@click.option("--keep-best", metavar="METRIC", help="Also keep the best step by this metric; needs --mode.")
@click.option("--mode", type=click.Choice(MODES), help="Whether small or large values of --keep-best are good.")
@click.option(
    "--num-best", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Keep the N best steps."
)
@click.option("--exempt", is_flag=True, help="Also drop steps that were saved as exempt.")
@click.option(
    "--grace",
    type=HOURS,
    default=f"{GRACE.total_seconds() / 3600:g}h",
    show_default=True,
    metavar="TIME",
    help="How long to keep the data of a dropped step: at least twice the save deadline of the root.",
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
    keep_within: float | None,
    keep_best: str | None,
    mode: str | None,
    num_best: int,
    exempt: bool,
    grace: float,
    abandoned: bool,
    dry_run: bool,
    yes: bool,
) -> bool:
    """Drops old steps, and deletes the data of steps that were dropped longer ago than the grace period.

    Packs of a dropped step stay for as long as other steps use them; `gc` tells which. Pinned steps always stay, and so
    do those that a job saved as exempt.

    Asks first on a terminal. Refuses while the record of a generation or a manifest is missing or damaged, since nobody
    knows then what is needed.
    """
    catalog = Catalog(store)
    run = partial(sweep, catalog, abandoned=abandoned, exempt=exempt)
    asks = not (dry_run or yes) and somebody_answers()
    if keep_best and mode is None:
        raise click.UsageError(f"--keep-best {keep_best} needs --mode min, as for a loss, or max, as for an accuracy")
    if keep_best is None and (mode is not None or num_best != 1):
        raise click.UsageError("--mode and --num-best go with --keep-best")
    try:
        keep = Keep(
            last=keep_last,
            every=keep_every,
            grace=timedelta(seconds=grace),
            within=None if keep_within is None else timedelta(seconds=keep_within),
            best=keep_best,
            mode=mode,
            num_best=num_best,
        )
        sizes = _sizes(store)
        result = run(keep, None, dry_run=dry_run or asks)  # without a plan that nobody sees: it lists all objects
    except ValueError as error:  # such as a grace period that is too short for this root
        raise click.UsageError(str(error)) from None
    if asks:
        if not _is_idle(result):
            _print(output, result, sizes, _used(catalog, result), grace, done=False)
            click.confirm(_question(result), abort=True, err=True)
        result = run(keep, None)
    used = _used(catalog, result)
    _print(output, result, sizes, used, grace, done=not dry_run)
    output.document({"url": store.url, "dry_run": dry_run, **_document(result, sizes, used)})
    return True


def _question(plan: Sweep) -> str:
    dropped = [*plan.dropped, *plan.condemned]
    parts = [f"drop {count(len(dropped), 'step')}"] if dropped else []
    if plan.deleted:
        parts.append(f"delete {count(len(plan.deleted), 'object')} ({size(plan.nbytes_deleted)})")
    return " and ".join(parts).capitalize() + "?"


def _is_idle(sweep: Sweep) -> bool:
    return not (sweep.dropped or sweep.condemned or sweep.deleted)


@dataclass(frozen=True, slots=True)
class Used:
    """The packs of a dropped save that stay, and the steps that need them."""

    sets: frozenset[PackSet]
    """The sets of its packs that other steps use."""
    by: tuple[SaveId, ...]
    """The committed steps that use them, ascending."""


def _used(catalog: Catalog, result: Sweep) -> dict[SaveId, Used]:
    """Returns the waiting saves whose packs committed steps use. The manifests of these are known from the sweep."""
    waiting = {*result.waiting}
    found: dict[SaveId, Used] = {}
    for save in catalog.saves():
        if save in waiting:
            continue
        try:
            uses = catalog.stand(save).uses.keys()
        except UNREADABLE:
            continue  # dropped or damaged since; the sweep would have refused
        for other in {needed.save for needed in uses} & waiting:
            old = found.get(other, Used(frozenset(), ()))
            sets = old.sets | {needed for needed in uses if needed.save == other}
            found[other] = Used(sets, (*old.by, save))
    return dict(sorted(found.items()))


def _sizes(store: Store) -> dict[PackSet, int]:
    """Returns how many bytes every set of packs has."""
    sizes: dict[PackSet, int] = {}
    for entry in store.scan(keys.PACKS):
        found = keys.pack_set(entry.key)
        if found is not None:
            sizes[found] = sizes.get(found, 0) + entry.nbytes
    return sizes


def _size(sizes: Mapping[PackSet, int], save: SaveId) -> int:
    """Returns how many bytes all packs of a save have."""
    return sizes.get(PackSet(save), 0) + sizes.get(PackSet(save, carried=True), 0)


def _document(result: Sweep, sizes: Mapping[PackSet, int], used: Mapping[SaveId, Used]) -> dict[str, object]:
    def rows(saves: tuple[SaveId, ...]) -> list[dict[str, object]]:
        return [{"step": save.step, "name": str(save), "nbytes": _size(sizes, save)} for save in saves]

    return {
        "dropped": rows(result.dropped),
        "condemned": rows(result.condemned),
        "waiting": rows(result.waiting),
        "broken": rows(tuple(sorted(result.broken))),
        "used": [
            {
                "step": save.step,
                "name": str(save),
                "nbytes": sum(sizes.get(of, 0) for of in of_save.sets),
                "used_by": [*map(str, of_save.by)],
            }
            for save, of_save in used.items()
        ],
        "deleted": [{"key": entry.key, "nbytes": entry.nbytes} for entry in result.deleted],
        "nbytes_deleted": result.nbytes_deleted,
    }


def _print(
    output: Output, result: Sweep, sizes: Mapping[PackSet, int], used: Mapping[SaveId, Used], grace: float, done: bool
) -> None:
    later = f"data deleted in {duration(grace)}"
    groups = [
        ("dropped" if done else "would drop", result.dropped, later),
        ("condemned" if done else "would condemn", result.condemned, f"never committed, {later}"),
    ]
    broken = tuple(sorted({*result.broken} - {*result.dropped}))
    groups.append(("lacks objects", broken, "others are kept in its place; see ckptlib verify"))
    rows = [
        (word if i == 0 else "", f"step {save.step}", size(_size(sizes, save)), "see below" if save in used else why)
        for word, saves, why in groups
        for i, save in enumerate(saves)
    ]
    rows += [
        (
            "" if i else "stays" if done else "would stay",
            f"step {save.step}",
            size(sum(sizes.get(of, 0) for of in of_save.sets)),
            f"{count(len(of_save.by), 'step')} {'uses' if len(of_save.by) == 1 else 'use'} it: "
            + last([user.step for user in of_save.by], MAX_USERS),
        )
        for i, (save, of_save) in enumerate(used.items())
    ]
    output.columns((), rows)
    if result.deleted:
        word = "deleted" if done else "would delete"
        output.line(f"{word}  {count(len(result.deleted), 'object')}, {size(result.nbytes_deleted)}")
    held = {*result.waiting} - {*result.dropped} - used.keys()
    if held:
        text = (
            f"{count(len(held), 'dropped step')} in the grace period, {size(sum(_size(sizes, save) for save in held))}"
        )
        output.line(Text(text, style="dim"))
    if _is_idle(result):
        output.line("nothing to do")
