"""Draining: from a local disk to the store, by a writer that may be killed at any moment, and by itself."""

from __future__ import annotations

import glob
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fault_log import operations
from helpers.limits import short_limits
from helpers.persists import codecs_of
from helpers.writers import Bench, alive, hear, heard, until
from places import TESTS
from workers.crash_oracle import failed_parts, read_root
from workers.crash_spare import ready_slot

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.local_disk import part_there
from ckptlib.errors import CorruptData, SaveFailed, StoreError, Superseded
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.format.part import Pack, Part
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.policy.tier import LocalTier
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import FaultStore, flip_bit, write_plan
from ckptlib.writer.client import MAX_DEATHS, Writer
from ckptlib.writer.drain import Drain, Pace, missing
from ckptlib.writer.persist import Persister, put_failure
from ckptlib.writer.tier import Tier

MUTATING = {"put", "write", "commit", "delete"}


class TierBench(Bench):
    """A root behind a FaultStore, a disk before it, and a writer that has both."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.disk, self.plan = directory / "disk", directory / "plan.json"

    def tiered(self, **more: object) -> Writer:
        local = {"path": str(self.disk), "keep_last": 2, "bytes_per_second": None}
        return self.writer(url=f"fault+file://{self.root}?plan={self.plan}", **{"local": local, **more})

    def fault(self, *rules: Mapping[str, object]) -> None:
        """From now on, in place of what there was."""
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        temporary.rename(self.plan)
        for path in self.directory.glob("plan.json.fired-*"):
            path.unlink()

    def operations(self) -> list[dict[str, Any]]:
        """What was asked of the bucket."""
        return operations(self.plan)

    def order(self, writer: Writer, step: int, drains: bool = True) -> SaveId:
        """Each with a layout that the store has not seen."""
        save, slot = self.slot(step, nbytes=(1 << 20) + 64 * step)
        writer.add_slot(slot.path)
        writer.expect(save, drains)
        writer.tell_expected(save)
        writer.persist(save, slot.path, drains)
        return save

    def same_bytes(self) -> None:
        for key in (path.relative_to(self.root) for path in self.root.glob("pa*s/*/*")):
            assert (self.root / key).read_bytes() == (self.disk / key).read_bytes()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[TierBench]:
    bench = TierBench(tmp_path)
    yield bench
    bench.close()


def points(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A rule for each operation: death before it; and behind it, where it changes something.

    But for those of a writer's first commit, which puts copies of what all steps need: each rule meets a later one.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for operation in done:
        op, prefix = operation["op"], operation["key"].split("/")[0]
        if prefix in ("copies", "ckptlib.json"):
            continue
        rule = {"op": op, "key": f"^{prefix}", "nth": seen[op, prefix], "once": True}
        seen[op, prefix] += 1
        yield {**rule, "action": "kill-before"}
        if op in MUTATING:
            yield {**rule, "action": "kill-after"}


@pytest.mark.slow
def test_a_writer_whose_listing_behind_a_commit_hangs_is_replaced(tier: TierBench) -> None:
    """It committed nothing any more, nobody was told, and no further save was drained."""
    tier.fault({"op": "put", "key": "^steps/", "action": "hold"})
    writer = tier.tiered(deadline_s=8.0)
    pid, _ = writer.pid, tier.order(writer, 1)
    until(lambda: any(line["fault"] for line in tier.operations()))
    tier.fault({"op": "scan", "key": "^steps/", "action": "stall", "seconds": 1e9})
    hear(writer, "committed")
    until(lambda: not alive(pid))
    tier.fault()
    tier.order(writer, 2)
    hear(writer, "committed")
    assert writer.pid != pid


def test_a_drain_that_a_writer_had_given_up_as_it_died_is_not_done_by_the_next_one(tier: TierBench) -> None:
    """Other ranks had read that its part would never come, and told so, of a step that was then committed."""
    faults = [("commit", "^packs/", "full"), ("put", "/000001-[0-9a-f]*-failed-", "kill-after")]
    tier.fault(*({"op": op, "key": key, "action": action} for op, key, action in faults))
    writer = tier.tiered(rank=1, world_size=2)
    save = SaveId(1, tier.generation)
    tier.slots.append(ready_slot(tier.directory, save, {"w": np.arange(9)}, 1, size=2))
    writer.add_slot(tier.slots[0].path)
    writer.persist(save, tier.slots[0].path)
    until(lambda: not alive(writer.pid))
    tier.fault()
    assert "rank 1 failed: " in hear(writer, "failed")["error"]
    assert not [*tier.root.glob("parts/*/*-ok-*")]


def test_what_another_rank_has_given_up_as_the_store_was_away_is_not_drained_any_more(tier: TierBench) -> None:
    """Else the shares of all steps of a long outage would be put in vain, and those that come next would wait."""
    tier.fault({"op": "commit", "key": "^packs/", "action": "error"})
    writer = tier.tiered(rank=1, world_size=2)
    save = SaveId(1, tier.generation)
    tier.slots.append(ready_slot(tier.directory, save, {"w": np.arange(9)}, 1, size=2))
    writer.add_slot(tier.slots[0].path)
    writer.persist(save, tier.slots[0].path)
    until(lambda: any(line["fault"] for line in tier.operations()))
    with LocalStore(str(tier.root)) as store:
        put_failure(store, save, 0, "no part of rank 1 came")
    tier.fault()
    assert "rank 0 failed: no part of rank 1 came" in hear(writer, "failed")["error"]
    assert not [*tier.root.glob("packs/*/*")]


def test_a_writer_killed_at_every_operation_of_a_drain_is_followed_by_one_that_drains_the_rest(tier: TierBench) -> None:
    writer = tier.tiered()
    tier.order(writer, 1)
    hear(writer, "committed")
    did = tier.operations()
    assert {("commit", "packs"), ("put", "layouts"), ("put", "parts"), ("put", "steps")} <= {
        (line["op"], line["key"].split("/")[0]) for line in did
    }
    cases = [*points(did)]
    assert len(cases) >= 15
    for step, rule in enumerate(cases, 2):
        tier.fault(rule)
        begun = len(tier.operations())
        save = tier.order(writer, step)
        events = heard(writer, "committed")
        assert [event for event in events if event["event"] == "failed"] == [], rule
        deadline = time.monotonic() + 150
        while sum(bool(line["fault"]) for line in tier.operations()) < step - 1:  # it may come behind the commit
            assert time.monotonic() < deadline, f"not met: {rule}"
            time.sleep(0.01)
        mine = [line for line in tier.operations()[begun:] if str(save) in line["key"]]
        for key in {line["key"] for line in mine if line["op"] == "commit"}:
            done = [line for line in mine if (line["op"], line["key"]) == ("commit", key)]
            again = rule["action"] == "kill-before" and rule["op"] == "commit"
            assert len(done) <= 1 + again, "what is whole is not put again"
    assert [step.number for step in read_root(tier.root)] == [*range(1, len(cases) + 2)]
    assert failed_parts(tier.root) == []
    assert not [*tier.root.glob("parts/*/*-failed-*")]
    names = Counter(path.parent.name for path in tier.root.glob("parts/*/*"))
    assert {*names.values()} == {1}, "one part per save: a snapshot that is on the disk is not put on it again"


def test_slots_are_released_before_anything_is_drained(tier: TierBench) -> None:
    tier.fault({"op": "scan", "action": "error"}, {"op": "put", "action": "error"})
    writer = tier.tiered()
    for step in range(1, 4):
        tier.order(writer, step)
        released = hear(writer, "released")
        assert (released["error"], released["drains"]) == (None, True)
    assert writer.num_undrained == 3
    assert read_root(tier.root) == []
    tier.fault()
    for _ in range(3):
        hear(writer, "committed")
    assert writer.num_undrained == 0
    assert [step.number for step in read_root(tier.root)] == [1, 2, 3]
    tier.same_bytes()


def test_what_is_not_to_be_drained_asks_nothing_of_the_bucket(tier: TierBench) -> None:
    tier.fault()
    writer = tier.tiered()
    for step in range(1, 4):
        tier.order(writer, step, drains=False)
        assert hear(writer, "released")["drains"] is False
    assert writer.num_undrained == 0
    writer.void(SaveId(9, tier.generation), "no memory", drains=False)
    hear(writer, "failed")
    assert writer.close(60) == []
    assert not Path(f"{tier.plan}.log").exists()
    assert len([*tier.disk.glob("parts/*/*")]) == 3


def test_what_the_store_has_is_looked_up_before_each_save_that_is_to_be_drained(tier: TierBench) -> None:
    """By ranks that commit nothing. Else they would refer to steps that were dropped behind the last commit."""
    tier.fault()
    writer = tier.tiered(rank=1, world_size=2)
    save = SaveId(1, tier.generation)
    tier.slots.append(ready_slot(Path("/dev/shm"), save, {"w": np.arange(1 << 18)}, rank=1))
    writer.add_slot(tier.slots[-1].path)
    writer.persist(save, tier.slots[-1].path)
    hear(writer, "drained")

    def looked() -> int:
        return sum((line["op"], line["key"]) == ("scan", "steps/") for line in tier.operations())

    def is_idle() -> bool:
        """A drain is told of a moment before it ends, and while it has not, nobody looks."""
        threads = Path(f"/proc/{writer.pid}/task").glob("*/stat")
        return all(path.read_text().rpartition(")")[2].split()[0] == "S" for path in threads)

    until(is_idle)
    before = looked()
    for step, drains in ((2, False), (3, True)):
        save = SaveId(step, tier.generation)
        writer.expect(save, drains)
        writer.tell_expected(save)
    until(lambda: looked() > before)
    assert looked() == before + 1


def test_an_orphan_drains_what_it_has(tier: TierBench) -> None:
    writer = tier.tiered()
    tier.order(writer, 1)
    tier.order(writer, 2)
    hear(writer, "released")
    hear(writer, "released")
    writer.leave()
    deadline = time.monotonic() + 150
    while [step.number for step in read_root(tier.root)] != [1, 2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_disk_that_is_full_fails_the_save_and_the_next_one_is_as_good_as_any(tier: TierBench) -> None:
    """The disk is made a file for a while: nothing can be put there."""
    writer = tier.tiered()
    tier.disk.write_text("")
    tier.order(writer, 1)
    assert hear(writer, "released")["error"] is not None
    tier.disk.unlink()
    tier.order(writer, 2)
    hear(writer, "committed")
    assert [step.number for step in read_root(tier.root)] == [2]
    assert len(failed_parts(tier.root)) == 1, "other ranks do not wait for the part"


@pytest.mark.parametrize("key", ["^packs/0{11}3-", "^steps/0{11}3-"])
def test_a_full_store_is_given_room_and_the_next_save_is_drained(
    tier: TierBench, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was dropped before its grace period is over goes, as it does without a tier."""
    monkeypatch.syspath_prepend(str(TESTS / "limits"))
    for name, value in short_limits(EARLY_S=0.0).items():
        monkeypatch.setenv(name, value)
    writer = tier.tiered(keep=Keep(1).to_json())
    for step in (1, 2):
        tier.order(writer, step)
        hear(writer, "swept")
    assert [step.number for step in read_root(tier.root)] == [2]
    tier.fault({"op": "put" if "steps" in key else "commit", "key": key, "action": "full"})
    tier.order(writer, 3)
    assert hear(writer, "failed")["kind"] == "StoreFull"
    until(lambda: not glob.glob(f"{tier.root}/packs/000000000001-*/*"))  # pathlib raises if a directory goes meanwhile
    assert part_there(Catalog(LocalStore(str(tier.disk))), SaveId(3, tier.generation), 0) is not None
    tier.order(writer, 4)
    hear(writer, "committed")
    assert [step.number for step in read_root(tier.root)][-1] == 4


def test_a_drain_that_hangs_costs_a_writer_and_is_made_by_the_next_one(tier: TierBench) -> None:
    """As often as it hangs. It was given up behind the third one, while an outage with errors may last for hours."""
    hang = {"op": "commit", "key": "^packs", "action": "stall", "once": True}
    tier.fault(*({**hang, "seconds": 600 + nth} for nth in range(MAX_DEATHS)))
    writer = tier.tiered(deadline_s=2.5)
    hear(writer, "ready")
    first = writer.pid
    tier.order(writer, 1)
    events = heard(writer, "committed")
    assert [event for event in events if event["event"] == "failed"] == []
    assert writer.pid != first
    assert [step.number for step in read_root(tier.root)] == [1]
    assert failed_parts(tier.root) == []


# -- without a writer process


def test_what_is_never_drained_leaves_nothing_behind_in_the_writer(tmp_path: Path) -> None:
    """A job may save to its disks alone for months, every few seconds. Only the newest one can still be drained."""
    tier = Tier(LocalTier(tmp_path), LocalStore(str(tmp_path / "root")), 0, "0" * 32)
    generation = GenerationId(1, "0" * 8)
    tier.expect(SaveId(0, generation))
    for step in range(100):
        tier.note_new(SaveId(step, generation))
    assert [save.step for save in sorted(tier._new)] == [0, 99]


class Direct:
    """A disk with saves on it, and a drain."""

    def __init__(self, directory: Path, bucket: Bench, deadline_s: float = 60.0) -> None:
        self.directory, self.bench = directory, bucket
        self.local = Catalog(LocalStore(str(directory / "disk")))
        self.bucket = Catalog(FaultStore(LocalStore(str(bucket.root)), str(directory / "plan.json")))
        self.uploads: list[int] = []
        self.persister = Persister(self.local.store, ThreadPoolExecutor(1), 0, 1)
        self.executor = ThreadPoolExecutor(1)
        self.drain = self.drain_of(deadline_s)

    def drain_of(self, deadline_s: float, pace: Pace | None = None) -> Drain:
        def note(nbytes: int, began: float, ended: float) -> None:
            self.uploads.append(nbytes)

        return Drain(self.local, self.bucket, self.executor, 0, deadline_s, pace or Pace(None), note)

    def saved(self, step: int, nbytes: int = 10 << 20, smooth: bool = False) -> Part:
        """`smooth`: a codec has something to do."""
        save = SaveId(step, self.bench.generation)
        random = np.random.default_rng(step)
        values = (
            random.normal(size=nbytes // 4).astype(np.float32) if smooth else random.integers(0, 255, nbytes, np.uint8)
        )
        slot = ready_slot(self.directory, save, {"w": values, "small": np.arange(5)})
        slot.read_lock()
        part = self.persister.persist(slot, save)
        slot.unlink()
        return part

    def fault(self, *rules: Mapping[str, object]) -> None:
        write_plan(self.directory / "plan.json", rules)


@pytest.fixture
def direct(tmp_path: Path) -> Direct:
    return Direct(tmp_path, Bench(tmp_path))


def test_a_copy_puts_the_packs_then_the_layout_then_the_part(direct: Direct) -> None:
    part = direct.saved(1)
    assert direct.drain.copy(part.save) == part.nbytes_put == sum(direct.uploads)
    log = [json.loads(line) for line in Path(direct.directory / "plan.json.log").read_text().splitlines()]
    puts = [line["key"].split("/")[0] for line in log if line["op"] in ("put", "commit")]
    assert list(dict.fromkeys(puts)) == ["packs", "layouts", "parts"]
    assert direct.drain.copy(part.save) == 0, "all is there"
    Committer(direct.bucket).commit(part.save, [part.encode()[0]])
    assert [step.number for step in read_root(direct.bench.root)] == [1]


def test_what_the_disk_has_altered_is_never_committed(direct: Direct) -> None:
    part = direct.saved(1)
    path = direct.directory / "disk" / part.packs[0].key
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(CorruptData, match="the local disk has altered it; the step is not committed"):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("parts/*/*")]


def test_frames_that_the_disk_has_altered_are_never_committed(direct: Direct) -> None:
    rules = CodecRules.of("planes")
    direct.persister = Persister(direct.local.store, ThreadPoolExecutor(1), 0, 1, rules=rules)
    part = direct.saved(1, smooth=True)
    assert "planes" in codecs_of(part)
    path = direct.directory / "disk" / part.packs[0].key
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(CorruptData, match="the local disk has altered it; the step is not committed"):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("parts/*/*")]


def test_the_part_that_is_put_is_the_one_that_was_checked(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer does not read it if its table is known: a part that is altered there is found by the load."""
    part = direct.saved(1, nbytes=1000)
    key, read, store = part.encode()[0].key, LocalStore.get, direct.local.store
    sound = store.get(key)
    reads = iter([sound])

    def get(of: LocalStore, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return next(reads, b"altered") if of is store and name == key else read(of, name, offset, nbytes)

    monkeypatch.setattr(LocalStore, "get", get)
    direct.drain.copy(part.save)
    assert (direct.bench.root / key).read_bytes() == sound


def test_what_a_drain_before_has_put_without_a_look_is_looked_at(direct: Direct) -> None:
    """As one leaves it that was killed, or for which the store failed."""
    part = direct.saved(1)
    path = direct.directory / "disk" / part.packs[0].key
    flip_bit(path, path.stat().st_size // 2)
    there = direct.bench.root / part.packs[0].key
    there.parent.mkdir(parents=True)
    there.write_bytes(path.read_bytes())
    with pytest.raises(CorruptData, match="the local disk has altered it; the step is not committed"):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("parts/*/*")]


def test_what_the_disk_has_lost_is_told(direct: Direct) -> None:
    part = direct.saved(1)
    (direct.directory / "disk" / part.packs[0].key).unlink()
    with pytest.raises(SaveFailed, match="cannot be read from the local disk"):
        direct.drain.copy(part.save)
    with pytest.raises(SaveFailed, match="has no part of rank 0 to drain"):
        direct.drain.copy(SaveId(7, direct.bench.generation))


def test_a_superseded_job_drains_nothing(direct: Direct) -> None:
    part = direct.saved(1)
    direct.bucket.generations.put(Generation(GenerationId(2, "00000002"), 1, None, 0.0, {}, "there"))
    with pytest.raises(Superseded):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("packs/*/*")]


def test_what_the_newest_job_goes_on_from_is_drained(direct: Direct) -> None:
    """It has restored it from the local disk, and may not live to save it again."""
    part = direct.saved(1)
    direct.bucket.generations.put(Generation(GenerationId(2, "00000002"), 1, part.save, 0.0, {}, "there"))
    assert direct.drain.copy(part.save) > 0
    assert [*direct.bench.root.glob("packs/*/*")]


def test_a_copy_that_takes_longer_than_a_save_may_is_given_up(direct: Direct) -> None:
    """What lies in a bucket for so long may be swept, and a commit could come between."""
    part = direct.saved(1)
    direct.fault({"op": "put", "key": "^parts", "action": "error"})
    with pytest.raises(StoreError):
        direct.drain.copy(part.save)
    direct.fault()
    old = time.time() - 61
    for path in direct.bench.root.glob("packs/*/*"):
        os.utime(path, (old, old))
    with pytest.raises(SaveFailed, match=r"has been in the store for \d{2,} s, longer than a save may take.* clock"):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("parts/*/*")]


@pytest.mark.parametrize("how", ["suspended", "paused", "clock set"])
def test_a_machine_that_slept_between_its_packs_and_its_part_puts_none(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The monotonic clock stood still. Sweeps know nothing of a part to come, and may have deleted the packs. No clock
    but the wall clock tells of a virtual machine that was paused; and that one may have been set while all is there."""
    part, slept, clock, wall = direct.saved(1), 0.0, time.clock_gettime, time.time
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + slept * (how == "suspended"))
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def sleep(nbytes: int, began: float, ended: float) -> None:
        nonlocal slept
        slept = 61.0
        if how == "paused":
            for path in direct.bench.root.glob("packs/*/*"):
                path.unlink()

    direct.drain._note_upload = sleep
    if how == "clock set":
        assert direct.drain.copy(part.save) == part.nbytes_put
        assert [*direct.bench.root.glob("parts/*/*")]
        return
    with pytest.raises(SaveFailed, match=r"step 1: .* no part is put"):
        direct.drain.copy(part.save)
    assert not [*direct.bench.root.glob("parts/*/*")]


@pytest.mark.parametrize("how", ["suspended", "paused"])
def test_a_machine_that_slept_as_it_put_its_part_has_not_drained(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The part is there. Whoever tries again, such as the next job, finds it, and that packs are gone."""
    part, slept, clock, wall = direct.saved(1), 0.0, time.clock_gettime, time.time
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + slept * (how == "suspended"))
    monkeypatch.setattr(time, "time", lambda: wall() + slept)
    store, put = direct.drain._bucket.store, direct.drain._bucket.store.put

    def put_late(key: str, *given: Any, **told: Any) -> None:
        nonlocal slept
        if key.startswith("parts/"):
            slept = 61.0
            for path in direct.bench.root.glob("packs/*/*"):
                path.unlink()
        put(key, *given, **told)

    monkeypatch.setattr(store, "put", put_late)
    with pytest.raises(SaveFailed, match=r"step 1: .* its part counts for nothing"):
        direct.drain.copy(part.save)
    slept = 0.0
    assert [*direct.bench.root.glob("parts/*/*")]
    with pytest.raises(SaveFailed, match=r"step 1: the store has a part of it and lacks packs/.* stays on the local"):
        direct.drain.copy(part.save)


def test_only_packs_of_the_save_itself_are_put_and_only_once(direct: Direct) -> None:
    part = direct.saved(1)
    save = part.save
    first, second = (Pack(save.pack_key(0, "a" * 8, n), 10, 0.0) for n in (0, 1))
    other = Pack(SaveId(0, save.generation).pack_key(0, "b" * 8, 0), 10, 0.0)
    vars_ = {name: getattr(part, name) for name in Part.__dataclass_fields__}
    made = Part(**{**vars_, "packs": (first, other, second)})
    assert missing(made, {}) == [first, second]
    assert missing(made, {first.key: 10}) == [second]
    with pytest.raises(SaveFailed, match="something else writes to this root"):
        missing(made, {first.key: 9})


def test_no_more_than_the_bandwidth_that_was_given_is_used(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: what is slept is what would pass."""
    now = [100.0]
    monkeypatch.setattr("ckptlib.writer.drain.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ckptlib.writer.drain.time.sleep", lambda s: now.__setitem__(0, now[0] + s))
    pace = Pace(1e6)
    for _ in range(10):
        pace.take(500_000)
    assert now[0] - 100 == pytest.approx(4.5), "the first goes at once"
    now[0] += 60
    pace.take(500_000)
    pace.take(1)
    assert now[0] - 165 == pytest.approx(0.0, abs=0.6), "nothing is saved up"


def test_the_part_of_the_newest_snapshot_of_a_save_counts(direct: Direct) -> None:
    part = direct.saved(1)
    name = part_there(direct.local, part.save, 0)
    assert name == part.encode()[0]
    assert part_there(direct.local, part.save, 1) is None
