"""A file for torch.load is what `torch.save` makes of the same tensors; Python's zipfile checks its sums."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path

import pytest
import torch
from onerank import Root

import ckptlib
from ckptlib.exporting import stream
from ckptlib.exporting.torch_file import ALIGNED
from ckptlib.format import dtypes
from ckptlib.pages import PAGE_BYTES

LARGE = 1024


def all_dtypes() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name in dtypes._DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:  # of a newer torch
            continue
        words = torch.randint(0, 2 if name == "bool" else 256, (6 * dtypes.itemsize(name),), dtype=torch.uint8)
        found[name] = words.view(dtype).reshape(2, 3)
        found[f"{name}, empty"] = torch.empty((2, 0, 3), dtype=dtype)
    found["scalar"] = torch.tensor(2.5)
    found["large"] = torch.randn(LARGE, LARGE)
    found["behind"] = torch.randn(5, LARGE, LARGE // 4)
    return found


@pytest.fixture(params=[stream.BATCH_BYTES, 1 << 20], ids=["whole", "in pieces"])
def exported(
    root: Root, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, torch.Tensor]]:
    monkeypatch.setattr(stream, "BATCH_BYTES", request.param)
    state = all_dtypes()
    root.save(state)
    report = ckptlib.export(root.url, tmp_path / "x.pt", format="torch")
    assert [path.name for path in report.files] == ["x.pt"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    return tmp_path / "x.pt", state


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it(exported: tuple[Path, dict[str, torch.Tensor]], mmap: bool) -> None:
    path, state = exported
    found = torch.load(path, weights_only=True, mmap=mmap)
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            *(state[name].dtype, state[name].shape),
            state[name].stride(),
        )
        assert raw(tensor) == raw(state[name]), name


def test_the_pickle_is_torchs_own(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = exported
    order = torch.load(path, weights_only=True)
    own = io.BytesIO()
    torch.save({name: state[name] for name in order}, own)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(own) as expected:
        assert archive.read("archive/data.pkl") == expected.read("archive/data.pkl")
        beside = {name for name in archive.namelist() if not name.startswith("archive/data")}
        assert beside == {"archive/byteorder", "archive/version", "archive/.data/serialization_id"}


def test_sums_and_places(exported: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = exported
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            at = info.header_offset
            begin = at + 30 + sum(int.from_bytes(data[at + i : at + i + 2], "little") for i in (26, 28))
            if info.filename.startswith("archive/data/"):
                assert begin % (PAGE_BYTES if info.file_size >= 1 << 20 else ALIGNED) == 0


def test_a_full_disk_leaves_nothing(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.save({"w": torch.randn(3, LARGE, LARGE)})
    pwrite, written = os.pwrite, 0

    def fill(fd: int, data: memoryview, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > 4 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", fill)
    with pytest.raises(ckptlib.NoRoom, match="No space left"):
        ckptlib.export(root.url, tmp_path / "x.pt", format="torch")
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_chunk_is_named(root: Root, tmp_path: Path) -> None:
    root.save({"w": torch.randn(3, LARGE, LARGE)})
    (pack,) = root.path.glob(f"packs/{root.step:012d}-*/*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ckptlib.CorruptData, match="w"):
        ckptlib.export(root.url, tmp_path / "x.pt", format="torch")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_more_than_four_gigabytes(root: Root, tmp_path: Path) -> None:
    """Sizes and places that need more than 32 bits."""
    large = torch.zeros((1 << 32) + 12345, dtype=torch.uint8)
    large[:: 1 << 20] = 7
    large[-1] = 9
    root.save({"a": torch.arange(5), "large": large, "z": torch.arange(7)})
    ckptlib.export(root.url, tmp_path / "x.pt", format="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert torch.equal(found["a"], torch.arange(5))
    assert torch.equal(found["z"], torch.arange(7))
    assert torch.equal(found["large"], large)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
