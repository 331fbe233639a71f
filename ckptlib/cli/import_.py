"""`ckptlib import`: saves a checkpoint of another library as a step."""

from __future__ import annotations

import importlib
import json
import logging
import time
from pathlib import Path

import click

from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output
from ckptlib.format.keys import MAX_STEP
from ckptlib.stores.secrets import without_userinfo
from ckptlib.words import count, duration, plain, size

CONVERT = "ckptlib.imports.convert"


@click.command("import", short_help="Save another library's checkpoint as a step.")
@click.argument("source", type=click.Path())
@click.argument("url")
@click.option("--step", type=click.IntRange(0, MAX_STEP), help="Default: the source's own where it has one, else 0.")
@click.option("--only", multiple=True, metavar="NAME", help="Take over this name, prefix or pattern; may be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this name, prefix or pattern out; may be repeated.")
@click.option(
    "--params",
    type=click.Path(exists=True, dir_okay=False),
    help="A JSON file: by name of an optimizer, the names of its parameters in its order.",
)
@click.option("--tie", multiple=True, metavar="NAME=OTHER", help="NAME is tied to OTHER; may be repeated.")
@click.option("--scratch", type=click.Path(exists=True, file_okay=False), help="A directory for a copy of the tensors.")
@with_storage_options
@with_output
def command(
    source: str,
    url: str,
    output: Output,
    step: int | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    params: str | None,
    tie: tuple[str, ...],
    scratch: str | None,
    option: tuple[str, ...],
) -> bool:
    """Saves a checkpoint that another library wrote as a step of URL.

    SOURCE: a file of torch.save, a Lightning .ckpt, a safetensors file or a directory of them, or a directory of
    torch.distributed.checkpoint, torchsnapshot, DeepSpeed, Megatron-core or ColossalAI. No code of it runs: pickles are
    read as data. The step is listed when all of it is stored; it is then read back and compared with the source. An
    import that was interrupted has no step: give the same command again, and it goes on. Needs torch, and room for a
    copy in --scratch.
    """
    began = time.monotonic()
    options = storage_options(option)
    open_url(url, options).close()  # fails for a URL that no store takes, before the source is read
    logging.getLogger(CONVERT).addHandler(logging.NullHandler())  # its notes are printed below, once
    # imported by name, and only now: no other command needs torch
    report = importlib.import_module(CONVERT).convert(
        source,
        url,
        step=step,
        only=only,
        skip=skip,
        params=None if params is None else _params(params),
        tie=dict(_tied(text) for text in tie),
        scratch=scratch,
        storage_options=options,
    )
    seconds = time.monotonic() - began
    output.document(
        {
            "source": source,
            "url": without_userinfo(url),
            "kind": report.kind,
            "step": report.step,
            "tensors": report.tensors,
            "values": report.values,
            "nbytes": report.nbytes,
            "aliases": report.aliases,
            "optimizers": list(report.optimizers),
            "left_out": list(report.left_out),
            "notes": list(report.notes),
            "seconds": seconds,
        }
    )
    output.line(
        f"step {report.step} is in {plain(without_userinfo(url))}: {report.kind}, {count(report.tensors, 'tensor')}, "
        f"{count(report.values, 'value')}, {size(report.nbytes)}, compared with the source, in {duration(seconds)}"
    )
    for note in report.notes:
        output.line(plain(note))
    return True


def _params(path: str) -> dict[str, list[str]]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--params {path}: not JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(names, list) for names in found.values()):
        raise click.UsageError(f'--params {path}: expected {{"optimizer": ["model/wte.weight", ...]}}')
    return {str(path): [str(name) for name in names] for path, names in found.items()}


def _tied(text: str) -> tuple[str, str]:
    name, equals, first = text.partition("=")
    if not equals:
        raise click.UsageError(f"--tie {text}: expected NAME=OTHER")
    return name, first
