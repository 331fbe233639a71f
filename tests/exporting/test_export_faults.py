"""Exports that fail, are killed, or are asked for by somebody hostile: nothing half is left by its name."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tmpfs import mounted
from places import ROOT
from safetensors.numpy import load_file
from support import make_generation, make_root, make_save, state

import ckptlib
from ckptlib.exporting import direct_file, outputs, stream
from ckptlib.reading import reader
from ckptlib.stores.local import LocalStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    make_save(catalog, make_generation(catalog, world_size=2), 1, state(1), 2)
    return tmp_path / "root"


def beside(path: Path) -> list[str]:
    return sorted(found.name for found in path.parent.iterdir())


def test_a_flipped_bit_in_any_pack(path: Path) -> None:
    num_found = 0
    for pack in sorted((path / "packs").rglob("*.safetensors")):
        data = pack.read_bytes()
        for at in range(4096, min(len(data), 4250), 5):
            pack.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            try:
                ckptlib.export(path, path.parent / "x.safetensors")
            except ckptlib.CorruptData:
                assert beside(path) == ["root"]
                num_found += 1
            else:  # slack
                found = load_file(path.parent / "x.safetensors")
                assert {name: array.tobytes() for name, array in found.items()} == {
                    name: array.tobytes() for name, array in state(1).items()
                }
                (path.parent / "x.safetensors").unlink()
        pack.write_bytes(data)
    assert num_found > 10
    for pack in (path / "packs").rglob("*.safetensors"):
        pack.unlink()
    with pytest.raises(ckptlib.ObjectNotFound):
        ckptlib.export(path, path.parent / "hf", format="hf")
    assert list((path.parent / "hf").iterdir()) == []


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_no_disk_is_filled_with_what_no_pack_has(path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Documents tell of more than the packs have."""
    monkeypatch.setattr(reader, "UNSEEN_BYTES", 0)
    for pack in (path / "packs").rglob("*.safetensors"):
        os.truncate(pack, 4096)
    begun: list[str] = []
    beside = outputs.Outputs.beside

    def noted(files: outputs.Outputs, name: str) -> Path:
        begun.append(name)
        return beside(files, name)

    monkeypatch.setattr(outputs.Outputs, "beside", noted)
    with pytest.raises(ckptlib.FormatError, match="the object has 4096 bytes, expected bytes"):
        ckptlib.export(path, path.parent / "out", format=form)
    assert begun == []


def test_what_is_there_is_never_overwritten(path: Path) -> None:
    out = path.parent / "mine"
    out.write_bytes(b"mine")
    for form in ("safetensors", "torch"):
        with pytest.raises(ckptlib.ObjectExists, match="is there already"):
            ckptlib.export(path, out, format=form)
    (link := path.parent / "link").symlink_to("unmounted")
    for directory in (out, out / "below", link):
        with pytest.raises(ckptlib.ObjectExists, match=f"{directory} is to be a directory.* or a link"):
            ckptlib.export(path, directory, format="hf")
    hf = path.parent / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ckptlib.ObjectExists, match=r"index\.json is there already"):
        ckptlib.export(path, hf, format="hf")
    (hf / "model.safetensors.index.json").unlink()
    ckptlib.export(path, hf, format="hf")
    assert {found.name for found in hf.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(ckptlib.ObjectExists, match=r"model\.safetensors is there already"):  # it would be read instead
        ckptlib.export(path, hf, format="hf", max_shard_size=20)
    assert {found.name for found in hf.iterdir()} == {"config.json", "model.safetensors"}
    assert out.read_bytes() == b"mine"


def test_somebody_was_quicker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = path.parent / "x.safetensors"
    write = stream.write

    def late(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        out.write_bytes(b"mine")

    monkeypatch.setattr("ckptlib.exporting.export.write", late)
    with pytest.raises(ckptlib.ObjectExists, match="since the export began"):
        ckptlib.export(path, out)
    assert (out.read_bytes(), beside(path)) == (b"mine", ["root", "x.safetensors"])


@pytest.mark.parametrize("late", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("size", ["5GB", "20"])
def test_weights_that_come_as_others_are_exported(
    path: Path, monkeypatch: pytest.MonkeyPatch, late: str, size: str
) -> None:
    hf = path.parent / "hf"
    write = stream.write

    def and_another(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        (hf / late).write_bytes(b"mine")

    monkeypatch.setattr("ckptlib.exporting.export.write", and_another)
    with pytest.raises(ckptlib.ObjectExists, match="since the export began"):
        ckptlib.export(path, hf, format="hf", max_shard_size=size)
    assert [found.name for found in hf.iterdir()] == [late]


def test_a_disk_that_is_too_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "free_nbytes", lambda where: 100)
    with pytest.raises(ckptlib.NoRoom, match="and the disk has 100 left"):
        ckptlib.export(path, path.parent / "x.safetensors")
    monkeypatch.undo()

    def full(fd: int, at: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ckptlib.NoRoom, match="No space left"):
        ckptlib.export(path, path.parent / "x.safetensors")
    assert beside(path) == ["root"]


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_a_disk_that_fills_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """As a limit on the size of files does: it is met in the middle of the data, wherever room was asked for before."""
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    tensors = {f"w{i}": np.random.default_rng(i).standard_normal(1 << 15).astype(np.float32) for i in range(4)}
    make_save(catalog, make_generation(catalog), 1, tensors)
    monkeypatch.setattr(direct_file, "BUFFER_BYTES", 1 << 14)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, nbytes: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with pytest.raises(ckptlib.StoreError, match="File too large"):
            ckptlib.export(tmp_path / "root", tmp_path / "out" / "x", format=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    ckptlib.export(tmp_path / "root", tmp_path / "out" / "y", format=form)


def test_a_disk_that_has_room_for_a_part_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files cuts a write short as a full disk does, before the next one fails. Of all files,
    only the index reaches it here."""
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    tensors = {f"{'long' * 100}{i}": np.ones(3, np.float32) for i in range(24)}
    make_save(catalog, make_generation(catalog), 1, tensors)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, nbytes: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, limits[1]))
    try:
        with pytest.raises(ckptlib.StoreError, match="File too large"):
            ckptlib.export(tmp_path / "root", tmp_path / "hf", format="hf", max_shard_size=12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(tmp_path / "hf").iterdir()] == []


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_a_name_that_no_file_can_have(tmp_path: Path, form: str) -> None:
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    make_save(catalog, make_generation(catalog), 1, {"half\ud800": np.ones(3, np.float32)})
    with pytest.raises(ckptlib.UnsupportedState, match="which no tensor of a file can be"):
        ckptlib.export(tmp_path / "root", tmp_path / "x", format=form)


HOSTILE = ["../../x", "/etc/x", "..", "a/../../b", "x\ny", "\u202e", "\x00"]


def test_names_that_climb_are_only_names(tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    tensors = {name: np.full(3, i, np.float32) for i, name in enumerate(HOSTILE)}
    make_save(catalog, make_generation(catalog), 1, tensors)
    for form, out in (("safetensors", "deep/x.safetensors"), ("hf", "deep/hf"), ("torch", "deep/x.pt")):
        ckptlib.export(tmp_path / "root", tmp_path / out, format=form, max_shard_size=20)
    found = load_file(tmp_path / "deep/x.safetensors")
    assert {name: int(array[0]) for name, array in found.items()} == {name: i for i, name in enumerate(HOSTILE)}
    assert torch.load(tmp_path / "deep/x.pt", weights_only=True).keys() == {*HOSTILE}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "root"]
    assert len([*(tmp_path / "deep/hf").iterdir()]) == len(HOSTILE) + 1


KILLED = """
import os, signal, sys
import ckptlib
from ckptlib.exporting import outputs
publish, calls = outputs.Outputs.publish, []
write = outputs.Outputs.write
def counted(self, name, *more):
    calls.append(name)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, name, *more)
def named(path, final, link=os.link):
    calls.append(str(final))
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return link(path, final)
outputs.Outputs.write = counted
os.link = named
ckptlib.export(sys.argv[1], sys.argv[2], format="hf", max_shard_size=20)
"""


def test_killed_at_any_moment(path: Path) -> None:
    """Four files are written, then four get their names; the index is the last."""
    for at in range(1, 10):
        out = path.parent / f"hf{at}"
        command = [sys.executable, "-c", KILLED, str(path), str(out), str(at)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        names = {found.name for found in out.iterdir() if not found.name.startswith(".")} if out.exists() else set()
        if at < 9:
            assert done.returncode == -signal.SIGKILL, done.stderr
            assert "model.safetensors.index.json" not in names
        else:
            assert done.returncode == 0, done.stderr
            assert len(names) == 4
            assert "model.safetensors.index.json" in names
    if at == 9:
        assert len(load_file(out / "model-00001-of-00003.safetensors")) == 1


def test_options_that_are_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, match in (
        ({"format": "onnx"}, "expected one of safetensors, hf, torch"),
        ({"dtype": "int4"}, "expected bf16, fp16 or fp32"),
        ({"max_shard_size": "x"}, "expected a number of bytes"),
        ({"max_shard_size": "9" * 400}, "expected a number of bytes"),  # no float is as large
    ):
        with pytest.raises(ValueError, match=match):
            ckptlib.export(path, path.parent / "x", **wrong)  # type: ignore[arg-type]
    monkeypatch.chdir(path.parent)
    for url in ("s3://bucket/x", Path("s3://bucket/x"), "s3:bucket/x"):  # without slashes it is a directory here
        with pytest.raises(ValueError, match="a path of this machine"):
            ckptlib.export(path, url)
    assert ckptlib.export(path, "./s3:x").files == (Path("s3:x"),)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_only_a_shell_knows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str | Path]
) -> None:
    """As a root is refused; before a run begins that would export there."""
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.iterdir()}
    for wrong in (lambda: ckptlib.export(path, kind("~/x")), lambda: ckptlib.Export(kind("~/{step}"), steps=2)):
        with pytest.raises(ValueError, match=r"below a directory called ~.*pass /.*, or /.*/~/"):
            wrong()
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "form"), [("m.pt", "safetensors"), ("m.bin", "safetensors"), ("m.safetensors", "torch")]
)
def test_no_file_has_the_name_of_another_format(path: Path, tmp_path: Path, name: str, form: str) -> None:
    """torch.load refuses such a file, transformers takes it for damaged."""
    told = f"{name} is the name of a file of .*the format is {form}.*give format"
    for wrong in (lambda: ckptlib.export(path, tmp_path / name, format=form), lambda: ckptlib.Export(name, form)):
        with pytest.raises(ValueError, match=told):
            wrong()
    assert not (tmp_path / name).exists()


def test_of_two_exports_at_the_same_time_one_has_all_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a trainer that was killed goes on, of a step that its restart has saved again. It gives its files their
    names when the other one has just found them free."""
    names, link, rename = ["a", "b"], os.link, Path.rename
    old, new = outputs.Outputs(tmp_path), outputs.Outputs(tmp_path)
    for out, text in ((old, b"old"), (new, b"new")):
        out.make_room(6, *names)
        for name in names:
            out.write(name, 0, lambda fd, text=text: os.write(fd, text))  # type: ignore[misc]

    def publish_the_other() -> None:
        monkeypatch.undo()
        old.publish()

    monkeypatch.setattr(os, "link", lambda path, final: (publish_the_other(), link(path, final)))
    monkeypatch.setattr(Path, "rename", lambda path, final: (publish_the_other(), rename(path, final)))
    with pytest.raises(ckptlib.ObjectExists, match="is there since the export began"):
        new.publish()
    assert [(tmp_path / name).read_text() for name in names] == ["old", "old"]


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_a_file_is_flushed_before_it_has_its_name_and_its_directory_after(
    path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """All of its bytes: a power loss takes nothing of what was said to be exported."""
    out, fsync = path.parent / "out", os.fsync
    flushed: list[tuple[int, int, set[Path]]] = []

    def noted(fd: int) -> None:
        fsync(fd)
        found = os.fstat(fd)
        names = {out, *out.iterdir()} if out.is_dir() else {out} & {*path.parent.iterdir()}
        held = {Path(name) for name in os.listdir(fd)} if stat.S_ISDIR(found.st_mode) else names
        flushed.append((found.st_ino, found.st_size, held))

    monkeypatch.setattr(os, "fsync", noted)
    ckptlib.export(path, out, format=form, max_shard_size=20)
    files = [*out.iterdir()] if out.is_dir() else [out]
    assert len(files) > 1 or form in ("safetensors", "torch")
    for file in files:
        found = file.stat()
        assert any(
            (ino, size) == (found.st_ino, found.st_size) and file not in names for ino, size, names in flushed
        ), file
    for name in {*files, out} if form == "dcp" else files:
        directory = name.parent.stat().st_ino
        assert any(ino == directory and Path(name.name) in held for ino, _, held in flushed), name


def test_what_exports_of_other_names_have_left_is_theirs(path: Path) -> None:
    """However old; and so is what only looks like it."""
    left = [f".{name}.{'0' * 8}{outputs.PARTIAL}" for name in ("x.safetensors", "y.safetensors", "x.safetensors.old")]
    for name in left:
        (path.parent / name).write_bytes(b"half")
        os.utime(path.parent / name, (0, 0))
    ckptlib.export(path, path.parent / "x.safetensors")
    assert beside(path) == sorted([*left[1:], "root", "x.safetensors"])


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO], ids=errno.errorcode.get)
def test_a_name_that_was_given_though_an_error_answered_is_given(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on NFS, where the first answer was lost."""
    link = os.link

    def answer(path: Path, final: Path) -> None:
        link(path, final)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", answer)
    ckptlib.export(path, path.parent / "x.safetensors")
    assert beside(path) == ["root", "x.safetensors"]


def test_where_there_are_no_hard_links_files_get_their_names_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, final: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    ckptlib.export(path, path.parent / "x.safetensors")
    assert beside(path) == ["root", "x.safetensors"]
    with pytest.raises(ckptlib.ObjectExists):
        ckptlib.export(path, path.parent / "x.safetensors")


@pytest.mark.root
@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_a_file_system_that_does_not_count_its_bytes(path: Path, form: str) -> None:
    """It is not full."""
    with mounted(path.parent / "ram", "ramfs") as ram:
        report = ckptlib.export(path, ram / "x", format=form)
        assert all(file.exists() for file in report.files)


@pytest.mark.parametrize("form", ["safetensors", "hf", "torch", "dcp"])
def test_a_file_system_that_cannot_flush_directories(path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """As CIFS could not: names are as durable there as it makes them. That no file can be flushed is no success."""
    fsync, refused = os.fsync, {stat.S_IFDIR}

    def refuse(fd: int) -> None:
        if stat.S_IFMT(os.fstat(fd).st_mode) in refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    report = ckptlib.export(path, path.parent / "x", format=form)
    assert all(file.exists() for file in report.files)
    refused.add(stat.S_IFREG)
    with pytest.raises(ckptlib.StoreError, match=r"the export cannot be written: .*Errno 22"):
        ckptlib.export(path, path.parent / "y", format=form)
    left = [
        found for found in path.parent.rglob("*") if found.is_file() and "y" in found.relative_to(path.parent).parts
    ]
    assert left == []


def test_directories_that_an_export_makes_are_flushed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, flushed = os.fsync, set[int]()

    def noted(fd: int) -> None:
        fsync(fd)
        flushed.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    ckptlib.export(path, path.parent / "a" / "b", format="hf")
    for directory in (path.parent, path.parent / "a", path.parent / "a" / "b"):
        assert directory.stat().st_ino in flushed
