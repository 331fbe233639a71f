"""How much of a step is copied at the same time, and whose manifest it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from helpers.flushed import ForgetfulDisk, Killed, note_flushes
from helpers.overwriting import OverwritingStore
from support import listed_steps_are_whole, make_generation, make_root, make_save, put_parts, state
from typing_extensions import Self, override

from ckptlib.catalog import copying
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.step_objects import StepObjects, step_objects
from ckptlib.errors import CkptError, SaveFailed
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Root, TrashRecord
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore

KEYS = [f"packs/000000000001-000001-00000001/00000{n}-a77e3b70-000000.safetensors" for n in range(6)]


class Lazy(Executor):
    """Calls what it was given only when somebody waits for it, so that all else is under way till then."""

    def __init__(self, most: int, name: str) -> None:
        self.left: list[int] = []
        """Sizes of the packs under way."""

    @override
    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Awaited(self, call, args)

    def __enter__(self) -> Self:
        return self


class Awaited(Future[Any]):
    together: list[list[int]]
    """What was under way as each pack was begun."""

    def __init__(self, executor: Lazy, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._executor, self._call, self._args = executor, call, args
        if call is copying._put_pack:
            executor.left.append(args[3])
            self.together.append([*executor.left])

    @override
    def result(self, timeout: float | None = None) -> Any:
        if self._call is copying._put_pack:
            self._executor.left.remove(self._args[3])
        return self._call(*self._args)


@pytest.mark.parametrize(
    ("pack_nbytes", "expected"),
    [
        (1 << 40, [[128], [128, 256], [128, 256, 64], [128, 256, 64, 64], [256, 64, 64, 64], [64, 64, 64, 300]]),
        (16, [[128], [256], [64], [64, 64], [64, 64, 64], [300]]),
    ],
    ids=["a store that takes pieces", "one that takes wholes"],
)
def test_packs_of_more_than_a_store_may_hold_take_turns(
    monkeypatch: pytest.MonkeyPatch, pack_nbytes: int, expected: list[list[int]]
) -> None:
    together: list[list[int]] = []
    monkeypatch.setattr(copying, "ThreadPoolExecutor", Lazy)
    monkeypatch.setattr(Awaited, "together", together, raising=False)
    source, target = MemoryStore(), MemoryStore()
    target.pack_nbytes = pack_nbytes
    packs = dict(zip(KEYS, [128, 256, 64, 64, 64, 300], strict=True))
    for key, nbytes in packs.items():
        source.put(key, bytes(nbytes))
    step = StepObjects(None, b"", packs)  # type: ignore[arg-type]  # no document is copied
    assert copying.copy_packs(source, target, step, lambda nbytes: None) == sum(packs.values())
    assert [(entry.key, entry.nbytes) for entry in target.scan("")] == [*packs.items()]
    assert together == expected


def begin_job(catalog: Catalog) -> None:
    make_generation(catalog, 1)


def begin_and_save(catalog: Catalog) -> None:
    make_save(catalog, make_generation(catalog, 4), 9, state(9))


class Joined(MemoryStore):
    """Right before the first put of a key that begins so, a job does something here."""

    def __init__(self, before: str, job: Callable[[Catalog], None]) -> None:
        super().__init__()
        self._before, self._job = before, job

    @override
    def put(self, key: str, *data: Any, **more: Any) -> None:
        if self._before and key.startswith(self._before):
            self._before = ""
            self._job(Catalog(self))
        super().put(key, *data, **more)


@pytest.mark.parametrize("job", [begin_job, begin_and_save])
@pytest.mark.parametrize("before", ["layouts/", "parts/"])
def test_no_step_is_copied_where_a_job_has_begun_meanwhile(before: str, job: Callable[[Catalog], None]) -> None:
    source, alone, target = make_root(MemoryStore()), make_root(MemoryStore()), Catalog(Joined(before, job))
    save = make_save(source, make_generation(source, 3), 1, state(1))
    job(alone)
    step, (lineage, _) = step_objects(source, save), copying.lineage_of(source, save)
    copying.open_copy(source, target, step, lineage)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    copying.copy_layouts(source, target, step)
    with pytest.raises(CkptError, match=r"a job has begun in .* meanwhile.*Name a new root"):
        copying.commit_copy(source, target, step, lineage)
    for prefix in ("steps/", "generations/", "copies/generations/") if before == "layouts/" else ("steps/",):
        assert keys_below(target, prefix) == keys_below(alone, prefix), "what the job has put, and nothing else"


def keys_below(catalog: Catalog, prefix: str) -> list[str]:
    return [entry.key for entry in catalog.store.scan(prefix)]


def test_a_copy_goes_on_where_another_one_has_ended_and_a_job_has_begun() -> None:
    source, target = make_root(MemoryStore()), Catalog(MemoryStore())
    save = make_save(source, make_generation(source, 3), 1, state(1))
    step, (lineage, _) = step_objects(source, save), copying.lineage_of(source, save)
    copying.open_copy(source, target, step, lineage)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    copying.copy_layouts(source, target, step)
    copying.commit_copy(source, target, step, lineage)
    make_save(target, make_generation(target, 4, save), 2, state(2))
    copying.commit_copy(source, target, step, lineage)
    assert target.visible() == target.saves()
    assert listed_steps_are_whole(target.store) == [1, 2]


@pytest.mark.parametrize("kind", [MemoryStore, OverwritingStore])
def test_what_another_copy_has_put_stays_also_where_a_store_tells_only_when_asked(kind: type[MemoryStore]) -> None:
    """That one has said that the step is there; this one finds a trash record, which was put since."""
    source, target = make_root(MemoryStore()), Catalog(kind())
    save = make_save(source, make_generation(source), 1, state(1))
    step, (lineage, _) = step_objects(source, save), copying.lineage_of(source, save)
    copying.open_copy(source, target, step, lineage)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    copying.copy_layouts(source, target, step)
    copying.commit_copy(source, target, step, lineage)
    target.store.put(save.trash_key, TrashRecord(save, "never committed").encode())
    with pytest.raises(SaveFailed, match="The step is what another copy put"):
        copying.commit_copy(source, target, step, lineage)
    assert listed_steps_are_whole(target.store) == [1]


def test_a_copy_that_was_killed_behind_its_manifest_comes_to_its_end() -> None:
    source, target = make_root(MemoryStore()), Catalog(MemoryStore())
    save = make_save(source, make_generation(source, 3), 1, state(1))
    copy_all(source, target, save)
    before = keys_below(target, "")
    copy_all(source, target, save)
    assert keys_below(target, "") == before
    assert listed_steps_are_whole(target.store) == [1]


def test_a_copy_that_was_killed_between_a_name_and_its_flush_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_root(MemoryStore())
    save = make_save(source, make_generation(source, 3), 1, state(1))
    moment, was_killed = 0, True
    while was_killed:
        moment += 1
        target, was_killed = Catalog(LocalStore(str(tmp_path / f"{moment}"))), False
        with monkeypatch.context() as patched:
            power = ForgetfulDisk(patched)
            power.links_left = moment
            try:
                copy_all(source, target, save)
            except Killed:
                was_killed = True
                copy_all(source, Catalog(target.store), save)
            power.lose_power()
        assert listed_steps_are_whole(target.store) == [1]
    assert moment > 7


def test_a_pack_that_another_copy_puts_meanwhile_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_root(MemoryStore()), Catalog(LocalStore(str(tmp_path)))
    save = make_save(source, make_generation(source, 3), 1, state(1))
    step, get, flushed = step_objects(source, save), source.store.get, note_flushes(monkeypatch)
    copying.open_copy(source, target, step, copying.lineage_of(source, save)[0])

    def is_faster(key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if offset == 0:
            target.store.put(key, get(key))
            flushed.clear()  # as if the other copy had not come so far
        return get(key, offset, nbytes)

    monkeypatch.setattr(source.store, "get", is_faster)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    assert f"{tmp_path}/packs/{save}" in flushed


def test_a_step_of_that_name_that_is_another_one_is_no_copy() -> None:
    source, target = make_root(MemoryStore()), Catalog(MemoryStore())
    generation = make_generation(source, 3)
    save = make_save(source, generation, 1, state(1))
    target.open_root(Root("b" * 32, source.root().algorithm, 60.0))
    make_generation(target, 3)
    assert make_save(target, generation, 1, state(2)) == save
    with pytest.raises(CkptError, match="in use: it has steps"):
        copy_all(source, target, save)
    with pytest.raises(CkptError, match="in use: it has the id of the source"):
        copy_all(source, source, save)


def test_the_local_tier_of_a_job_is_no_root_to_copy_to() -> None:
    """A running job would sweep packs of the step away as those of an earlier one, and the next would not begin."""
    source, disk = make_root(MemoryStore()), Catalog(MemoryStore())
    generation = make_generation(source, 3)
    save = make_save(source, generation, 1, state(1))
    disk.open_root(Root("b" * 32, source.root().algorithm, 60.0))
    put_parts(disk, generation, 2, state(2))
    before = keys_below(disk, "")
    with pytest.raises(CkptError, match="in use: it has parts of other steps, as the local= of a job has"):
        copy_all(source, disk, save)
    assert keys_below(disk, "") == before


def copy_all(source: Catalog, target: Catalog, save: SaveId) -> None:
    step, (lineage, _) = step_objects(source, save), copying.lineage_of(source, save)
    copying.open_copy(source, target, step, lineage)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    copying.copy_layouts(source, target, step)
    copying.commit_copy(source, target, step, lineage)
