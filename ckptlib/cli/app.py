"""The command, made of those in the other files."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckptlib._version import __version__
from ckptlib.cli import (
    copy,
    diff,
    doctor,
    du,
    export,
    gc,
    goodput,
    import_,
    ls,
    pin,
    plan,
    probe,
    refresh,
    report,
    rewind,
    show,
    slots,
    verify,
    watch,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ckptlib")
def cli() -> None:
    """Lists, checks and cleans up checkpoints.

    URL is a path or any URL that fsspec knows, as given to ckptlib.save. Exit status: 0 success, 1 damage or failure,
    2 wrong usage.
    """


for _module in (
    *(ls, show, diff, du, verify, refresh, rewind, copy, export, import_, goodput, report, watch, gc, doctor, probe),
    *(plan, slots),
):
    cli.add_command(_module.command)
cli.add_command(pin.pin_command)
cli.add_command(pin.unpin_command)


def run(arguments: Sequence[str] | None = None) -> None:
    """The whole command; exits. `arguments`: those of the process where none are given."""
    cli.main(args=arguments, prog_name="ckptlib")
