"""`ckptlib goodput`: shows where the time of a run went."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptlib.catalog.accounts import Accounts, read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.goodput import Goodput, Start, goodput
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.format.account import CLOSED, DIED
from ckptlib.reporting.plots import USES
from ckptlib.stores import Store
from ckptlib.words import count, moment, percent, seconds

MAX_STARTS = 40
"""The most lines of the table; --json has all."""


@click.command("goodput", short_help="Show what became of a run's time.")
@with_store
@with_output
def command(output: Output, store: Store) -> bool:
    """Shows what a run's time was spent on, over all its starts: trained, stalled, lost, restoring, down.

    ETTR is the share of the time that trained steps which count. Exit status 1 where a record cannot be read; what the
    others tell is shown all the same.
    """
    catalog = Catalog(store)
    catalog.root()
    accounts = read_accounts(catalog)
    found = goodput(accounts.told)
    output.document(document(found, accounts))
    if not output.as_json:
        _print(output, found, accounts)
    return not accounts.problems


def document(found: Goodput, accounts: Accounts) -> dict[str, object]:
    """Returns the result for JSON: seconds, steps and shares."""
    return {
        "seconds": {**asdict(found.spent), "total": found.spent.total},
        "ettr": found.ettr,
        "ettr_predicted": found.predicted,
        "failures": found.failures,
        "mtbf_s": found.mtbf,
        "interval_s": found.interval,
        "save_s": found.save_cost,
        "restart_s": found.restart,
        "saves": found.num_saves,
        "starts": [_start(start) for start in found.starts],
        "untold": [*map(str, accounts.untold)],
        "problems": [*accounts.problems],
    }


def _start(start: Start) -> dict[str, object]:
    return {
        "generation": str(start.generation),
        "began": start.began,
        "first": start.first,
        "last": start.last,
        "steps_lost": start.steps_lost,
        "end": start.end,
        "seconds": asdict(start.spent),
        "clock_skew_s": start.skew,
    }


def _print(output: Output, found: Goodput, accounts: Accounts) -> None:
    if found.starts:
        _print_sums(output, found)
        output.line("")
        _print_starts(output, found)
    else:
        output.line("no start of this run has left an account of its time")
    unknown = sum(start.end is None for start in found.starts[:-1])
    if unknown:
        output.line(f"{count(unknown, 'start')} left no word of its end: what came after its last save counts as down")
    if any(start.skew > 1.0 for start in found.starts):
        output.line("some start began before the one before it had ended: their hosts' clocks differ, or both ran")
    if accounts.untold:
        what = count(len(accounts.untold), "generation")
        output.line(f"{what} without an account (of an older ckptlib, or of ckptlib.save): counted as down")
    for problem in accounts.problems[:8]:
        output.problem(problem)


def _print_sums(output: Output, found: Goodput) -> None:
    total = found.spent.total
    rows = [
        (name, seconds(value), percent(value / total if total else None), USES[name][1])
        for name, value in asdict(found.spent).items()
    ]
    output.columns(("", "time", "share", ""), [*rows, ("total", seconds(total), "", "")], right=("time", "share"))
    output.line("")
    mtbf = "none" if found.mtbf is None else f"{found.failures:,}, every {seconds(found.mtbf)} in the mean"
    output.line(f"failures: {mtbf}")
    if found.interval is not None and found.save_cost is not None:
        saves = f"{found.num_saves:,}, one for {seconds(found.interval)} of training"
        output.line(f"saves: {saves}, which waits {seconds(found.save_cost)} for it")
    output.line(f"ETTR: {percent(found.ettr)} measured, {percent(found.predicted)} by the formula")


def _print_starts(output: Output, found: Goodput) -> None:
    shown = found.starts[-MAX_STARTS:]
    if len(shown) < len(found.starts):
        output.line(f"the last {len(shown)} of {len(found.starts):,} starts:")
    header = ("generation", "began", "steps", "lost", "trained", "stalled", "restoring", "down before", "end")
    rows = [
        (
            str(start.generation.number),
            moment(start.began),
            "none" if start.last is None else f"{start.first} to {start.last}",
            f"{start.steps_lost}",
            *map(seconds, (start.spent.trained, start.spent.stalled, start.spent.restoring, start.spent.down)),
            {DIED: "failed", CLOSED: "ended"}.get(start.end or "", "not known"),
        )
        for start in shown
    ]
    output.columns(header, rows, right=("lost", "trained", "stalled", "restoring", "down before"))
