"""What processes asked of a store with faults, while they may be asking more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def operations(plan: Path) -> list[dict[str, Any]]:
    """By the log beside a plan, in order; none before there is one.

    A line that is just being written is left out: where it goes on in another page of the file, half of it may be read.
    """
    try:
        whole, _, _ = Path(f"{plan}.log").read_text().rpartition("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in whole.splitlines()]
