"""`ckptlib probe`: measures how fast a store is from this host. `doctor` also judges what it finds."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.stores import Store
from ckptlib.stores.measure import Speeds, Transfer, line, measure
from ckptlib.words import duration, size


@click.command("probe", short_help="Measure a store.")
@click.option(
    "--size",
    "mebibytes",
    type=click.IntRange(1, 100_000),
    default=128,
    show_default=True,
    metavar="MIB",
    help="The most to write to URL, and to read back, at a time.",
)
@with_store
@with_output
def command(store: Store, output: Output, mebibytes: int) -> bool:
    """Measures the store at URL: requests per second, their latency, bytes per second, and how these relate.

    It deletes what it writes there.
    """
    speeds = measure(store, mebibytes * 1024 * 1024)
    output.document({"url": store.url, **document(speeds)})
    for name, seconds in speeds.latency_s.items():
        output.line(f"{name:<8}", f"{duration(seconds)} for a small object")
    output.line(f"{'puts':<8}", f"{speeds.puts_per_second:,.0f} small objects per second")
    output.line(f"{'gets':<8}", f"{speeds.gets_per_second:,.0f} small objects per second")
    for direction, transfers in (("up", speeds.up), ("down", speeds.down)):
        for transfer in transfers:
            shape = f"{transfer.at_once} x {size(transfer.nbytes)}"
            output.line(f"{direction:<8}", f"{shape:<14}", f"{size(transfer.bytes_per_second)}/s")
        fit = line(transfers)
        if fit.latency_s > 0:  # else the latency cannot be told from the time of the bytes
            output.line(
                f"{direction:<8}",
                f"one request alone takes {duration(fit.latency_s)} and moves {size(fit.bytes_per_second)}/s: "
                f"below {size(fit.knee_nbytes)} it mostly waits",
            )
    output.line(f"{'up':<8}", f"one object, as a pack is put: {size(speeds.whole_up)}/s")
    return True


def document(speeds: Speeds) -> dict[str, object]:
    """Returns speeds for JSON. Units: seconds, bytes, bytes per second, requests per second."""
    return {
        "latency_s": dict(speeds.latency_s),
        "puts_per_second": speeds.puts_per_second,
        "gets_per_second": speeds.gets_per_second,
        "up": {"transfers": _rows(speeds.up), "fit": _fit(speeds.up), "whole_object": speeds.whole_up},
        "down": {"transfers": _rows(speeds.down), "fit": _fit(speeds.down)},
    }


def _rows(transfers: Sequence[Transfer]) -> list[dict[str, object]]:
    return [transfer._asdict() for transfer in transfers]


def _fit(transfers: Sequence[Transfer]) -> dict[str, float]:
    found = line(transfers)
    return {**found._asdict(), "knee_nbytes": found.knee_nbytes}
