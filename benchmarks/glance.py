"""The picture of README.md, drawn from the figures of RESULTS.md: `python -m benchmarks.glance` writes it anew.

Bars are linear, and each panel has its own scale. Where a peer is faster, its bar is shorter.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "glance.svg"
CASE = "two ranks"

# Title, section of RESULTS.md, quantity, and the subjects: as they are called there, and in the picture.
PANELS = (
    (
        "training stands still, per checkpoint",
        "stall",
        "stall per checkpoint",
        {
            "ckptlib": "ckptlib",
            "torch_checkpointing": "torch_checkpointing",
            "DCP async thread": "DCP, async",
            "torch.save+fsync": "torch.save",
            "DCP": "DCP",
        },
    ),
    (
        "a synchronous save, until durable",
        "save",
        "durable",
        {
            "ckptlib": "ckptlib",
            "safetensors+fsync": "safetensors",
            "torch.save+fsync": "torch.save",
            "DCP": "DCP",
            "torchsnapshot+fsync": "torchsnapshot",
        },
    ),
    (
        "a load from a cold disk",
        "load",
        "load",
        {
            "ckptlib": "ckptlib",
            "torch.load mmap": "torch.load, mmap",
            "DCP": "DCP",
            "torch.load": "torch.load",
            "torch_checkpointing": "torch_checkpointing",
        },
    ),
)

PANEL, NAMES, BARS, ROW, TOP = 310, 134, 116, 22, 30
"""Pixels: a panel's width, and of it for names and the longest bar; a row's height; a title's."""

STYLE = """text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .name { text-anchor: end } .bar { fill: #9aa4ae } .ours { fill: #e8710a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .bar { fill: #6e7681 } .ours { fill: #f0883e } }"""


def medians(results: str, section: str, what: str) -> dict[str, float]:
    """Seconds, by subject."""
    text = re.search(rf"^## {section}$(.*?)(^## |\Z)", results, re.M | re.S)
    if text is None:
        raise ValueError(f"RESULTS.md has no section {section!r}")
    row = rf"^\| {CASE} \| ([^|]+) \| {re.escape(what)} \| ([0-9.e-]+) s \|"
    return {subject: float(median) for subject, median in re.findall(row, text[1], re.M)}


def shown(seconds: float) -> str:
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    return f"{math.floor(1000 * seconds + 0.5)} ms" if seconds < 0.2 else f"{seconds:.2f} s"


def draw(results: str) -> str:
    """The picture, from the text of RESULTS.md. Raises KeyError for a subject that was not measured."""
    rows = max(len(subjects) for *_, subjects in PANELS)
    width, height = PANEL * len(PANELS), TOP + ROW * rows + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
    ]
    for number, (title, section, what, subjects) in enumerate(PANELS):
        found = medians(results, section, what)
        longest = max(found[subject] for subject in subjects)
        left = PANEL * number + NAMES
        lines.append(f'<text class="title" x="{PANEL * number + 8}" y="16">{title}</text>')
        for row, (subject, name) in enumerate(subjects.items()):
            bar = max(BARS * found[subject] / longest, 1.0)
            y = TOP + ROW * row
            kind = "bar ours" if subject == "ckptlib" else "bar"
            lines += [
                f'<text class="name" x="{left - 6}" y="{y + 13}">{name}</text>',
                f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{bar:.1f}" height="{ROW - 7}" rx="2"/>',
                f'<text x="{left + bar + 5:.1f}" y="{y + 13}">{shown(found[subject])}</text>',
            ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw((HERE / "RESULTS.md").read_text(encoding="utf-8")), encoding="utf-8")
