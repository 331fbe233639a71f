"""The picture of README.md, drawn from the figures of RESULTS.md: `python -m benchmarks.glance` writes it anew.

Bars are linear, and each panel has its own scale. Where a peer is faster, or writes less, its bar is shorter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PICTURE = HERE / "glance.svg"


def in_seconds(seconds: float) -> str:
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    return f"{math.floor(1000 * seconds + 0.5)} ms" if seconds < 0.2 else f"{seconds:.2f} s"


def in_percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


class Panel(NamedTuple):
    """Bars of one quantity, as RESULTS.md calls it, by section and case."""

    title: str
    section: str
    case: str
    what: str
    subjects: Mapping[str, str]
    """As they are called there, and in the picture."""
    shown: Callable[[float], str] = in_seconds


SIZES = {"ckptlib": "ckptlib", "DCP + its zstd": "DCP + zstd", "DCP": "DCP"}
ROWS: Sequence[Sequence[Panel]] = (
    (
        Panel(
            "training stands still, per checkpoint",
            *("stall", "two ranks", "stall per checkpoint"),
            {
                "ckptlib": "ckptlib",
                "torch_checkpointing": "torch_checkpointing",
                "DCP async thread": "DCP, async",
                "torch.save+fsync": "torch.save",
                "DCP": "DCP",
            },
        ),
        Panel(
            "a synchronous save, until durable",
            *("save", "two ranks", "durable"),
            {
                "ckptlib": "ckptlib",
                "safetensors+fsync": "safetensors",
                "torch.save+fsync": "torch.save",
                "DCP": "DCP",
                "torchsnapshot+fsync": "torchsnapshot",
            },
        ),
        Panel(
            "a load from a cold disk",
            *("load", "two ranks", "load"),
            {
                "ckptlib": "ckptlib",
                "torch.load mmap": "torch.load, mmap",
                "DCP": "DCP",
                "torch.load": "torch.load",
                "torch_checkpointing": "torch_checkpointing",
            },
        ),
    ),
    (
        Panel(
            "next checkpoint: 9/10 of it frozen",
            "smaller",
            "nine tenths frozen",
            "second save over first",
            SIZES,
            in_percent,
        ),
        Panel("next checkpoint: LoRA", "smaller", "LoRA", "second save over first", SIZES, in_percent),
        Panel(
            "a trained GPT in bfloat16",
            *("smaller", "trained GPT", "save over state, bf16"),
            {"ckptlib, planes": 'ckptlib, "planes"', "DCP + its zstd": "DCP + zstd", "DCP": "DCP"},
            in_percent,
        ),
    ),
)

PANEL, NAMES, BARS, ROW, TOP = 310, 134, 116, 22, 30
"""Pixels: a panel's width, and of it for names and the longest bar; a row's height; a title's."""

STYLE = """text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .name { text-anchor: end } .bar { fill: #9aa4ae } .ours { fill: #e8710a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #6e7681 } .ours { fill: #f0883e } }"""


def medians(results: str, panel: Panel) -> dict[str, float]:
    """By subject."""
    text = re.search(rf"^## {panel.section}$(.*?)(^## |\Z)", results, re.M | re.S)
    if text is None:
        raise ValueError(f"RESULTS.md has no section {panel.section!r}")
    row = rf"^\| {re.escape(panel.case)} \| ([^|]+) \| {re.escape(panel.what)} \| ([0-9.e-]+) (?:s|ratio) \|"
    return {subject: float(median) for subject, median in re.findall(row, text[1], re.M)}


def draw(results: str) -> str:
    """The picture, from the text of RESULTS.md. Raises KeyError for a subject that was not measured."""
    heights = [TOP + ROW * max(len(panel.subjects) for panel in panels) + 4 for panels in ROWS]
    width, height = PANEL * len(ROWS[0]), sum(heights)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
    ]
    for number, panels in enumerate(ROWS):
        for column, panel in enumerate(panels):
            lines += drawn(panel, medians(results, panel), PANEL * column, sum(heights[:number]))
    return "\n".join([*lines, "</svg>"]) + "\n"


def drawn(panel: Panel, found: Mapping[str, float], left: int, top: int) -> list[str]:
    longest = max(found[subject] for subject in panel.subjects)
    lines = [f'<text class="title" x="{left + 8}" y="{top + 16}">{panel.title}</text>']
    for row, (subject, name) in enumerate(panel.subjects.items()):
        x, y = left + NAMES, top + TOP + ROW * row
        bar = max(BARS * found[subject] / longest, 1.0)
        kind = "bar ours" if subject.startswith("ckptlib") else "bar"
        lines += [
            f'<text class="name" x="{x - 6}" y="{y + 13}">{name}</text>',
            f'<rect class="{kind}" x="{x}" y="{y + 2}" width="{bar:.1f}" height="{ROW - 7}" rx="2"/>',
            f'<text x="{x + bar + 5:.1f}" y="{y + 13}">{panel.shown(found[subject])}</text>',
        ]
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw((HERE / "RESULTS.md").read_text(encoding="utf-8")), encoding="utf-8")
