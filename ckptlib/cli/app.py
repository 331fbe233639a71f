"""The `ckptlib` command, made of the commands in the other files."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click
from typing_extensions import override

from ckptlib._version import __version__
from ckptlib.cli import (
    completion,
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
from ckptlib.words import plain


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
cli.add_command(completion.command)
completion.complete_arguments(cli)


class _Escaped(logging.Formatter):
    """Escapes messages, since names in a warning come from a store or a file, too. Leaves out tracebacks, which clients
    of buckets log."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(plain, record.getMessage().splitlines()))


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole command, and exits. `arguments`: None: those of the process."""
    if logging.lastResort is not None:  # prints warnings if logging was not set up
        logging.lastResort.setFormatter(_Escaped())
    if sys.stdout is None:  # closed by the caller: the exit status still tells
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process is there)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the locale has no character for
    try:
        try:
            cli.main(args=arguments, prog_name="ckptlib")
        finally:
            sys.stdout.flush()  # at exit, Python's own flush would make the exit status 120
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads what is still in the buffer
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # the reader has enough, like `head`
        if error.filename is not None:
            sys.exit(f"{error.filename}: {error.strerror}")
        sys.exit(f"the output cannot be written: {error.strerror}. What was written of it is not all")
