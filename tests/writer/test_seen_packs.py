"""Packs that others delete or cut, while later saves refer to them: no step is committed that does not load."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.persists import Arrays, OneRank, codecs_of
from typing_extensions import override

from ckptlib.errors import StoreTimeout
from ckptlib.format.keys import pack_save
from ckptlib.format.part import Pack, Part
from ckptlib.policy.codec import Asked
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import seen_packs as module

ROWS, WIDTH = 4000, 64


class Bucket(MemoryStore):
    """Counts what is asked of packs."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.is_away = False

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if key.startswith("packs/"):
            self.asked[key] += 1
            if self.is_away:
                raise StoreTimeout(f"{key}: no answer")
        return super().get(key, offset, nbytes)


def state(step: int) -> Arrays:
    """One tensor that never changes, one that does, a table of which few rows do."""
    rng = np.random.default_rng(0)
    frozen, table = (rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for _ in range(2))
    table[: 8 * step] += 1
    changing = np.random.default_rng(step).normal(size=1000).astype(np.float32)
    return {"changing": changing, "frozen": frozen, "table": table}


def sources(part: Part) -> set[int]:
    return {save.step for pack in part.packs if (save := pack_save(pack.key)) is not None}


def packs_of(part: Part) -> list[str]:
    return [pack.key for pack in part.packs if pack_save(pack.key) == part.save]


@pytest.mark.parametrize("how", ["gone", "cut", "a directory"])
@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("again", [False, True], ids=["same writer", "new writer"])
def test_what_was_in_a_lost_pack_is_written_again(
    tmp_path: Path, how: str, codec: Asked, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    job = OneRank(tmp_path, LocalStore(str(root)), codec)
    first, second = job.save(state(1)), job.save(state(2))
    assert sources(second) == {1, 2}
    for key in packs_of(first):
        path, data = root / key, (root / key).read_bytes()
        path.chmod(0o600)
        path.unlink()
        if how == "cut":
            path.write_bytes(data[:-1])
        elif how == "a directory":
            path.mkdir()
    if again:
        job.persister = job.persister_of(job.store, codec)
    with caplog.at_level(logging.WARNING):
        third = job.save(state(3))
    assert sources(third) == {3} if again else 1 not in sources(third)
    job.check(third, state(3))
    assert packs_of(first)[0] in caplog.text
    assert "Step 3 writes again what was in them" in caplog.text
    fourth = job.save(state(4))
    assert 3 in sources(fourth), "and the next ones take it over as ever"
    job.check(fourth, state(4))
    if codec != "raw" and not again:
        assert "patch" in codecs_of(fourth)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[OneRank, Bucket, list[float]]:
    """And its clock."""
    now, store = [1000.0], Bucket()
    monkeypatch.setattr(module, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    return OneRank(tmp_path, store, "raw"), store, now


def test_a_bucket_is_asked_once_in_a_while(bucket: tuple[OneRank, Bucket, list[float]]) -> None:
    job, store, now = bucket
    parts = [job.save(state(step)) for step in range(1, 4)]
    assert not store.asked, "this writer has put them"
    now[0] += module.LOOK_AGAIN_S
    parts.append(job.save(state(4)))
    assert store.asked == Counter(pack.key for pack in parts[2].packs)
    store.asked.clear()
    for step in range(5, 8):
        parts.append(job.save(state(step)))
    assert not store.asked
    for key in packs_of(parts[0]):
        store.delete(key)
    now[0] += module.LOOK_AGAIN_S
    last = job.save(state(8))
    assert 1 not in sources(last)
    job.check(last, state(8))


def test_a_bucket_that_does_not_answer_gets_all_of_it(bucket: tuple[OneRank, Bucket, list[float]]) -> None:
    job, store, now = bucket
    job.save(state(1))
    now[0] += module.LOOK_AGAIN_S
    store.is_away = True
    part = job.save(state(2))
    store.is_away = False
    assert sources(part) == {2}
    job.check(part, state(2))


def test_packs_may_be_put_while_those_of_before_are_looked_for() -> None:
    """As where a put that was given up comes through after all."""
    store = Bucket()
    seen = module.SeenPacks(store)
    for number in range(5000):
        seen.note(f"packs/before/{number}")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as executor:
            putting = executor.map(seen.note, (f"packs/{number}" for number in range(20_000)))
            for _ in range(50):
                assert seen.lost([Pack("packs/before/1", 1, 0.0)]) == []
            list(putting)
    finally:
        sys.setswitchinterval(interval)
    assert not store.asked


def test_packs_that_were_put_long_ago_are_not_remembered() -> None:
    seen = module.SeenPacks(Bucket(), look_again_s=0.0)
    for number in range(1000):
        seen.note(f"packs/{number}")
    assert len(seen._seen) <= 1


def test_packs_that_a_restore_read_long_ago_are_looked_for() -> None:
    """The first save may come hours after it."""
    store = Bucket()
    seen = module.SeenPacks(store)
    for name, ago in (("now", 0.0), ("lately", 500.0), ("long-ago", 700.0)):
        seen.note(f"packs/{name}", time.monotonic() - ago)
    lost = seen.lost([Pack(f"packs/{name}", 1, 0.0) for name in ("now", "lately", "long-ago")])
    assert [pack.key for pack in lost] == ["packs/long-ago"], "which is gone meanwhile"


def test_of_two_packs_the_one_that_was_seen_again_does_not_answer_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, now = module.SeenPacks(MemoryStore()), time.monotonic()
    packs = [Pack(key, 1, 0.0) for key in ("packs/a", "packs/b")]
    for pack in packs:
        seen.note(pack.key)
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.LOOK_AGAIN_S / 2)
    seen.note(packs[0].key)
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 1.1 * module.LOOK_AGAIN_S)
    assert seen.lost(packs) == packs[1:]
