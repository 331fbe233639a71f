"""`ckptlib verify`: reads steps whole and names what is damaged."""

from __future__ import annotations

import time
from functools import partial

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.resolving import resolve_save
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.cli.progress import progress
from ckptlib.errors import CheckpointNotFound, CkptError
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.stores import Store
from ckptlib.verify.findings import Finding, attempt
from ckptlib.verify.root import verify_root, verify_save
from ckptlib.verify.shared_chunks import SharedChunks
from ckptlib.words import count, duration, plain, size

MAX_SHARDS = 3
"""The most shards of a finding that are shown to people; JSON has all."""


@click.command("verify", short_help="Read a step whole and name what is damaged.")
@click.option("--all", "everything", is_flag=True, help="Verify every committed step, also abandoned ones.")
@click.option("--mend", is_flag=True, help="First put again what is damaged of the documents that are there twice.")
@with_store
@click.argument("step", default="latest")
@with_output
def command(store: Store, output: Output, step: str, everything: bool, mend: bool) -> bool:
    """Reads every byte of a step and checks it against its digest.

    STEP: a number, a name as `ls --json` prints it, or (default) the latest. With --all, good bytes that several steps
    share are read once. Nothing is changed or repaired, but with --mend, before the step is read: of ckptlib.json, the
    step's layouts and the records of generations, each with its copy, the one that is damaged or gone, where the other
    is whole.
    """
    if everything and step != "latest":
        raise click.UsageError("give either STEP or --all")
    catalog = Catalog(store)
    in_root = list(verify_root(catalog))
    saves = catalog.saves() if everything else []
    saves = saves or [_resolve(catalog, step, in_root)]
    mended: list[str] = []
    if mend:
        mended = _mend(catalog, saves)
        catalog = Catalog(store)
        in_root = list(verify_root(catalog))
    for key in mended:
        output.line(Text("put again", style="green"), f"  {key}")
    for finding in in_root:
        _print(output, finding)
    began, nbytes = time.monotonic(), 0
    steps: list[dict[str, object]] = []
    found = [*in_root]
    shared = SharedChunks(catalog, saves) if len(saves) > 1 else None
    for save in saves:
        try:
            with progress(output, f"step {save.step}") as advance:
                mine = list(verify_save(catalog, save, advance, advance.expect, shared))
        except CheckpointNotFound:
            if not everything:
                raise
            continue  # dropped by retention since it was listed
        found += mine
        nbytes += advance.nbytes
        steps.append({"step": save.step, "name": str(save), "good": not mine, "nbytes": advance.nbytes})
        _print_step(output, save, mine, advance.nbytes)
    seconds = time.monotonic() - began
    output.document(
        {
            "url": store.url,
            "good": not found,
            "seconds": seconds,
            "nbytes": nbytes,
            "steps": steps,
            **({"mended": mended} if mend else {}),
            "findings": [document(finding) for finding in found],
        }
    )
    rate = f" ({size(nbytes / seconds)}/s)" if seconds > 0 and nbytes else ""
    summary = f"{count(len(steps), 'step')}, {size(nbytes)} read in {duration(seconds)}{rate}: "
    output.line(
        summary,
        Text(count(len(found), "finding"), style="red") if found else Text("all good", style="green"),
    )
    return not found


def _mend(catalog: Catalog, saves: list[SaveId]) -> list[str]:
    """Puts damaged documents again from their copies, or copies from documents; returns the keys of what it put. Raises
    NewerFormat if a newer ckptlib has written to this root."""
    catalog.generations.check_versions()
    manifests = [attempt(partial(catalog.manifest, save)) for save in saves]
    layouts = {digest for manifest in manifests if isinstance(manifest, Manifest) for digest in manifest.layouts}
    generations = {*catalog.generations.ids(), *(save.generation for save in saves)}
    records = [generation.key for generation in sorted(generations)]
    return catalog.shared.mend([keys.ROOT, *map(keys.layout_key, sorted(layouts)), *records])


def _resolve(catalog: Catalog, step: str, in_root: list[Finding]) -> SaveId:
    """Returns the save of a step. If damaged generations hide the history, "latest" is the step that was saved last."""
    try:
        return resolve_save(catalog, step)
    except CheckpointNotFound:
        raise
    except CkptError:
        saves = [save for save in catalog.saves() if step in ("latest", str(save.step), str(save))]
        if not saves or not in_root:
            raise
        return max(saves, key=lambda save: (save.generation, save.step))


def document(finding: Finding) -> dict[str, object]:
    """Returns a finding for JSON; `box` as a list of [first, last + 1] per dim."""
    fields = {name: getattr(finding, name) for name in ("damage", "key", "message", "rank", "offset", "nbytes")}
    save = finding.save
    return {
        **fields,
        "step": None if save is None else save.step,
        "name": None if save is None else str(save),
        "tensors": [
            {"name": name, "box": [[a, a + n] for a, n in zip(box.offset, box.shape, strict=True)]}
            for name, box in finding.shards
        ],
    }


def _print_step(output: Output, save: SaveId, findings: list[Finding], nbytes: int) -> None:
    mark = Text("bad ", style="red") if findings else Text("good", style="green")
    output.line(mark, f"  step {save.step}  {size(nbytes)}", Text(f"  {save}", style="dim"))
    for finding in findings:
        _print(output, finding)


def _print(output: Output, finding: Finding) -> None:
    output.line("      ", Text(f"{finding.damage:<10}", style="red"), "  ", finding.message)
    if len(finding.shards) > 1:
        some = [f"{name}{box}" for name, box in finding.shards[:MAX_SHARDS]]
        more = len(finding.shards) - len(some)
        text = ", ".join(some) + (f", and {more:,} more" if more else "")
        output.line(" " * 18, Text(plain(text), style="dim"))
