"""How does ckptlib stand? Runs all benchmarks one after another, and writes what they found as a page with plots.

`python -m benchmarks report --out DIR` leaves DIR/<name>.jsonl, DIR/RESULTS.md and a few images; with --write-only the
page is made anew from the lines that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import lossy
from benchmarks.common import Line

NAMES = (
    "limits",
    "stall",
    "replicas",
    "save",
    "load",
    "reshard",
    "small_tensors",
    "many_tensors",
    "memory",
    "beat",
    "slowdown",
    "overhead",
    "scale",
    "requests",
    "recover",
    "smaller",
    "codecs",
    "sparse",
    "throttled",
    "tier",
    "restore_increments",
    "lossy",
    "gpu",
)
SUBJECT = "ckptlib"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="default: beside the benchmarks")
    parser.add_argument("--write-only", action="store_true", help="runs nothing")
    parser.add_argument("--toy", action="store_true", help="seconds each; the figures mean nothing")
    parser.add_argument("names", nargs="*", default=NAMES, help="default: all")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in () if given.write_only else given.names:
        print(f"\n{name}", flush=True)
        toy = ["--toy"] if given.toy else []
        subprocess.run(
            [sys.executable, "-m", "benchmarks", name, "--out", str(given.out / f"{name}.jsonl"), *toy], check=False
        )
    lines = {path.stem: read(path) for path in sorted(given.out.glob("*.jsonl"))}
    (given.out / "RESULTS.md").write_text(page(lines, plots(lines, given.out)))


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Targets

Figures = Mapping[tuple[str, str, str, str], Line]
"""By benchmark, case, subject and quantity."""


@dataclass(frozen=True, slots=True)
class Target:
    """A promise, and how it is read off the figures."""

    text: str
    at_least: bool
    bound: float
    found: Callable[[Figures], list[float]]
    """One value per case; the worst counts."""
    unit: str = ""


def figures_of(lines: Mapping[str, Sequence[Line]]) -> Figures:
    return {
        (name, line["case"], line["subject"], line["what"]): line
        for name, found in lines.items()
        for line in found
        if line["kind"] == "figure" and "subject" in line
    }


def _times(benchmark: str, other: str, what: str, ours: str | None = None) -> Callable[[Figures], list[float]]:
    """The median of `other` over ckptlib's, case by case."""

    def found(figures: Figures) -> list[float]:
        pairs = (
            (line, figures.get((benchmark, case, SUBJECT, ours or what)))
            for (name, case, subject, quantity), line in figures.items()
            if (name, subject, quantity) == (benchmark, other, what)
        )
        return [line["median"] / mine["median"] for line, mine in pairs if mine is not None]

    return found


def _over(benchmark: str, what: str, bare: str) -> Callable[[Figures], list[float]]:
    """The median of one of ckptlib's figures over that of another."""

    def found(figures: Figures) -> list[float]:
        of = {
            (case, quantity): line["median"]
            for (name, case, subject, quantity), line in figures.items()
            if (name, subject) == (benchmark, SUBJECT)
        }
        return [median / of[case, bare] for (case, quantity), median in of.items() if quantity == what]

    return found


def _medians(benchmark: str, what: str, cases: str = "", subject: str = SUBJECT) -> Callable[[Figures], list[float]]:
    def found(figures: Figures) -> list[float]:
        return [
            line["median"]
            for (name, case, who, quantity), line in figures.items()
            if (name, who) == (benchmark, subject) and quantity.startswith(what) and case.startswith(cases)
        ]

    return found


def _above_budget(figures: Figures) -> list[float]:
    """In points; cases are called `budget 3.5%`."""
    found = (
        (case, line) for (name, case, _, what), line in figures.items() if (name, what) == ("overhead", "overhead")
    )
    return [100 * line["median"] - float(case.removeprefix("budget ").removesuffix("%")) for case, line in found]


ON_GPU, BARE_ON_GPU, COPY = "ckptlib, every iteration, memory='host'", "bare pinned copy", "copy to the host"


def _copy_on_gpu(figures: Figures) -> list[float]:
    rates = {
        subject: line["median"] for (name, _, subject, what), line in figures.items() if (name, what) == ("gpu", COPY)
    }
    return [rates[ON_GPU] / rates[BARE_ON_GPU]] if {ON_GPU, BARE_ON_GPU} <= rates.keys() else []


DEFAULTS = ("8 bits", "8 bits, resumed 10 times", "bfloat16")
"""What users can ask of lossy codecs."""


def _lossy(figures: Figures) -> list[float]:
    """How far the loss of lossy runs ends from the exact run's, over the farthest that an exact run does."""
    away = {
        subject: abs(line["median"])
        for (name, _, subject, _), line in figures.items()
        if name == "lossy" and "step" in line
    }  # the last point of each
    if not away:
        return []
    noise = max(away[subject] for subject in lossy.NOISE)
    return [away[subject] / noise for subject in DEFAULTS]


STALL, AIM = "stall per checkpoint", "target (1 ms + 10 us per tensor)"
DIGESTED = "bare read and digest"
BUSY, FREE = "step while persisting", "step without checkpoints"

TARGETS = (
    Target("stall, DCP's asynchronous one over it", True, 30.0, _times("stall", "DCP async thread", STALL)),
    Target("stall, DCP's synchronous one over it", True, 300.0, _times("stall", "DCP", STALL)),
    Target("stall, torch_checkpointing's over it", True, 1.0, _times("stall", "torch_checkpointing", STALL)),
    Target("stall, 1 ms + 10 us per tensor over it", True, 1.0, _times("stall", SUBJECT, AIM, STALL)),
    Target("steps with a save every 4, over steps without", False, 1.02, _medians("slowdown", "with / without")),
    Target("steps while a save is written, over steps without, median", False, 1.02, _over("slowdown", BUSY, FREE)),
    Target("the same, 95th percentile", False, 1.05, _over("slowdown", f"{BUSY}, p95", f"{FREE}, p95")),
    Target(
        "steps with a snapshot and its replica each, over steps without",
        False,
        1.03,
        _medians("slowdown", "with / without", subject="ckptlib, in memory and a peer's at every step"),
    ),
    Target("overhead with a budget, points above it", False, 0.5, _above_budget),
    Target("the beat, main thread per step", False, 0.0002, _medians("beat", "after_step"), "s"),
    Target("persist, of the bare direct write", True, 0.9, _times("save", "bare direct write", "durable", "persist")),
    Target("load from a cold disk, of the bare direct read", True, 0.9, _times("load", "bare direct read", "load")),
    Target(
        "the same, of bare direct reads with 8 under way",
        True,
        0.9,
        _times("load", "bare direct reads, 8 under way", "load"),
    ),
    Target("synchronous save, times DCP", True, 3.0, _times("save", "DCP", "durable")),
    Target("synchronous save, times torch.save + fsync", True, 1.5, _times("save", "torch.save+fsync", "durable")),
    Target("load, times DCP", True, 2.0, _times("load", "DCP", "load")),
    Target("bytes read over bytes needed, another number of ranks", False, 1.02, _medians("reshard", "asked", "FSDP")),
    Target("small tensors: save, times DCP", True, 10.0, _times("small_tensors", "DCP", "save")),
    Target("small tensors: load, times DCP", True, 10.0, _times("small_tensors", "DCP", "load")),
    Target(
        "small tensors: beside the data", False, 150.0, _medians("small_tensors", "beside the data"), "B per tensor"
    ),
    Target("60,000 tensors, a model and AdamW: first save", False, 1.0, _medians("many_tensors", "first save"), "s"),
    Target("the same, later ones", False, 0.1, _medians("many_tensors", "save"), "s"),
    Target("trainer's memory beyond its slots", False, 64.0, _medians("memory", "extra"), "MB"),
    Target("writer's memory", False, 150.0, _medians("memory", "writer"), "MB"),
    Target("construction", False, 0.1, _medians("beat", "construction"), "s"),
    Target("writer ready, one rank", False, 0.25, _medians("beat", "writer ready", "1 ranks"), "s"),
    Target("restore from own slots, of a bare read and digest", True, 0.7, _times("recover", DIGESTED, "read")),
    Target("the same, all of it, 2 ranks with 0.5 GB", False, 0.2, _medians("recover", "restore", "own slots"), "s"),
    Target("restore from a peer, of bare gloo", True, 0.6, _times("recover", "bare gloo", "bring and read")),
    Target("committing at 1,024 ranks, rank 0", False, 0.1, _medians("scale", "steady commit", "1,024"), "cpu s"),
    Target("planning a load at 1,024 ranks", False, 1.0, _medians("scale", "load planning", "1,024"), "cpu s"),
    Target("committing at 16,384 ranks, rank 0", False, 0.3, _medians("scale", "steady commit", "16,384"), "cpu s"),
    Target("planning a load at 16,384 ranks, to 8", False, 1.0, _medians("scale", "load planning", "16,384"), "cpu s"),
    Target("300 steps after a lossy resume: loss off the exact run's, over what noise does", False, 1.0, _lossy),
    Target("a GPU: stall for a snapshot at each iteration", False, 0.01, _medians("gpu", STALL, subject=ON_GPU), "s"),
    Target(
        "the same: iterations, over those without", False, 1.01, _medians("gpu", "turn with / without", subject=ON_GPU)
    ),
    Target("the same: the copy, of the bare one over the link", True, 0.9, _copy_on_gpu),
)


def judged(figures: Figures) -> Iterable[tuple[str, str, str, str]]:
    """(target, bound, the worst that was found, verdict)."""
    for target in TARGETS:
        found = target.found(figures)
        bound = f"{'>=' if target.at_least else '<='} {target.bound:g} {target.unit}".rstrip()
        if not found:
            yield target.text, bound, "", "not measured"
            continue
        worst = min(found) if target.at_least else max(found)
        met = worst >= target.bound if target.at_least else worst <= target.bound
        yield target.text, bound, f"{worst:.3g} {target.unit}".rstrip(), "met" if met else "**missed**"


# The page


def page(lines: Mapping[str, Sequence[Line]], images: Sequence[str]) -> str:
    """Markdown."""
    text = ["# Results", "", "Made by `python -m benchmarks report`. Losses stand beside gains.", ""]
    started = (line for found in lines.values() for line in found if line["kind"] == "machine")
    machines = sorted(started, key=lambda line: line["at"])
    if machines:
        text += [*_machine(machines), ""]
    if any(line["settings"].get("toy") for line in machines):
        text += ["**These are toy sizes: they show that everything runs, and measure nothing.**", ""]
    text += ["## Targets", "", *_table(("target", "bound", "worst case", ""), judged(figures_of(lines))), ""]
    text += [f"![{Path(image).stem}]({image})" for image in images] + [""] * bool(images)
    for name, found in lines.items():
        text += [f"## {name}", "", *_section(found), ""]
    return "\n".join(text)


def _machine(machines: Sequence[Line]) -> list[str]:
    first = machines[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    loads = [line["load"] for line in machines]
    return [
        f"{first['cpu']}, {first['cores']} cores, {first['memory_bytes'] / 2**30:.0f} GiB, Linux {first['kernel']}, "
        f"checkpoints on {first.get('filesystem', 'an unknown file system')}; load average {min(loads):.1f} to "
        f"{max(loads):.1f} as the benchmarks began, {machines[0]['at']} to {machines[-1]['at']}.",
        "",
        f"{versions}.",
    ]


def _section(found: Sequence[Line]) -> list[str]:
    figures = [line for line in found if line["kind"] == "figure" and "subject" in line]
    best = {(line["case"], line["what"]): line["median"] for line in figures if line["subject"] == SUBJECT}
    rows = []
    for line in figures:
        mine = best.get((line["case"], line["what"]))
        ratio = f"{line['median'] / mine:.2f}" if mine and line["subject"] != SUBJECT else ""
        cold = f"{line['resident']:.0%} of the pages stayed in the cache" if "resident" in line else ""
        rate = f"{line['nbytes'] / line['median'] / 1e9:.2f} GB/s" if _has_rate(line) else ""
        rows.append(
            (
                line["case"],
                line["subject"],
                line["what"],
                f"{line['median']:.4g} {line['unit']}",
                f"{line['low']:.4g} - {line['high']:.4g} ({line['n']})",
                rate,
                ratio,
                cold,
            )
        )
    columns = ("case", "subject", "what", "median", "quartiles (samples)", "rate", "over ckptlib's", "")
    text = _table(columns, rows) if rows else []
    failures = [f"- {line['case']}, {line['subject']}: {line['why']}" for line in found if line["kind"] == "failure"]
    others = [line for line in found if line["kind"] not in ("figure", "failure", "machine") or line not in figures]
    more = [f"- {json.dumps(line)}" for line in others if line["kind"] not in ("failure", "machine")]
    return [*text, *([""] if failures else []), *failures, *more]


def _has_rate(line: Line) -> bool:
    return line["unit"] == "s" and line["what"] in ("durable", "persist", "load") and "nbytes" in line


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


# Plots


def plots(lines: Mapping[str, Sequence[Line]], out: Path) -> list[str]:
    """Names of the images."""
    images = []
    for name, what, title in (
        ("stall", "stall per checkpoint", "Training stands still for a checkpoint"),
        ("save", "durable", "Synchronous save"),
        ("load", "load", "Load, cold"),
        ("small_tensors", "save", "Saving many small tensors"),
    ):
        found = [line for line in lines.get(name, []) if line["kind"] == "figure" and line["what"] == what]
        if found:
            _plot(found, title, out / f"{name}.png")
            images.append(f"{name}.png")
    losses = [line for line in lines.get("lossy", []) if "step" in line]
    if losses:
        _plot_losses(losses, out / "lossy.svg")
        images.append("lossy.svg")
    return images


def _plot(found: Sequence[Line], title: str, path: Path) -> None:
    import matplotlib.pyplot as plt  # only the page needs it

    cases = list(dict.fromkeys(line["case"] for line in found))
    figure, axes = plt.subplots(1, len(cases), figsize=(4.5 * len(cases), 3), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        lines = sorted((line for line in found if line["case"] == case), key=lambda line: -line["median"])
        colours = ["tab:orange" if line["subject"].startswith(SUBJECT) else "tab:grey" for line in lines]
        seconds = [line["median"] for line in lines]
        bars = axis.barh([line["subject"] for line in lines], seconds, color=colours)
        axis.bar_label(bars, [f"{s * 1000:.3g} ms" if s < 1 else f"{s:.3g} s" for s in seconds], padding=2, fontsize=7)
        axis.set_xscale("log")  # or the shortest could not be seen
        axis.set_xlim(min(s for s in seconds if s > 0) / 3, 4 * max(seconds))
        axis.minorticks_off()
        axis.set_title(f"{title}: {case}", fontsize=9)
        axis.set_xlabel("median", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _plot_losses(found: Sequence[Line], path: Path) -> None:
    """How far the loss of each run is from the exact one's, as steps go by; those that lost nothing are a band."""
    import matplotlib.pyplot as plt

    runs: dict[str, dict[int, float]] = {}
    for line in found:
        runs.setdefault(line["subject"], {})[line["step"]] = line["median"]
    steps = list(runs[lossy.NOTHING])
    noise = [max(abs(runs[subject][step]) for subject in lossy.NOISE) for step in steps]
    colours = dict(
        zip([*lossy.LOSSY, lossy.NOTHING], ("#2a9d8f", "#457b9d", "#8e6bbf", "#e76f51", "#c99a2e"), strict=True)
    )
    grey = "#868686"  # can be read on white and on black
    style = {"svg.fonttype": "none", "text.color": grey, "axes.labelcolor": grey, "axes.edgecolor": grey}
    with plt.rc_context({**style, "xtick.color": grey, "ytick.color": grey, "font.size": 9}):
        figure, axis = plt.subplots(figsize=(7, 3.6))
        axis.fill_between(steps, [-width for width in noise], noise, color=grey, alpha=0.3, linewidth=0)
        for subject, colour in colours.items():
            axis.plot(steps, list(runs[subject].values()), color=colour, marker="o", markersize=3, label=subject)
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_xlabel("steps after the resume; grey: as far as exact runs with other batches are off")
        axis.set_ylabel("held-out loss, less that of the exact run")
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8, labelcolor=grey)
        axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
