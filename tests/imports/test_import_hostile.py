"""Damaged and hostile sources: an error that says what is wrong, no code run, and nothing in the root."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import fork_one
from safetensors.torch import save_file
from sources import WRITTEN, read, refuses
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import override

import ckptlib
from ckptlib.errors import FormatError
from ckptlib.imports.pickled import Made, read_pickle


class Bomb:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def test_no_code_of_a_torch_file_runs(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": Bomb(tmp_path / "ran")}, tmp_path / "ckpt.pt")
    refuses(tmp_path / "ckpt.pt", tmp_path / "root", r"args \((posix|nt)\.system\).*--skip 'args'")
    ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "root", skip="args")
    assert not (tmp_path / "ran").exists()


def test_no_code_of_dcp_runs(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    refuses(tmp_path / "dcp", tmp_path / "root", "has a posix.system, expected DCP's Metadata")
    assert not (tmp_path / "ran").exists()


def test_dcp_that_leads_out_of_its_directory(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"
    path.write_bytes(pickle.dumps(metadata))
    refuses(tmp_path / "dcp", tmp_path / "root", "not inside of it")


def test_dcp_without_one_ranks_file(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    next((tmp_path / "dcp").glob("*.distcp")).unlink()
    refuses(tmp_path / "dcp", tmp_path / "root", "is missing, but .* names it")


def test_dcp_that_tells_of_less_than_a_whole_tensor(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([9])
    path.write_bytes(pickle.dumps(metadata))
    refuses(tmp_path / "dcp", tmp_path / "root", "has 4 of its 9 elements")


def test_dcp_whose_shards_overlap_and_leave_a_hole(tmp_path: Path) -> None:
    """As many elements as the tensor has, but not each of them: a run that began from it kept what was there."""
    dcp_save({"model": {"w": torch.arange(4.0)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    ((index, info),) = metadata.storage_data.items()
    (chunk,) = metadata.state_dict_metadata["model.w"].chunks
    parts, chunks, data = {}, [], b""
    for at in (0, 1):
        torch.save(torch.arange(4.0)[at : at + 2].clone(), tmp_path / "part.pt")
        part = (tmp_path / "part.pt").read_bytes()
        parts[replace(index, offset=torch.Size([at]))] = replace(info, offset=len(data), length=len(part))
        chunks.append(replace(chunk, offsets=torch.Size([at]), sizes=torch.Size([2])))
        data += part
    metadata.storage_data, metadata.state_dict_metadata["model.w"].chunks = parts, chunks
    (tmp_path / "dcp" / info.relative_path).write_bytes(data)
    path.write_bytes(pickle.dumps(metadata))
    refuses(tmp_path / "dcp", tmp_path / "root", r"model/w: the source has nothing for \[3:4\]")
    state = {"model": {"w": torch.full((4,), -1.0)}}
    with (
        ckptlib.Checkpointer(tmp_path / "run", state, every=ckptlib.Steps(10), init_from=tmp_path / "dcp") as ckpt,
        pytest.raises(FormatError, match="has nothing for"),
    ):
        ckpt.restore()
    assert torch.equal(state["model"]["w"], torch.full((4,), -1.0))


def test_dcp_with_a_path_without_end(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.planner_data = {"w": ("a", "b") * 1000}
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(tmp_path / "dcp", tmp_path / "root", "a path that is none")


def test_torch_files_cut_anywhere(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.randn(300)}}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for length in range(0, len(data), 97):
        (tmp_path / "cut.pt").write_bytes(data[:length])
        with pytest.raises(FormatError):
            read(tmp_path / "cut.pt")


def test_torch_files_with_any_byte_of_the_pickle_changed(tmp_path: Path) -> None:
    """An error of ckptlib's or another value, but never one of Python's."""
    torch.save({"model": {"w": torch.randn(3)}, "n": [1, 2.5, "x"]}, tmp_path / "whole.pt")
    data = bytearray((tmp_path / "whole.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        pickled = archive.read("whole/data.pkl")
    begin = data.index(pickled)
    for i in range(begin, begin + len(pickled), 2):
        for value in (0x52, 0xFF):
            changed = bytearray(data)
            changed[i] = value
            (tmp_path / "changed.pt").write_bytes(changed)
            with contextlib.suppress(ckptlib.CkptError):
                _ = read(tmp_path / "changed.pt").flat


def archive(path: Path, pickled: bytes, **entries: bytes) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a/data.pkl", pickled)
        for name, data in entries.items():
            made.writestr(f"a/data/{name.removeprefix('s')}", data)


def tensor_of(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, numel: int = 4) -> bytes:
    """A pickle of {"w": tensor} over the storage 0."""
    made = io.BytesIO()

    class Pickler(pickle.Pickler):
        @override
        def persistent_id(self, given: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if given is storage else None

    class Tensor:
        @override
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return torch._utils._rebuild_tensor_v2, (storage, offset, shape, stride, False, {})

    storage = frozenset({"a storage"})
    Pickler(made, 2).dump({"w": Tensor()})
    return made.getvalue()


@pytest.mark.parametrize(
    ("pickled", "match"),
    [
        (tensor_of((5,), (1,)), "beyond its storage"),
        (tensor_of((4,), (1,), offset=1), "beyond its storage"),
        (tensor_of((4,), (1,), numel=9), "said to have 9 elements"),
        (tensor_of((2**40,), (0,)), "shares memory with itself"),
        (tensor_of((2**62, 2**62), (0, 0)), "so many elements"),
        (tensor_of((-4,), (1,)), "is no shape"),
        (tensor_of((4,), (-1,)), "is no shape"),
        (tensor_of((4,), (1,), offset=-1), "with the strides"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, pickled: bytes, match: str) -> None:
    archive(tmp_path / "a.pt", pickled, s0=b"\0" * 16)
    refuses(tmp_path / "a.pt", tmp_path / "root", match)


def test_values_that_grow_without_end(tmp_path: Path) -> None:
    """Two hundred lists, each twice in the next."""
    node: list[object] = []
    for _ in range(90):
        node = [node, node]
    archive(tmp_path / "grows.pt", pickle.dumps({"a": node}, 2))
    itself: list[object] = []
    itself.append(itself)
    archive(tmp_path / "itself.pt", pickle.dumps({"a": itself}, 2))
    code = (
        "import re, resource, sys, ckptlib\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (120, 120))\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        ckptlib.convert(path, path + '-root')\n"
        "    except ckptlib.CkptError as error:\n"
        "        print(error)\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())\n"  # ru_maxrss: its parent's, too
        "assert int(peak[1]) < 1_500_000\n"
    )
    paths = [str(tmp_path / "grows.pt"), str(tmp_path / "itself.pt")]
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(code)
    assert fork_one(program, *paths, log=log, timeout_s=300) == 0, log.read_text()
    assert "more than" in log.read_text()
    assert "deeper than" in log.read_text()


def test_numbers_that_python_does_not_write(tmp_path: Path) -> None:
    archive(tmp_path / "a.pt", pickle.dumps({10**5000: 1}, 2))
    refuses(tmp_path / "a.pt", tmp_path / "root", "an int of 16610 bits")
    dcp_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.offset = -(10**5000)
    path.write_bytes(pickle.dumps(metadata))
    refuses(tmp_path / "dcp", tmp_path / "root", "an int of 16610 bits")


def test_keys_whose_hash_takes_for_ever() -> None:
    """A tuple of the one before, twice, sixty times: a hundred bytes, and no Ctrl-C ends a hash."""
    twice = b"K\x01\x85" + b"2\x86" * 60
    by_key, member, of_frozen = b"}" + twice + b"K\x01s.", b"\x8f(" + twice + b"\x90.", b"(" + twice + b"\x91."
    persistent = b"}" + twice + b"QK\x01s."
    code = (
        "import sys\n"
        "from ckptlib.errors import FormatError\n"
        "from ckptlib.imports.pickled import read_pickle\n"
        "for pickled in sys.argv[1:]:\n"
        "    try:\n"
        "        read_pickle(bytes.fromhex(pickled), 'x')\n"
        "    except FormatError as error:\n"
        "        print(error)\n"
    )
    short = by_key.replace(twice, twice[:3] + b"2\x86" * 10)
    pickles = [pickled.hex() for pickled in (short, by_key, member, of_frozen, persistent)]
    done = subprocess.run([sys.executable, "-c", code, *pickles], capture_output=True, text=True, timeout=100)
    assert done.stdout.count("x: not a whole pickle (ValueError: a key of more than 1000 values)") == 1, done
    assert done.stdout.count("x: not a whole pickle (ValueError: more than 134217728 values") == 4, done


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"]",
        b"\x80\x02",
        b"R.",
        b"t.",
        b"h\x00.",
        b"\x8e" + b"\xff" * 8 + b".",
        b"cos\nsystem\n(S'x'\ntR",
        b"0.",
    ],
)
def test_what_is_no_pickle(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a whole pickle"):
        read_pickle(data, "x")


def test_a_call_is_written_down_and_not_made(tmp_path: Path) -> None:
    found = read_pickle(pickle.dumps(Bomb(tmp_path / "ran")), "x")
    assert isinstance(found, Made)
    assert (found.by, found.arguments) == ("posix.system", (f"touch {tmp_path / 'ran'}",))
    assert not (tmp_path / "ran").exists()


# safetensors


def safetensors(path: Path, header: object, data: bytes, nbytes: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if nbytes is None else nbytes).to_bytes(8, "little") + text + data)


def entry(first: int, last: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "nbytes", "match"),
    [
        ({}, 2**60, "a header of 1152921504606846976 bytes"),
        (b"\xff{", None, "JSON cannot be read"),
        (b"[" * 5000, None, "JSON cannot be read"),
        ([1], None, "is no object"),
        (b'{"a":1,"a":2}', None, "stands twice"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, None, "gap or overlap"),
        ({"a": entry(0, 4, [1]), "b": entry(5, 9, [1])}, None, "gap or overlap"),
        ({"a": entry(0, 8, [1])}, None, "gap or overlap"),
        ({"a": entry(0, 2**62, [2**60])}, None, "the file has"),
        ({"a": entry(4, 0, [1])}, None, "no data_offsets"),
        ({"a": entry(0, 4, [-1])}, None, "is no shape"),
        ({"a": entry(0, 4, [1], "F33")}, None, "unknown"),
        ({"a": entry(0, 4, [1])}, None, "copied whole"),
        ({"a": 7}, None, "no data_offsets"),
        ({"a": entry(0, 0, [2**62, 2**62, 0])}, None, "so many elements"),
    ],
)
def test_safetensors_that_cannot_be(tmp_path: Path, header: object, nbytes: int | None, match: str) -> None:
    safetensors(tmp_path / "a.safetensors", header, b"\0" * 12, nbytes)
    refuses(tmp_path / "a.safetensors", tmp_path / "root", match)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "", "gone.safetensors", "..\\x"])
def test_an_index_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "v": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, tmp_path / "root", "not inside of it|is missing")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "model.bin.index.json"])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(tmp_path: Path, name: str) -> None:
    """A FIFO, and a link to a device, as a cloned repository may have it."""
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    os.mkfifo(tmp_path / name)
    refuses(tmp_path, tmp_path / "root", "is no file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    refuses(tmp_path, tmp_path / "root", "is no file")


def test_a_source_of_no_known_format(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"hello")
    refuses(tmp_path / "x.bin", tmp_path / "root", "is of no format that can be imported")
    refuses(tmp_path / "gone.pt", tmp_path / "root", "does not exist")
    (tmp_path / "cannot be read").symlink_to("/proc/self/mem")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    refuses(tmp_path, tmp_path / "root", "is meant, give that, such as .*/pytorch_model.bin")


def test_a_root_of_ckptlib_is_not_imported_but_copied(tmp_path: Path) -> None:
    ckptlib.save(tmp_path / "run", {"w": torch.ones(2)}, 1)
    refuses(tmp_path / "run", tmp_path / "root", "is a root of ckptlib already.*`ckptlib copy`, or .*init_from=")


def test_a_source_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"s3://bucket/a\.pt: an import reads files of this machine; copy them here"):
        ckptlib.convert("s3://bucket/a.pt", tmp_path / "root")


def test_a_name_orders_no_terminal_about_and_each_note_is_told_once(tmp_path: Path) -> None:
    """Where nobody has set up logging, warnings go to stderr."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "opt\x1b[2Jim": optim.state_dict()}, tmp_path / "ckpt.pt")
    command = [sys.executable, "-m", "ckptlib.cli", "import", tmp_path / "ckpt.pt", tmp_path / "root", "--step", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout + done.stderr).count("have no names in the source") == 1
    assert r"opt\x1b[2Jim" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("keys", [3, 1.5])
def test_what_stands_in_the_place_of_what_a_library_writes(tmp_path: Path, keys: object) -> None:
    """Also where a run begins from it."""
    source = shutil.copytree(WRITTEN / "torchsnapshot-0.1.0", tmp_path / "snapshot")
    document = json.loads((source / ".snapshot_metadata").read_text())
    document["manifest"]["0/model"]["keys"] = keys
    (source / ".snapshot_metadata").write_text(json.dumps(document))
    refuses(source, tmp_path / "root", r"snapshot: is not as torchsnapshot writes it \(TypeError: ")
    state = {"model": torch.nn.Linear(2, 2)}
    with (
        ckptlib.Checkpointer(tmp_path / "run", state, every=ckptlib.Steps(10), init_from=source) as ckpt,
        pytest.raises(FormatError, match="is not as torchsnapshot writes it"),
    ):
        ckpt.restore()
