"""`ckptlib export`: writes tensors of a step into files for other libraries."""

from __future__ import annotations

import time

import click

from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output
from ckptlib.cli.progress import progress
from ckptlib.exporting.casting import dtype_of
from ckptlib.exporting.export import FORMATS, SAFETENSORS, ExportOrder, export_opened, local_path
from ckptlib.exporting.files import parse_size
from ckptlib.exporting.names import Naming
from ckptlib.reading.opened import open
from ckptlib.stores.secrets import without_userinfo
from ckptlib.words import count, duration, size


@click.command("export", short_help="Write a step's tensors for other libraries.")
@click.option("--step", default="latest", show_default=True, help="A number, a name as `ls --json` prints it, or best.")
@click.option("--format", "form", type=click.Choice(FORMATS), default=SAFETENSORS, show_default=True)
@click.option("--only", multiple=True, metavar="PATTERN", help="Names, path prefixes or patterns; may be repeated.")
@click.option("--strip", default="", metavar="PREFIX", help="A prefix that names lose, such as model/.")
@click.option("--map", "renames", multiple=True, metavar="OLD=NEW", help="Rename, after --strip; may be repeated.")
@click.option("--dtype", metavar="DTYPE", help="Convert floating-point tensors: bf16, fp16 or fp32.")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Of one file of format hf.")
@with_storage_options
@click.argument("url")
@click.argument("out")
@with_output
def command(
    output: Output,
    url: str,
    out: str,
    step: str,
    form: str,
    only: tuple[str, ...],
    strip: str,
    renames: tuple[str, ...],
    dtype: str | None,
    max_shard_size: str,
    option: tuple[str, ...],
) -> bool:
    """Writes tensors of a step into OUT: a file, or for formats hf and dcp a directory.

    Every chunk is compared with its digest on the way. A file has its name only when it is whole and durable, and
    nothing is overwritten. Tied weights are written once. --format torch and dcp need torch;
    dcp has plain values, too, and names optimizer state by parameter.
    """
    began = time.monotonic()
    try:
        naming = Naming(list(only) or None, strip, dict(map(_rename, renames)))
        order = ExportOrder(form, naming, dtype_of(dtype), parse_size(max_shard_size))
        path = local_path(out, form)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    options = storage_options(option)
    open_url(url, options).close()  # raises for a URL that no store takes
    with (
        open(url, step, "numpy", storage_options=options) as opened,
        progress(output, f"exporting step {opened.step}") as advance,
    ):
        report = export_opened(opened, path, order, advance, advance.expect)
    seconds = time.monotonic() - began
    output.document(
        {
            "url": without_userinfo(url),
            "step": report.step,
            "format": report.format,
            "files": [*map(str, report.files)],
            "num_tensors": report.num_tensors,
            "nbytes": report.nbytes,
            "nbytes_read": report.nbytes_read,
            "ties": dict(report.ties),
            "rounded": dict(report.rounded),
            "seconds": seconds,
        }
    )
    where = report.files[0] if len(report.files) == 1 else f"{out} ({count(len(report.files), 'file')})"
    output.line(
        f"step {report.step} is in {where}: {count(report.num_tensors, 'tensor')}, {size(report.nbytes)}, "
        f"in {duration(seconds)}"
    )
    if report.ties:
        output.line(f"tied, and written once: {', '.join(f'{tie} = {name}' for tie, name in report.ties.items())}")
    if report.rounded:
        output.line(f"{count(len(report.rounded), 'tensor')} had been saved rounded (codec=Lossy)")
    return True


def _rename(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise ValueError(f"--map {text}: expected old=new")
    return old, new
