"""`python -m ckptlib.exporting`: one export, in a process of its own. It reads its order from stdin, since that may
hold secrets, and writes the outcome to stdout. It needs nothing else of the process that started it, and outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from ckptlib.errors import CkptError, describe
from ckptlib.exporting.asked import order_of
from ckptlib.exporting.export import export_opened
from ckptlib.priority import give_way
from ckptlib.reading.opened import open


def main() -> None:
    give_way()
    order = json.load(sys.stdin)
    try:
        with open(order["url"], order["step"], "numpy", storage_options=order["storage_options"]) as opened:
            report = export_opened(opened, Path(order["out"]), order_of(order))
        told = {"nbytes": report.nbytes, "files": [*map(str, report.files)]}
    except (CkptError, ValueError) as error:
        told = {"error": describe(error)}
    with contextlib.suppress(BrokenPipeError):  # the process that started this one is gone
        print(json.dumps(told), flush=True)
    os._exit(0)  # else Python would complain about a closed pipe


main()
