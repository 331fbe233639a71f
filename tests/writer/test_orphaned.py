"""A writer whose trainer is gone persists what is in memory only, whatever else it has yet to do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.parse import quote

import pytest
from helpers.fault_log import operations
from helpers.writers import Bench, alive, hear, stop, until
from workers.crash_spare import ROOT_ID

from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import Generation
from ckptlib.policy.keep import Keep
from ckptlib.stores.testing import write_plan
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.client import Writer

KEEP_SLOTS_S = 4.0
"""Half of it passes before a rescue begins."""

DEADLINE_S = 20.0
"""Of a save; a rescue takes half of it, since shares of other ranks may come."""


class Faulty:
    """A writer behind a store with faults."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.plan = bench, bench.directory / "plan.json"
        write_plan(self.plan, [])

    def writer(self, keep_slots_s: float = KEEP_SLOTS_S, **more: object) -> Writer:
        url = f"fault+file://{self.bench.root}?plan={quote(str(self.plan))}"
        return self.bench.writer(url=url, deadline_s=DEADLINE_S, keep_slots_s=keep_slots_s, **more)

    def met(self) -> bool:
        return any(line["fault"] for line in operations(self.plan))

    def manifests(self, step: int) -> list[Path]:
        return [*self.bench.root.glob(f"steps/{step:012d}-*.json")]


@pytest.fixture
def faulty(bench: Bench) -> Faulty:
    return Faulty(bench)


@pytest.mark.slow
def test_a_deletion_that_hangs_holds_up_no_rescue(faulty: Faulty) -> None:
    write_plan(faulty.plan, [{"op": "put", "key": "^trash/", "action": "stall", "seconds": 1e6}])
    writer = faulty.writer(keep=Keep(last=1).to_json())
    for step in (1, 2):
        save, slot = faulty.bench.slot(step)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
        hear(writer, "committed")
    until(faulty.met)
    save, slot = faulty.bench.slot(3)
    writer.add_slot(slot.path)
    writer.held(save)
    writer.leave()
    until(lambda: bool(faulty.manifests(3)) or not alive(writer.pid))
    assert faulty.manifests(3)
    until(lambda: not slot.path.exists())


@pytest.mark.slow
def test_a_step_of_a_generation_without_a_record_is_none(faulty: Faulty) -> None:
    """Nobody would know what came before it."""
    write_plan(faulty.plan, [{"op": "put", "key": "^generations/", "action": "error"}])
    writer = faulty.writer()
    faulty.bench.generation = GenerationId(2, "00000002")
    record = Generation(faulty.bench.generation, 1, None, 0.0, {}, "here")
    writer.begin(BeginOrder(record, ROOT_ID, 3, now=True))
    hear(writer, "not-begun")
    save, slot = faulty.bench.slot(3)
    writer.add_slot(slot.path)
    writer.held(save)
    write_plan(faulty.plan, [])
    writer.leave()
    until(lambda: not alive(writer.pid))
    assert not faulty.manifests(3)
    assert not slot.path.exists()
    assert "the record of its generation is not in the store" in writer.log_path.read_text()


def test_one_whose_trainer_died_in_close_publishes_no_failure_late(faulty: Faulty) -> None:
    """A rescue, or the next job, may be finishing that save."""
    writer = faulty.writer(keep_slots_s=1.5)
    save, slot = faulty.bench.slot(1)
    writer.add_slot(slot.path)
    write_plan(faulty.plan, [{"op": "put", "action": "error"}])
    writer.persist(save, slot.path)
    hear(writer, "failed")
    stop(writer.pid)  # so that it hears at once that the trainer closes, and is gone
    writer._child.channel.send({"op": "close"})
    writer.leave()
    os.kill(writer.pid, signal.SIGCONT)
    until(slot.abandoned)
    write_plan(faulty.plan, [])  # while the next try is still to come
    until(lambda: not alive(writer.pid))
    assert [*faulty.bench.root.glob("parts/*/*")] == []
