"""`ckptlib pin` and `ckptlib unpin`: keep a step, whatever retention is asked for, and end that."""

from __future__ import annotations

import click

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.pins import pin, unpin
from ckptlib.catalog.resolving import resolve_save
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.stores import Store


@click.command("pin", short_help="Keep a step, whatever retention is asked for.")
@with_store
@click.argument("step")
@with_output
def pin_command(store: Store, output: Output, step: str) -> bool:
    """Pins a step: neither a job with keep= nor gc drops it, until you unpin it.

    If it succeeds, the pin holds, whatever job or gc runs meanwhile. It fails for a step that is gone already. STEP: a
    number, a name as `ls --json` prints it, latest or best.
    """
    catalog = Catalog(store)
    save = resolve_save(catalog, step)
    new = pin(catalog, save)
    output.document({"url": store.url, "step": save.step, "name": str(save), "pinned": True, "changed": new})
    output.line(f"step {save.step} is pinned" if new else f"step {save.step} was pinned already")
    return True


@click.command("unpin", short_help="Take the pin of a step away.")
@with_store
@click.argument("step")
@with_output
def unpin_command(store: Store, output: Output, step: str) -> bool:
    """Takes the pin of a step away. Nothing is deleted: the next job with keep=, or gc, decides about the step.

    STEP: a number, a name as `ls --json` prints it, latest or best.
    """
    catalog = Catalog(store)
    save = resolve_save(catalog, step)
    changed = unpin(catalog, save)
    output.document({"url": store.url, "step": save.step, "name": str(save), "pinned": False, "changed": changed})
    output.line(f"step {save.step} is no longer pinned" if changed else f"step {save.step} was not pinned")
    return True
