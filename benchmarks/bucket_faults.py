"""How soon is who trains told of a bucket that fails, and does the training stand still meanwhile? Fault by fault.

One rank, steps that wait for a device, a save every two seconds, SeaweedFS behind a proxy, requests with the limits
that users have. A fault lasts until it is told, and for a while; then it ends, and the job must commit again. "Told"
counts from the first request that met the fault to the first line of the trainer's log that says what is not answered.
The share is the time that steps spent in ckptlib's `after_step`, of all their time: beside saves that go well, and
while the fault lasts; and whole steps, compared the same way, with all that a machine does to them.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

import ckptlib
from benchmarks.common import ROOT, tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.slowdown import Training
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store
from ckptlib.testing import FaultProxy

FAULTS = {
    "swallowed put": {"fault": "blackhole", "match": "^(PutObject|UploadPart) .*/packs/"},
    "hung listing": {"fault": "hang_reply", "match": "^List"},
    "503 of everything": {"fault": "503"},
    "500 of everything": {"fault": "500"},
    "server stops reading": {"fault": "stall_up", "match": "^(PutObject|UploadPart) .*/packs/", "after": 1000},
    "swallowed small put": {"fault": "blackhole", "match": "^PutObject .*/parts/"},
    "reset going up": {"fault": "reset_up", "match": "^(PutObject|UploadPart) .*/packs/", "after": 1000},
    "bits flip going up": {"fault": "flip_up", "match": "^(PutObject|UploadPart) .*/packs/", "after": 1000},
    "reads stall": {"fault": "stall_down", "match": "^GetObject", "after": 10},
    "bits flip coming down": {"fault": "flip_down", "match": "^GetObject", "after": 100},
}
"""Those of every request, body and answer, in both directions."""

CLIENTS = {"ckptlib, s3fs": "s3fs", "ckptlib, obstore": "obstore"}
TOLD = ("has not answered", "failed", "not committed", "does not match")
"""Words of a line that says so: of a request that waits, or of a save that came to nothing."""

STEP_S = 0.1
LEAST_S = 20.0
"""Of each window, faulty or not."""

MOST_S = 90.0


def main(arguments: list[str]) -> None:
    run(arguments, "bucket_faults", measure, gb=0.05, rounds=2)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    sys.path.append(str(ROOT / "tests"))
    from helpers.servers import start_seaweedfs

    rules = directory / "rules.json"
    clients = dict([*CLIENTS.items()][:1]) if options.toy else CLIENTS
    with start_seaweedfs(directory) as storage:
        for _ in range(1 if options.toy else options.rounds):
            for case in [*FAULTS][-1:] if options.toy else FAULTS:
                for subject, client in clients.items():
                    with FaultProxy(storage.endpoint, rules_path=rules) as proxy:
                        given = {
                            "url": storage.url(),
                            "options": {**storage.options(proxy.url), "client": client},
                            "rules": str(rules),
                            "fault": FAULTS[case],
                            "toy": options.toy,
                            "nbytes": 10_000_000 if options.toy else int(options.gb * 1e9),
                        }
                        lines = figures.attempt(case, subject, __name__, 1, given, options.timeout_s)
                        first = min((r.started for r in proxy.requests if r.fault is not None), default=0.0)
                    for line in lines:
                        samples = [line["at"] - first] if "at" in line else line["samples"]
                        figures.add(case, subject, line["what"], line["unit"], samples)


# In the rank


class _Listener(logging.Handler):
    """When somebody was told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.at: float | None = None

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self.at is None and any(words in record.getMessage() for words in TOLD):
            self.at = record.created


class _Window:
    """Steps, and how much of each went on in ckptlib."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ours: list[float] = []

    @property
    def seconds(self) -> float:
        return sum(self.steps)

    @property
    def share(self) -> float:
        return sum(self.ours) / self.seconds


def work() -> None:
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training, rules = Training(int(given["nbytes"]), 0.0), Path(given["rules"])
    listener, least_s = _Listener(), 1.0 if given["toy"] else LEAST_S
    logging.getLogger("ckptlib").addHandler(listener)
    direct = Catalog(open_store(given["url"], given["options"]))
    deadline = timedelta(seconds=20 if given["toy"] else 600)  # a short one is told of sooner
    state, step = {"model": training.model, "optim": training.optimizer}, 0
    options = {"storage_options": given["options"], "save_deadline": deadline}
    with ckptlib.Checkpointer(given["url"], state, every=20, **options) as saver:

        def train(until: Callable[[_Window], bool]) -> _Window:
            nonlocal step
            window = _Window()
            while not until(window):
                assert window.seconds < MOST_S, "it does not come"
                began = time.perf_counter()
                training.step()
                time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
                step, before = step + 1, time.perf_counter()
                saver.after_step(step)
                window.ours.append(time.perf_counter() - before)
                window.steps.append(time.perf_counter() - began)
            return window

        train(lambda window: len(window.steps) >= 60 and direct.saves() != [])  # slots, plans, connections
        well = train(lambda window: window.seconds > least_s)
        listener.at = None
        _write(rules, [given["fault"]])
        ill = train(lambda window: listener.at is not None and window.seconds > least_s)
        _write(rules, [])
        newest = direct.saves()[-1]
        over = train(lambda window: window.seconds > 1 and len(window.steps) % 10 == 0 and direct.saves()[-1] > newest)
    tell(what="told after", unit="s", at=listener.at)
    tell(what="committed again after", unit="s", samples=[over.seconds])
    for what, window in (("saves go well", well), ("the fault lasts", ill)):
        tell(what=f"share of after_step while {what}", unit="%", samples=[100 * window.share])
        tell(what=f"longest after_step while {what}", unit="s", samples=[max(window.ours)])
    ratio = statistics.median(ill.steps) / statistics.median(well.steps)
    tell(what="median step, fault / well", unit="1", samples=[ratio])
    tell(what="mean step, fault / well", unit="1", samples=[statistics.fmean(ill.steps) / statistics.fmean(well.steps)])
    dist.destroy_process_group()


def _write(path: Path, rules: list[object]) -> None:
    """As a whole: the proxy reads it whenever it changes."""
    path.with_suffix(".new").write_text(json.dumps(rules))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    work()
