"""`ckptlib copy`: begins another run from a step."""

from __future__ import annotations

import time

import click

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.copying import CopiedObjects, commit_copy, copy_layouts, copy_packs, lineage_of, open_copy
from ckptlib.catalog.step_objects import step_objects
from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output
from ckptlib.cli.progress import progress
from ckptlib.errors import CorruptData
from ckptlib.stores import Store
from ckptlib.verify.root import verify_save
from ckptlib.words import count, duration, size

MAX_FINDINGS = 3
"""The most findings that an error names."""


@click.command("copy", short_help="Begin another run from a step.")
@click.option(
    "--new-option",
    metavar="KEY=VALUE",
    multiple=True,
    help="As --option, for NEW_URL. Default: the same options, where both URLs are of the same kind.",
)
@with_storage_options
@click.argument("url")
@click.argument("step")
@click.argument("new_url")
@with_output
def command(
    output: Output, url: str, step: str, new_url: str, option: tuple[str, ...], new_option: tuple[str, ...]
) -> bool:
    """Copies a step into a new root, where another run resumes from it.

    The copy stands alone: it has all packs that the step needs, whichever steps wrote them, as they are. They are read
    back from NEW_URL and compared with their digests; only then the step is listed there. A copy that was interrupted
    has no step, or the whole one, and comes to its end when you give the same command again. Nothing in URL is changed.
    Refuses a NEW_URL that is in use. STEP: a number, a name as `ls --json` prints it, latest or best.
    """
    if _scheme(new_url) == "memory":
        raise click.UsageError(f"{new_url} is memory of this process, and gone when it ends: give a path or a bucket")
    if not new_option and _scheme(url) == _scheme(new_url):
        new_option = option
    with _opened(url, option) as store, _opened(new_url, new_option) as new_store:
        return _copy(store, new_store, output, step)


def _copy(store: Store, new_store: Store, output: Output, step: str) -> bool:
    began = time.monotonic()
    source, target = Catalog(store), Catalog(new_store)
    source.root()
    save = source.resolve(step)
    objects = step_objects(source, save)
    lineage, broken = lineage_of(source, save)
    open_copy(source, target, objects, lineage)
    with progress(output, f"copying step {save.step}") as advance:
        advance.expect(objects.nbytes)
        nbytes = copy_packs(store, new_store, objects, advance)
    copy_layouts(source, target, objects)
    with progress(output, f"verifying step {save.step}") as advance:
        found = list(verify_save(Catalog(CopiedObjects(store, new_store)), save, advance, advance.expect))
    if found:
        some = "; ".join(finding.message for finding in found[:MAX_FINDINGS])
        raise CorruptData(
            f"{new_store.url}: the copy of step {save.step} is not whole, so it has no step: {some}. See whether "
            f"{store.url} is: ckptlib verify {store.url} {save}. If it is, delete {new_store.url} and copy again"
        )
    commit_copy(source, target, objects, lineage)
    seconds = time.monotonic() - began
    output.document(
        {
            "url": store.url,
            "new_url": new_store.url,
            "step": save.step,
            "name": str(save),
            "nbytes": objects.nbytes,
            "nbytes_copied": nbytes,
            "packs": len(objects.packs),
            "seconds": seconds,
            **({"problem": str(broken)} if broken else {}),
        }
    )
    output.line(
        f"step {save.step} is in {new_store.url}: {count(len(objects.packs), 'pack')}, {size(objects.nbytes)}, "
        f"all verified, in {duration(seconds)}"
    )
    if broken:
        text = f"its history is incomplete, as it is in {store.url}, and ckptlib gc will refuse it: {broken}"
        output.problem(text)
    return True


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def _opened(url: str, given: tuple[str, ...]) -> Store:
    """Opens a store. A path gets none of the options that the environment has for buckets."""
    return open_url(url, storage_options(given) if given or _scheme(url) != "file" else {})
