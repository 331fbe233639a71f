"""What is below a local root and is no file of ours: never waited for, never followed, never deleted."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from store_conformance import keys
from support import age, make_generation, make_root, make_save, read_save, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.errors import FormatError, ObjectNotFound, ObjectUnreadable, StoreError
from ckptlib.format.keys import SaveId, is_known
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores.local import LocalStore

OLD_S = 2 * GRACE.total_seconds()


def bind(path: Path) -> None:
    """A socket: its address is short, whatever the path."""
    at = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{at}/{path.name}")
    os.close(at)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_file(path: Path) -> None:
    target = path.parent / "behind the link"
    target.write_bytes(b"data")
    path.symlink_to(target)


PUT_THERE: dict[str, Callable[[Path], None]] = {
    "a FIFO": lambda path: os.mkfifo(path),
    "a socket": bind,
    "a directory": lambda path: path.mkdir(),
    "a symbolic link": link_to_a_file,
    "a symbolic link to itself": loop,
    "a device": lambda path: path.symlink_to("/dev/zero") if os.geteuid() else os.mknod(path, 0o600 | 0o020000, 0x105),
}


def everything_below(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(path)): (p.lstat().st_ino, p.lstat().st_size) for p in path.rglob("*")}


# -- in the place of an object


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", PUT_THERE)
def test_what_is_no_file_is_no_object_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    store = LocalStore(str(tmp_path / "root"))
    store.put("a/b", b"neighbour")
    PUT_THERE[kind](tmp_path / "root" / "a" / "c")
    calls = [
        lambda: store.get("a/c"),
        lambda: store.get("a/c", 0, 4),
        lambda: store.get_into("a/c", 0, memoryview(bytearray(4))),
    ]
    for call in calls:
        with pytest.raises(ObjectNotFound, match="no such object; a") as caught:
            call()
        if os.geteuid() == 0:
            assert kind.removesuffix(" to itself") in str(caught.value)
    assert keys(store) == ["a/b"], "and so it is not listed"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", PUT_THERE)
def test_a_put_says_what_is_in_its_place(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told that the object exists takes it for his own, and names it in what he commits."""
    store = LocalStore(str(tmp_path / "root"))
    store.put("a/b", b"neighbour")
    PUT_THERE[kind](tmp_path / "root" / "a" / "c")
    before = everything_below(tmp_path / "root" / "a")
    with pytest.raises(FormatError, match=r"a/c: cannot publish: a .* is in the place of the object; remove it"):
        store.put("a/c", b"data")
    assert everything_below(tmp_path / "root" / "a") == before
    assert os.listdir(tmp_path / "root" / ".tmp") == []


def test_a_layout_whose_place_is_taken_is_not_committed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    catalog = make_root(store)
    (tmp_path / "root" / "layouts" / f"{'0' * 32}.json").mkdir(parents=True)
    with pytest.raises(FormatError, match="a directory is in the place"):
        catalog.shared.put_layout("0" * 32, b"{}")


def fail(number: int, *arguments: object) -> None:
    raise OSError(number, os.strerror(number))


def test_what_one_file_suffers_from_is_told_from_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a", b"data")

    reasons = {errno.EIO: ObjectUnreadable, errno.EACCES: ObjectUnreadable, errno.ENOTCONN: StoreError}
    for number, expected in reasons.items():
        fails = partial(fail, number)
        monkeypatch.setattr(os, "pread", fails)
        monkeypatch.setattr(os, "preadv", fails)
        for call in (lambda: store.get("a"), lambda: store.get_into("a", 0, memoryview(bytearray(4)))):
            with pytest.raises(StoreError) as caught:
                call()
            assert type(caught.value) is expected


# -- links on the way


def two_roots(tmp_path: Path) -> tuple[LocalStore, LocalStore, Catalog, list[SaveId]]:
    """One whose `packs` is a link to those of the other one, which has old steps."""
    other, store = (LocalStore(str(tmp_path / name)) for name in ("other", "root"))
    catalog = make_root(other)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    make_root(store)
    (tmp_path / "root" / "packs").symlink_to(tmp_path / "other" / "packs")
    return other, store, catalog, saves


def test_gc_deletes_nothing_of_another_root(tmp_path: Path) -> None:
    other, store, _, saves = two_roots(tmp_path)
    age(other, OLD_S)
    before = everything_below(tmp_path / "other")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"root/packs is a symbolic link.*move all of it and make"):
            sweep(Catalog(store), Keep(last=1), None)
        age(store, OLD_S)
    assert everything_below(tmp_path / "other") == before
    for save in saves:
        assert read_save(other, save).keys() == state(0).keys()


def test_every_call_refuses_a_link_in_the_root(tmp_path: Path) -> None:
    other, store, _, _ = two_roots(tmp_path)
    key = other.scan("packs/")[0].key
    before = everything_below(tmp_path / "other")
    for call in (
        lambda: store.get(key),
        lambda: store.get_into(key, 0, memoryview(bytearray(1))),
        lambda: store.scan("packs/"),
        lambda: store.scan(key),
        lambda: store.delete(key),
        lambda: store.put("packs/new/one", b"data"),
    ):
        with pytest.raises(StoreError, match="root/packs is a symbolic link") as caught:
            call()
        assert type(caught.value) is StoreError
    assert everything_below(tmp_path / "other") == before
    assert os.listdir(tmp_path / "root" / ".tmp") == []


def test_a_directory_that_becomes_a_link_after_it_was_listed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    other = LocalStore(str(tmp_path / "other"))
    for each in (store, other):
        each.put("packs/save/1", b"data")
    (entry,) = store.scan("packs/")
    os.rename(tmp_path / "root" / "packs" / "save", tmp_path / "kept")
    (tmp_path / "root" / "packs" / "save").symlink_to(tmp_path / "other" / "packs" / "save")
    store.delete(entry.key)
    assert keys(store) == keys(store, "packs/") == keys(store, "packs/save/") == []
    assert keys(other) == ["packs/save/1"]
    with pytest.raises(ObjectNotFound):
        store.get(entry.key)
    with pytest.raises(StoreError, match=r"cannot publish: Not a directory.*packs/save is in the place of a directory"):
        store.put("packs/save/2", b"data")
    assert keys(other) == ["packs/save/1"]
    os.unlink(tmp_path / "root" / "packs" / "save")
    os.rename(tmp_path / "root" / "packs", tmp_path / "kept" / "packs")
    (tmp_path / "root" / "packs").symlink_to(tmp_path / "other" / "packs")
    with pytest.raises(StoreError, match="is a symbolic link"):
        store.delete(entry.key)
    assert keys(other) == ["packs/save/1"]


def test_empty_directories_behind_a_link_stay(tmp_path: Path) -> None:
    (tmp_path / "other" / "save").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "packs").symlink_to(tmp_path / "other")
    with pytest.raises(StoreError, match="is a symbolic link"):
        LocalStore(str(tmp_path / "root")).delete("packs/save/1")
    assert (tmp_path / "other" / "save").is_dir()


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "large disk")
    store = LocalStore(str(tmp_path / "root"))
    store.put("packs/save/1", b"data")
    assert keys(store) == ["packs/save/1"]
    assert store.get("packs/save/1") == b"data"
    store.clean(time.time() + 1, is_known)
    store.delete("packs/save/1")
    assert os.listdir(tmp_path / "large disk") == [".tmp"]


# -- what crashed uploads left


def test_clean_does_not_follow_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("thesis.tex", f"1-{'0' * 16}"):
        (elsewhere / name).write_bytes(b"years of work")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".tmp").symlink_to(elsewhere)
    store = LocalStore(str(tmp_path / "root"))
    for call in (lambda: store.clean(time.time() + 1000, is_known), lambda: store.put("a", b"data")):
        with pytest.raises(StoreError, match=r"root/\.tmp is a symbolic link"):
            call()
    assert sorted(os.listdir(elsewhere)) == [f"1-{'0' * 16}", "thesis.tex"]


def test_clean_takes_only_what_uploads_have_left(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    store.put("a/b", b"kept")
    temp = tmp_path / "root" / ".tmp"
    ours, directory, link = (f"12-{digit * 16}" for digit in "abc")
    (temp / ours).write_bytes(b"half a pack")
    (temp / directory).mkdir()
    (temp / "notes").write_bytes(b"of somebody")
    (temp / "folder").mkdir()
    (tmp_path / "target").write_bytes(b"of somebody else")
    (temp / link).symlink_to(tmp_path / "target")
    os.link(tmp_path / "root" / "a" / "b", temp / f"13-{'d' * 16}")  # of a crash between a link and its unlink
    store.clean(time.time() + 1000, is_known)
    assert sorted(os.listdir(temp)) == sorted([directory, link, "notes", "folder"])
    assert (tmp_path / "target").read_bytes() == b"of somebody else"
    assert store.get("a/b") == b"kept"


def test_descriptors_are_closed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "root" / "a" / "fifo")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        store.put("a/b/c", b"data")
        store.get("a/b/c")
        store.scan("")
        for key in ("a/fifo", "a/nothing/there", "link/x", "a/b/c/d"):
            with pytest.raises(StoreError):
                store.get(key)
        with pytest.raises(FormatError):
            store.put("a/fifo", b"")
        with pytest.raises(StoreError):
            store.put("link/x", b"")
        store.delete("a/b/c")
        store.clean(time.time(), is_known)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    store.put("ckptlib.json", b"{}")
    (tmp_path / "root" / "copies").write_text("mine")
    with pytest.raises(StoreError, match="root/copies is in the place of a directory of the root; move it away"):
        store.put("copies/layouts/1.json", b"data")
    for prefix in ("copies/", "copies/layouts/", "copies/layouts/1"):  # steps that are there must not look like none
        with pytest.raises(StoreError, match="root/copies is in the place of a directory of the root; move it away"):
            store.scan(prefix)
    for no_root in ("ckptlib.json", "ckptlib.json/run"):  # another library's file, say: it has no steps
        assert LocalStore(str(tmp_path / "root" / no_root)).scan("steps/") == []
    assert (tmp_path / "root" / "copies").read_text() == "mine"
    (tmp_path / "root" / ".tmp").rmdir()
    (tmp_path / "root" / ".tmp").write_text("mine")
    with pytest.raises(StoreError, match=r"root/\.tmp is in the place of a directory of the root; move it away"):
        store.put("a", b"data")
