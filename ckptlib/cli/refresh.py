"""`ckptlib refresh`: makes the next save write chunks again that it would otherwise take over from a step or earlier
ones."""

from __future__ import annotations

import time

import click

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.resolving import resolve_manifest, resolve_save
from ckptlib.catalog.shared_documents import put_new
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.cli.stands import stands_of
from ckptlib.format import documents
from ckptlib.format.keys import STEPS, SaveId
from ckptlib.stores import Store
from ckptlib.words import count, size


@click.command("refresh", short_help="Have the next save write again what older steps hold.")
@with_store
@click.argument("step")
@with_output
def command(store: Store, output: Output, step: str) -> bool:
    """Marks a step, so that later saves no longer refer to what was written for it or for steps before it.

    What a job writes after it went back behind the step is not covered.

    The next save of each rank writes these bytes again, though they have not changed; where a job has more than 1,000
    steps since the oldest pack that it needs, it looks for marks every ten minutes. Use it when a pack may be
    damaged, or before packs of an old step are moved away. The bytes come from the job's memory, never from the store.
    Nothing is deleted; the mark goes when its step goes. STEP: a number, a name as `ls --json` prints it, or latest.
    """
    catalog = Catalog(store)
    save = resolve_save(catalog, step)
    new = _mark(catalog, save)
    newest = resolve_manifest(catalog, "latest")
    covered = [other for other in (*stands_of(newest).on, newest.save) if save.refresh_covers(other)]
    output.document(
        {
            "url": store.url,
            "step": save.step,
            "name": str(save),
            "key": save.refresh_key,
            "new": new,
            "written_again": [*map(str, covered)],
        }
    )
    output.line(f"step {save.step} is marked" if new else f"step {save.step} was marked already")
    if covered:
        output.line(
            f"the next save of each rank writes again what lies in packs of {count(len(covered), 'save')} up to "
            f"step {save.step}: at most {size(newest.nbytes_loaded)} together"
        )
    else:
        output.line(f"step {newest.save.step}, the newest, needs nothing that the mark covers: nothing to do")
    return True


def _mark(catalog: Catalog, save: SaveId) -> bool:
    """Puts the mark. Returns whether it was put; False if it was there already."""
    if save in catalog.steps().refreshes:
        catalog.store.flush(STEPS)  # the process that put it may have died before the name was durable
        return False
    mark = documents.encode("refresh", {"save": str(save), "created": time.time()})
    return put_new(catalog.store, save.refresh_key, mark)
