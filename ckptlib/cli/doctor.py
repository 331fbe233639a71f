"""`ckptlib doctor`: whether this host, and a store, are fit for checkpoints."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.text import Text

from ckptlib.cli import host
from ckptlib.cli.host import Check
from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output, duration, plain, size
from ckptlib.errors import CkptError
from ckptlib.stores import Store
from ckptlib.stores.io_limits import WRITE_BYTES
from ckptlib.stores.probe import PREFIX, probe

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
    help="Size of the object to write to URL and read back.",
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
    """Rights, then speed; the first failure ends it."""
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
        write_s, read_s = speed(store, nbytes)
    except CkptError as error:
        yield Check("speed", "bad", str(error), "small objects work: check quota, size limits and time-outs")
        return
    yield Check(
        "speed",
        "ok",
        f"write {size(nbytes / write_s)}/s, read {size(nbytes / read_s)}/s with one object of {size(nbytes)}; "
        "a local read may come from the page cache",
        "",
        {"nbytes": nbytes, "write_seconds": write_s, "read_seconds": read_s},
    )


def speed(store: Store, nbytes: int) -> tuple[float, float]:
    """Seconds to write an object as a pack is written, and to read it back. It is deleted."""
    key = f"{PREFIX}{secrets.token_hex(8)}"
    data = mmap.mmap(-1, min(nbytes, WRITE_BYTES))  # page-aligned, as a slot is
    data.write(secrets.token_bytes(len(data)))
    try:
        began = time.perf_counter()
        store.put(key, b"", (memoryview(data)[: nbytes - at] for at in range(0, nbytes, len(data))))
        written = time.perf_counter()
        for at in range(0, nbytes, len(data)):
            store.get(key, at, min(len(data), nbytes - at))
        return written - began, time.perf_counter() - written
    finally:
        store.delete(key)


def direct_io(directory: Path) -> Check:
    """Whether files there can be written around the page cache."""
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
    """Directories that were not there before go again, where they are empty."""
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
            with contextlib.suppress(OSError):  # somebody uses it by now
                os.rmdir(name)


def _print(output: Output, check: Check) -> None:
    output.line(Text(f"{check.verdict:<8}", style=STYLES[check.verdict]), "  ", f"{check.name:<15}", check.found)
    for text in (*([check.advice] if check.advice else []), *check.details):
        output.line(" " * 25, Text(plain(text), style="dim"))
