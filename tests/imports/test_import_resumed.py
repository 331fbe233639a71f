"""An import that is killed goes on where it was, and lists nothing that is not whole and of the source.

Its writer is killed at an operation of the store, by a plan; the process that imports follows as soon as it notices.
What is stored is told by `ls`, or by Amazon's own client, and what a load should give by safetensors' own reader.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from helpers.commands import DAY_S
from helpers.flushed import note_flushes
from helpers.forkserver import context, start_server
from helpers.servers import ObjectStorage, s3_client
from safetensors.numpy import load_file, save_file
from support import age

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.part import Part
from ckptlib.imports import convert as module
from ckptlib.stores import open_store
from ckptlib.stores.testing import flip_bit, write_plan
from ckptlib.verify.root import verify_root, verify_save
from ckptlib.writer.client import Writer

PACK_BYTES = 1 << 20

NUM_PACKS = 6


def write_source(path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    save_file({f"w{i}": draw.standard_normal((256, 256)).astype(np.float32) for i in range(23)}, path)


def convert(source: Path, url: str, options: Mapping[str, object], scratch: Path) -> ckptlib.ImportReport:
    module.PACK_BYTES = PACK_BYTES
    return ckptlib.convert(source, url, scratch=scratch, storage_options=options)


def convert_until_killed(source: Path, url: str, options: Mapping[str, object], scratch: Path) -> None:
    """In a process of its own, which goes as soon as its writer is gone."""
    Writer._revive = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, return-value]
    convert(source, url, options, scratch)


class Place:
    """A root, a source and a scratch directory; on a local disk, or with the root in a bucket."""

    def __init__(self, directory: Path, storage: ObjectStorage | None) -> None:
        directory.mkdir()
        self.storage = storage
        self.url = f"file://{directory / 'root'}" if storage is None else storage.url()
        self.options = {} if storage is None else storage.options()
        self.source, self.scratch, self.plan = directory / "w.safetensors", directory / "scratch", directory / "plan"
        self.scratch.mkdir()
        write_source(self.source, 0)

    def kill(self, op: str, key: str, action: str) -> None:
        """An import that is killed at the first operation on an object of such a key."""
        write_plan(self.plan, [{"op": op, "key": key, "action": action, "once": True}])
        start_server()
        url = f"fault+{self.url}?plan={quote(str(self.plan))}"
        process = context.Process(target=convert_until_killed, args=(self.source, url, self.options, self.scratch))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL

    def convert(self) -> ckptlib.ImportReport:
        return convert(self.source, self.url, self.options, self.scratch)

    def objects(self, under: str = "") -> dict[str, int]:
        """Sizes by key."""
        if self.storage is None:
            root = Path(self.url.removeprefix("file://"))
            found = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
            return {key: nbytes for key, nbytes in found.items() if key.startswith(under)}
        prefix = self.url.rpartition("/")[2] + "/"
        pages = s3_client(self.storage).get_paginator("list_objects_v2")
        listed = pages.paginate(Bucket=self.storage.bucket, Prefix=prefix + under)
        return {found["Key"][len(prefix) :]: found["Size"] for page in listed for found in page.get("Contents", ())}

    def listed(self) -> list[int]:
        try:
            return [info.step for info in ckptlib.checkpoints(self.url, storage_options=self.options)]
        except CheckpointNotFound:
            return []

    def check(self) -> None:
        """One step, good to the last byte, that has what the source has; and nothing is left in the scratch."""
        assert self.listed() == [0]
        with open_store(self.url, self.options) as store:
            catalog = Catalog(store)
            (save,) = catalog.saves()
            assert [*verify_root(catalog), *verify_save(catalog, save)] == []
        found = ckptlib.read(self.url, storage_options=self.options)["model"]
        wanted = load_file(self.source)
        assert {name: array.numpy().tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in wanted.items()
        }
        assert list(self.scratch.iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(tmp_path / "place", None)


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path / "place", request.getfixturevalue("s3") if request.param == "bucket" else None)


MOMENTS = [
    ("put", "^generations/", "kill-before", 0),
    ("put", "^generations/", "kill-after", 0),
    *(
        (op, f"^packs/.*-{n:06d}.safetensors", action, n + (action == "kill-after"))
        for n in range(NUM_PACKS)
        for op, action in (("write", "kill-before"), ("commit", "kill-before"), ("commit", "kill-after"))
    ),
    ("put", "^layouts/", "kill-before", NUM_PACKS),
    ("put", "^parts/", "kill-before", NUM_PACKS),
    ("put", "^parts/", "kill-after", NUM_PACKS),
    ("put", "^steps/", "kill-before", NUM_PACKS),
    ("put", "^steps/", "kill-after", NUM_PACKS),
]
"""Operation, key, before or after it, and how many packs are there then. A pack is finished by its commit."""

FEW = [("disk", MOMENTS[9]), ("disk", MOMENTS[-2])]


def is_killed_at(place: Place, moment: tuple[str, str, str, int]) -> None:
    op, key, action, num_packs = moment
    place.kill(op, key, action)
    before = place.objects("packs/")
    assert len(before) == num_packs
    assert place.listed() == ([0] if (op, key, action) == MOMENTS[-1][:3] else [])
    place.convert()
    place.check()
    after = place.objects("packs/")
    assert len(after) == NUM_PACKS  # none is put twice, and none is left over
    assert before.items() <= after.items()


@pytest.mark.parametrize(("place", "moment"), FEW, indirect=["place"])
def test_killed_it_goes_on(place: Place, moment: tuple[str, str, str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    is_killed_at(place, moment)
    flushed = note_flushes(monkeypatch)
    place.convert()
    assert place.url.removeprefix("file://") + "/steps" in flushed, "the call before may have been killed before that"


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_every_put_it_goes_on(place: Place, moment: tuple[str, str, str, int]) -> None:
    is_killed_at(place, moment)


AFTER_THREE = ("commit", "^packs/.*-000002.safetensors", "kill-after")


@pytest.mark.slow
def test_killed_again_and_again(disk: Place) -> None:
    for n in (1, 3, 4):
        disk.kill("commit", f"^packs/.*-{n:06d}.safetensors", "kill-before")
        assert len(disk.objects("packs/")) == n
    disk.convert()
    disk.check()
    assert len(disk.objects("packs/")) == NUM_PACKS
    assert len(disk.objects("generations/")) == 1


@pytest.mark.slow
def test_an_import_that_fails_goes_on_too(disk: Place) -> None:
    write_plan(disk.plan, [{"op": "commit", "key": "^packs/.*-000004", "action": "full", "once": True}])
    with pytest.raises(ckptlib.SaveFailed, match="no space, as planned"):
        convert(disk.source, f"fault+{disk.url}?plan={quote(str(disk.plan))}", {}, disk.scratch)
    assert (disk.listed(), len(disk.objects("packs/"))) == ([], 4)
    disk.convert()
    disk.check()
    assert len(disk.objects("packs/")) == NUM_PACKS


def test_what_was_left_is_not_used_if_its_bytes_are_others(disk: Place) -> None:
    """Nor if all that could be told from outside is the same: size and time of the source, names and sizes of packs."""
    disk.kill(*AFTER_THREE)
    root = Path(disk.url.removeprefix("file://"))
    first, second, third = sorted(disk.objects("packs/"))
    flip_bit(root / second, PACK_BYTES // 2)
    data, times = bytearray(disk.source.read_bytes()), disk.source.stat()
    data[-1] ^= 1  # in the last pack, which is not there
    disk.source.write_bytes(data)
    os.utime(disk.source, ns=(times.st_atime_ns, times.st_mtime_ns))
    disk.convert()
    assert len(disk.objects("packs/")) == NUM_PACKS + 1
    used = {pack.key for pack in part_of(disk).packs}
    assert {first, third} < used
    assert second not in used
    disk.check()


def part_of(place: Place) -> Part:
    with open_store(place.url, place.options) as store:
        catalog = Catalog(store)
        (save,) = catalog.saves()
        (name,) = catalog.manifest(save).parts
        return catalog.part(name)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [AFTER_THREE, ("put", "^steps/", "kill-before")])
def test_another_source_is_not_taken_for_the_same(disk: Place, moment: tuple[str, str, str]) -> None:
    disk.kill(*moment)
    write_source(disk.source, 1)
    disk.convert()
    disk.check()
    assert all("-000002-" in pack.key for pack in part_of(disk).packs)


@pytest.mark.slow
def test_a_whole_save_that_is_not_the_sources_any_more_is_never_listed(disk: Place) -> None:
    disk.kill("put", "^steps/", "kill-before")
    times = disk.source.stat()
    write_source(disk.source, 1)
    os.utime(disk.source, ns=(times.st_atime_ns, times.st_mtime_ns))
    disk.convert()
    disk.check()
    assert [key.split("-")[1] for key in disk.objects("steps/")] == ["000002"]


def test_a_sweep_spares_what_was_just_killed(disk: Place) -> None:
    disk.kill(*AFTER_THREE)
    with open_store(disk.url) as store:
        before = disk.objects("packs/")
        swept = sweep(Catalog(store), None, None)
        assert (swept.condemned, swept.deleted) == ((), ())
        disk.convert()
        disk.check()
        assert before.items() <= disk.objects("packs/").items()
        age(store, 30 * DAY_S)
        for _ in range(2):  # nor does it ever take anything of the step
            swept = sweep(Catalog(store), None, None)
            assert (swept.condemned, swept.deleted, swept.waiting) == ((), (), ())
    disk.check()


@pytest.mark.slow
def test_a_sweep_takes_what_an_abandoned_import_left(disk: Place) -> None:
    disk.kill(*AFTER_THREE)
    with open_store(disk.url) as store:
        age(store, 30 * DAY_S)
        assert len(sweep(Catalog(store), None, None).condemned) == 1
        disk.convert()  # its packs may go at any time: nothing relies on them
        disk.check()
        assert len(disk.objects("packs/")) == NUM_PACKS + 3
        age(store, 30 * DAY_S)
        sweep(Catalog(store), None, None)
        assert len(disk.objects("packs/")) == NUM_PACKS
    disk.check()


@pytest.mark.slow
def test_two_at_the_same_time_are_both_right(disk: Place) -> None:
    """A writer that its trainer has left may go on while the next import is under way."""
    disk.kill(*AFTER_THREE)
    start_server()
    some = [context.Process(target=convert, args=(disk.source, disk.url, {}, disk.scratch)) for _ in range(2)]
    for process in some:
        process.start()
    for process in some:
        process.join(240)
    assert [process.exitcode for process in some] == [0, 0]
    disk.check()
