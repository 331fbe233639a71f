"""`ckptlib doctor`: checks whether this host, and a store, are fit for checkpoints."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from rich.text import Text

from ckptlib.cli import host
from ckptlib.cli.host import Check
from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output
from ckptlib.cli.probe import document
from ckptlib.errors import CkptError
from ckptlib.stores import Store
from ckptlib.stores.io_limits import PART_NBYTES, RUN_BYTES, THREADS
from ckptlib.stores.measure import Speeds, Transfer, line, measure
from ckptlib.stores.probe import probe
from ckptlib.words import duration, plain, size

SLOW_REQUEST_S = 1.0
"""A store whose small requests take longer makes every commit wait."""

STYLES = {"ok": "green", "warning": "yellow", "bad": "red"}


@click.command("doctor", short_help="Check this host, and a store.")
@click.argument("url", required=False)
@click.option(
    "--size",
    "mebibytes",
    type=click.IntRange(1, 100_000),
    default=64,
    show_default=True,
    metavar="MIB",
    help="The most to write to URL, and to read back, at a time.",
)
@with_storage_options
@with_output
def command(url: str | None, output: Output, option: tuple[str, ...], mebibytes: int) -> bool:
    """Checks this host. With URL, also that store: permissions, speed, direct I/O; it deletes what it writes there."""
    checks = []
    for check in _all(url, option, mebibytes):
        checks.append(check)
        _print(output, check)
    good = all(check.verdict != "bad" for check in checks)
    output.document(
        {
            "good": good,
            "checks": [
                {"name": c.name, "verdict": c.verdict, "found": c.found, "advice": c.advice, **c.numbers}
                for c in checks
            ],
        }
    )
    return good


def _all(url: str | None, option: tuple[str, ...], mebibytes: int) -> Iterator[Check]:
    yield from host.checks()
    if url is None:
        return
    options = storage_options(option)
    with open_url(url, options) as store, _left_as_found(url):
        yield from store_checks(store, mebibytes * 1024 * 1024)
        directory = _local_directory(url)
        if directory is not None:
            yield direct_io(directory)


def store_checks(store: Store, nbytes: int) -> Iterator[Check]:
    """Checks permissions, then speed; stops at the first failure."""
    try:
        seconds = probe(store)
    except CkptError as error:
        yield Check("store", "bad", str(error), "check the URL, credentials and permissions: put, list, get, delete")
        return
    slow = [name for name, s in seconds.items() if s > SLOW_REQUEST_S]
    yield Check(
        "store",
        "warning" if slow else "ok",
        "  ".join(f"{name} {duration(s)}" for name, s in seconds.items()),
        f"{', '.join(slow)} of 64 bytes took longer than {duration(SLOW_REQUEST_S)}" if slow else "",
        {"seconds": dict(seconds)},
    )
    try:
        speeds = measure(store, nbytes)
    except CkptError as error:
        yield Check("speed", "bad", str(error), "small objects work: check quota, size limits and time-outs")
        return
    yield Check(
        "speed",
        "ok",
        f"up {size(speeds.best_up)}/s, down {size(speeds.best_down)}/s at best; {speeds.puts_per_second:,.0f} puts and "
        f"{speeds.gets_per_second:,.0f} gets of small objects per second",
        "",
        {"nbytes": nbytes, **document(speeds)},
        details=(
            *(_transfer("up", transfer) for transfer in speeds.up),
            f"up: one object of {size(nbytes)}, as a pack is put: {size(speeds.whole_up)}/s",
            *(_transfer("down", transfer) for transfer in speeds.down),
            *(
                f"one request alone, {name}: {duration(found.latency_s)} and {size(found.bytes_per_second)}/s"
                for name, found in (("up", line(speeds.up)), ("down", line(speeds.down)))
                if found.latency_s > 0  # else the latency cannot be told from the time of the bytes
            ),
            *(["a read from a local disk may come from the page cache"] if store.is_local else []),
        ),
    )
    yield Check("defaults", "ok", "what ckptlib does with this store", "", details=tuple(defaults(store, speeds)))


def _transfer(direction: str, transfer: Transfer) -> str:
    return (
        f"{direction}: {transfer.at_once:>2} x {size(transfer.nbytes):>8} at once: {size(transfer.bytes_per_second)}/s"
    )


def defaults(store: Store, speeds: Speeds) -> list[str]:
    """Returns sentences on what ckptlib does with this store."""
    return [
        f"a rank's packs are objects of up to {size(store.pack_nbytes)}"
        + ("" if store.is_local else f", sent in parts of {size(PART_NBYTES)} where the client can"),
        f"a load asks for {THREADS} ranges at once, of up to {size(RUN_BYTES)} each",
        'codec="auto" stores tensors as they are: the store is local'
        if store.is_local
        else 'codec="auto" compresses what a core encodes faster than this store takes it: '
        f"{size(speeds.best_up)}/s here, by one process",
    ]


def direct_io(directory: Path) -> Check:
    """Checks whether files in this directory can be written past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.pwrite(fd, mmap.mmap(-1, mmap.PAGESIZE), 0)
            finally:
                os.close(fd)
    except OSError as error:
        advice = "saves go through the page cache and evict your data set from it; ext4 and XFS support direct I/O"
        return Check("direct I/O", "warning", f"{directory}: {error.strerror}", advice)
    return Check("direct I/O", "ok", f"works in {directory}")


def _local_directory(url: str) -> Path | None:
    path = url.removeprefix("file://")
    return None if "://" in path or not os.path.isdir(path) else Path(path)


@contextlib.contextmanager
def _left_as_found(url: str) -> Iterator[None]:
    """On leaving, removes directories that were not there before, if they are empty."""
    path = url.removeprefix("file://")
    if "://" in path:
        yield
        return
    made = []
    directory = os.path.abspath(path)
    for name in (os.path.join(directory, ".tmp"), directory):
        if not os.path.isdir(name):
            made.append(name)
    while not os.path.isdir(os.path.dirname(directory)):
        directory = os.path.dirname(directory)
        made.append(directory)
    try:
        yield
    finally:
        for name in made:
            with contextlib.suppress(OSError):  # another process uses it by now
                os.rmdir(name)


def _print(output: Output, check: Check) -> None:
    output.line(Text(f"{check.verdict:<8}", style=STYLES[check.verdict]), "  ", f"{check.name:<15}", check.found)
    for text in (*([check.advice] if check.advice else []), *check.details):
        output.line(" " * 25, Text(plain(text), style="dim"))
