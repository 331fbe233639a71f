"""How much of a step is copied at the same time, and whose manifest it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from helpers.overwriting import OverwritingStore
from support import listed_steps_are_whole, make_generation, make_root, make_save, state
from typing_extensions import Self, override

from ckptlib.catalog import copying
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.step_objects import StepObjects, step_objects
from ckptlib.errors import SaveFailed
from ckptlib.format.manifest import TrashRecord
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


@pytest.mark.parametrize("kind", [MemoryStore, OverwritingStore])
def test_what_another_copy_has_put_stays_also_where_a_store_tells_only_when_asked(kind: type[MemoryStore]) -> None:
    """That one has said that the step is there; this one finds a trash record, which was put since."""
    source, target = make_root(MemoryStore()), Catalog(kind())
    save = make_save(source, make_generation(source), 1, state(1))
    step, (lineage, _) = step_objects(source, save), copying.lineage_of(source, save)
    copying.open_copy(source, target, step, lineage)
    copying.copy_packs(source.store, target.store, step, lambda nbytes: None)
    copying.commit_copy(source, target, step, lineage)
    target.store.put(save.trash_key, TrashRecord(save, "never committed").encode())
    with pytest.raises(SaveFailed, match="The step is what another copy put"):
        copying.commit_copy(source, target, step, lineage)
    assert listed_steps_are_whole(target.store) == [1]
