"""Which chunks become patches, against what, and what is kept for it: with the real codec and real bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.persists import OneRank, num_summaries
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.keyframes import Trials
from ckptlib.codecs.patch import PatchCodec
from ckptlib.errors import CorruptData
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.places import Base, Coding, Loss
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.contents import TensorChunk
from ckptlib.writer.patches import KEYFRAMES_KEPT, PROBES, Patches, base_of

ROWS, WIDTH = 200, 32
GENERATION = GenerationId(1, "00000001")
DIGEST = digester(XXH3)


@dataclass
class Saved:
    """One save, as its part would tell of it."""

    save: SaveId
    bases: dict[int, Base] = field(default_factory=dict)
    """By chunk: its last whole copy."""
    patched: set[int] = field(default_factory=set)


class Table:
    """A tensor of some chunks, saved again and again. Loads everything that it saves, bit for bit."""

    def __init__(self, num: int, name: str = "table") -> None:
        self.values = np.random.default_rng(0).normal(size=(num, ROWS, WIDTH)).astype(np.float32)
        self.patches = Patches()
        self.saves: list[Saved] = []
        self.wholes: dict[str, bytes] = {}
        self.num_summaries = 0
        self._name = name

    def touch(self, chunk: int, *rows: int) -> None:
        self.values[chunk, list(rows)] += 1

    def change(self, chunk: int) -> None:
        self.values[chunk] += 1

    def save(self, late: int = 0, changed: set[int] | None = None) -> Saved:
        """`late`: so many of the last saves are not committed. `changed`: others are taken over from the parent."""
        parent = self.saves[-1 - late] if len(self.saves) > late else None
        now = Saved(SaveId(len(self.saves) + 1, GENERATION))
        for chunk, values in enumerate(self.values):
            raw = values.tobytes()
            base = None if parent is None else parent.bases[chunk]
            if changed is not None and chunk not in changed and base is not None:
                now.bases[chunk] = base
                continue
            of = TensorChunk(self._name, chunk, len(self.values), Content("float32", WIDTH))
            found = self.patches.attempt(chunk, of, base)(memoryview(raw))
            self.num_summaries += found.summary is not None
            if found.frame is not None:
                assert base is not None
                out = bytearray(len(raw))
                PatchCodec().decode(memoryview(found.frame), memoryview(self.wholes[base.digest]), memoryview(out))
                assert out == raw
                self.patches.patched(now.save, chunk, of, base, len(found.frame))
                now.bases[chunk] = base
                now.patched.add(chunk)
            else:
                digest = DIGEST(raw)
                self.wholes[digest] = raw
                self.patches.stored_whole(now.save, chunk, base, digest, len(raw), found.summary)
                now.bases[chunk] = Base(0, 0, len(raw), None, digest)
            self.patches.drop_unneeded(chunk, base, None if parent is None else parent.save)
        self.saves.append(now)
        return now

    def num_kept(self, chunk: int) -> int:
        """Summaries of a chunk that are in memory."""
        found = self.patches._chunks.get(chunk)
        return 0 if found is None else len(found.keyframes)


def test_a_table_becomes_patched_from_its_probes_on() -> None:
    table = Table(12)
    saved = []
    for _ in range(5):
        for chunk in range(12):
            table.touch(chunk, 3, 70)
        saved.append(len(table.save().patched))
    assert saved == [0, PROBES, 12, 12, 12], "probes, then those that were summarized as they were stored whole"


def test_a_small_tensor_is_all_probes() -> None:
    table = Table(PROBES)
    table.save()
    for chunk in range(PROBES):
        table.touch(chunk, 0)
    assert len(table.save().patched) == PROBES


def test_a_dense_tensor_stops_being_summarized() -> None:
    table = Table(40)
    for _ in range(64):
        for chunk in range(40):
            table.change(chunk)
        assert not table.save().patched
    trials, due = Trials(), 0  # of each probe: a keyframe with a summary, and the patch that does not pay, in turn
    for _ in range(64):
        if trials.due:
            due, trials = due + 1, trials.failed()
        else:
            trials = trials.skipped()
    assert table.num_summaries <= PROBES * 2 * due < 64 * 40 / 20
    assert all(table.num_kept(chunk) <= 1 for chunk in range(40))


def num_saves_to_a_patch(table: Table) -> int:
    for number in range(1, 100):
        table.touch(0, 1)
        if table.save().patched:
            return number
    raise AssertionError("none comes")


def test_a_patch_that_pays_makes_up_for_those_that_did_not() -> None:
    table = Table(1)
    for _ in range(20):
        table.change(0)
        table.save()
    first = num_saves_to_a_patch(table)
    for _ in range(2):  # the second one is a first patch that does not pay
        table.change(0)
        table.save()
    assert num_saves_to_a_patch(table) == 3 < first


def test_a_chunk_is_stored_whole_before_its_patches_cost_more_than_they_save() -> None:
    """Long before a patch is as large as the chunk: here each save touches another tenth of it."""
    table, patched = Table(1), list[int]()
    for number in range(8):
        table.touch(0, *range(20 * number, 20 * number + 20))
        patched.append(len(table.save().patched))
    assert patched[:4] == [0, 1, 1, 1]
    assert 0 in patched[4:]


def test_the_base_of_the_parent_stays_known_though_the_parent_took_the_chunk_over() -> None:
    table = Table(1)
    for _ in range(2):
        table.touch(0, 1)
        before = table.save()
    table.save(changed=set())
    kept = table.values.copy()
    table.change(0)
    assert not table.save().patched
    table.values = kept
    table.touch(0, 2)
    assert table.save(late=1).patched == before.patched == {0}, "that save failed"


def test_no_more_summaries_are_kept_than_may_be_needed_however_late_commits_are() -> None:
    table = Table(1)
    for _ in range(2):
        table.touch(0, 1)
        table.save()
    for late in range(2 * KEYFRAMES_KEPT):
        table.change(0)
        table.save(late)
    assert table.num_kept(0) == KEYFRAMES_KEPT


def test_a_table_that_becomes_sparse_later_is_found() -> None:
    table = Table(8)
    for _ in range(20):
        for chunk in range(8):
            table.change(chunk)
        table.save()
    found = []
    for _ in range(80):
        for chunk in range(8):
            table.touch(chunk, 5)
        found.append(len(table.save().patched))
    assert found[-1] == 8


@pytest.mark.parametrize("hot", [{0}, {0, 1, 2}, {7}, {0, 2, 4}])
def test_hot_chunks_do_not_keep_the_others_from_being_patched(hot: set[int]) -> None:
    """Rows in the order of how often they are used: the first chunks change as a whole at each save."""
    table, patched, random = Table(8), 0, np.random.default_rng(1)
    for number in range(60):
        for chunk in range(8):
            if chunk in hot:
                table.change(chunk)
            else:
                table.touch(chunk, *random.integers(0, ROWS, 4))
        table.num_summaries = 0
        saved = table.save()
        if number == 3:
            assert saved.patched == {*range(8)} - hot
        patched += len(saved.patched)
    assert patched > 0.8 * 60 * (8 - len(hot))
    assert table.num_summaries <= 8 - len(hot) + 1, "what never pays is tried rarely by now"


@pytest.mark.parametrize("late", [0, 1, 2, 3, 4])
def test_patches_are_made_while_commits_are_late(late: int) -> None:
    """Each save is made against a part that lies so many saves back, and its whole copy is still known then."""
    table, patched = Table(2), 0
    for _ in range(60):
        for chunk in range(2):
            table.touch(chunk, *np.random.default_rng(len(table.saves)).integers(0, ROWS, 4))
        patched += len(table.save(late=late).patched)
        assert max(map(table.num_kept, range(2))) <= min(late + 2, KEYFRAMES_KEPT)
    assert patched > 0.6 * 2 * 60


def test_a_summary_is_given_back_when_the_next_keyframe_is_committed() -> None:
    table = Table(1)
    kept = []
    for _ in range(50):
        table.touch(0, *np.random.default_rng(len(table.saves)).integers(0, ROWS, 20))
        table.save()
        kept.append(table.num_kept(0))
    assert {*kept} == {1, 2}
    assert kept.count(2) < 15


def test_a_summary_is_used_against_the_base_of_its_digest_alone() -> None:
    """Whatever the parent says the base is; such as that of another writer's part."""
    table = Table(1)
    table.save()
    raw = table.values[0].tobytes()
    of = TensorChunk("table", 0, 1, Content("float32", WIDTH))
    mine = table.saves[0].bases[0]
    assert table.patches.attempt(0, of, mine)(memoryview(raw)).frame is not None
    for base in (None, mine._replace(digest="0" * 32)):
        assert table.patches.attempt(0, of, base)(memoryview(raw)).frame is None
    assert table.patches.attempt(1, of, mine)(memoryview(raw)).frame is None, "nor for another chunk"


def test_what_has_changed_back_costs_nearly_nothing() -> None:
    table = Table(1)
    table.values[0, 0] = np.float32("nan")
    table.save()
    table.touch(0, 4)
    assert table.save().patched == {0}
    table.values[0, 0, :3] = -0.0, 1e-42, np.float32("inf")
    assert table.save().patched == {0}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_changes_and_whenever_it_is_committed_it_comes_back(data: st.DataObject) -> None:
    """Bit for bit: `Table.save` decodes every patch, against the whole copy that its base names."""
    table = Table(3)
    for _ in range(data.draw(st.integers(2, 25))):
        changed = set()
        for chunk in range(3):
            kind = data.draw(st.sampled_from(["same", "rows", "rows", "rows", "all", "back"]))
            if kind == "rows":
                table.touch(chunk, *data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60)))
            elif kind == "all":
                table.change(chunk)
            elif kind == "back" and table.wholes:
                raw = data.draw(st.sampled_from([*table.wholes.values()]))
                table.values[chunk] = np.frombuffer(raw, np.float32).reshape(ROWS, WIDTH)
            if kind != "same":
                changed.add(chunk)
        table.save(late=data.draw(st.integers(0, 5)), changed=changed)
        assert all(table.num_kept(chunk) <= KEYFRAMES_KEPT for chunk in range(3))


def test_no_summary_stays_of_a_save_that_failed(tmp_path: Path) -> None:
    """What changed in memory was summarized under the digest of what was sealed: a patch against it would give others
    back."""
    table = np.random.default_rng(0).normal(size=(4000, WIDTH)).astype(np.float32)
    job = OneRank(tmp_path, MemoryStore(), "planes")
    job.save({"table": table})
    assert num_summaries(job) > 0
    save, slot = job.slot({"table": table + 1})
    slot.body[5] ^= 1
    with pytest.raises(CorruptData, match="changed in memory"):
        job.persister.persist(slot, save)
    slot.unlink()
    assert job.persister._coder._patches is None


def test_the_base_of_a_chunk_is_what_its_parent_stored_whole(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(4000, WIDTH)).astype(np.float32)
    job = OneRank(tmp_path, MemoryStore(), "planes")
    first = job.save({"table": table})
    assert base_of(None, 0) is None
    whole = base_of(first, 0)
    assert whole is not None
    assert (whole.codec, whole.digest) == ("planes", first.digests[0])
    table[0] += 1
    second = job.save({"table": table})
    patched = base_of(second, 0)
    assert second.codings[0].codec == "patch"
    assert patched is not None
    assert patched.digest == first.digests[0]
    assert second.packs[patched.pack].key == first.packs[whole.pack].key
    lossy = replace(first, codings={0: Coding("other", first.stored[0], None, Loss("0" * 32, 0.0, 0.0))})
    assert base_of(lossy, 0) is None, "what was summarized is not what is stored"
