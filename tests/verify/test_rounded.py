"""What a part says of rounded numbers must be what their frames say: no digest covers that, and loads tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.findings import only, parts_of
from helpers.objects import objects_of
from helpers.persists import OneRank

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.part import Part
from ckptlib.format.places import Coding, Loss
from ckptlib.policy.lossy import Lossy
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify import SharedChunks, verify_save
from ckptlib.verify.findings import Finding

MOMENT = "optim/state/0/exp_avg"


@pytest.fixture
def job(tmp_path: Path) -> OneRank:
    return OneRank(tmp_path, MemoryStore(), {"optim/**": Lossy(bits=8), "*": "planes"})


def arrays() -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).normal(0, 0.02, (2, 2000, 64)).astype(np.float32)
    return {MOMENT: values[0], "model/w": values[1]}


def all_findings(job: OneRank) -> list[Finding]:
    """Of all steps; what they share is read once."""
    catalog = Catalog(job.store)
    saves = catalog.saves()
    shared = SharedChunks(catalog, saves)
    return [finding for save in saves for finding in verify_save(catalog, save, shared=shared)]


def lossy_chunk(part: Part) -> int:
    return next(chunk for chunk, coding in sorted(part.codings.items()) if coding.loss is not None)


def tell_otherwise(job: OneRank, part: Part, change: Callable[[Coding], Coding], chunk: int) -> None:
    """The step says so from here on, with digests that fit."""
    manifest = Catalog(job.store).manifest(part.save)
    [told] = parts_of(job.store, part.save)
    name, document = replace(told, codings={**told.codings, chunk: change(told.codings[chunk])}).encode()
    job.store.delete(part.save.manifest_key)
    job.store.put(name.key, document)
    job.store.put(part.save.manifest_key, replace(manifest, parts=(name,)).encode())


def test_what_is_rounded_as_it_says_is_fine(job: OneRank) -> None:
    job.save(arrays())
    assert all_findings(job) == []


def less(coding: Coding, **bounds: float) -> Coding:
    assert coding.loss is not None
    return replace(coding, loss=coding.loss._replace(**bounds))


@pytest.mark.parametrize("bounds", [{"relative": 0.0}, {"absolute": 1e-9}, {"relative": 0.9}])
def test_a_part_that_tells_another_bound(job: OneRank, bounds: dict[str, float]) -> None:
    part = job.save(arrays())
    chunk = lossy_chunk(part)
    tell_otherwise(job, part, lambda coding: less(coding, **bounds), chunk)
    found = only(all_findings(job))
    assert (found.damage, {name for name, _ in found.shards}) == ("malformed", {MOMENT})
    assert "its frame of lossy8-linear is off by 0.000" in found.message


def test_a_part_that_keeps_silent_of_a_bound(job: OneRank) -> None:
    part = job.save(arrays())
    tell_otherwise(job, part, lambda coding: replace(coding, loss=None), lossy_chunk(part))
    assert "expected as its part has it: loses nothing" in only(all_findings(job)).message


def test_a_bound_of_what_loses_nothing(job: OneRank) -> None:
    part = job.save(arrays())
    chunk = next(chunk for chunk, coding in part.codings.items() if coding.codec == "planes")
    tell_otherwise(job, part, lambda coding: replace(coding, loss=Loss(part.digests[chunk], 0.0, 0.0)), chunk)
    assert "its frame of planes loses nothing" in only(all_findings(job)).message


def test_a_frame_whose_bound_was_altered(job: OneRank) -> None:
    """It decodes to the same numbers."""
    part = job.save(arrays())
    chunk = lossy_chunk(part)
    assert isinstance(job.store, MemoryStore)
    key, at = part.packs[part.table.packs[chunk]].key, part.table.offsets[chunk]
    data, modified = objects_of(job.store)[key]
    objects_of(job.store)[key] = (data[:at] + bytes(8) + data[at + 8 :], modified)
    job.read(part)
    found = only(all_findings(job))
    assert (found.damage, found.key, found.offset) == ("malformed", key, at)


def test_steps_that_tell_different_bounds_of_one_frame(job: OneRank) -> None:
    part, again = job.save(arrays()), job.save(arrays())
    chunk = lossy_chunk(part)
    assert again.packs[again.table.packs[chunk]].key == part.packs[part.table.packs[chunk]].key
    tell_otherwise(job, again, lambda coding: less(coding, relative=0.5), chunk)
    found = only(all_findings(job))
    assert (found.damage, found.save) == ("malformed", again.save)
