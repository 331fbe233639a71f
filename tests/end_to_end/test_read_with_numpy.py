"""The second reader, written from FORMAT.md alone, reads what ckptlib wrote; FORMAT.md is enough, then.

Random layouts of several ranks are read by it in tests/workers/reshards.py.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import read_with_numpy
import torch
from helpers.scaled import Scaled, around, scaled
from onerank import Holder, bits, opened
from places import DATA
from read_with_numpy import find, history, read
from support import make_root, make_save, of_version, state
from torch import nn

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CorruptData
from ckptlib.format.keys import GenerationId, SaveId, copy_key
from ckptlib.format.manifest import Generation, Root
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit

SCRIPT = Path(read_with_numpy.__file__)
KEPT = sorted(DATA.glob("written-by-*"))


def run(*arguments: object) -> list[str]:
    """What the script prints, where there is neither torch nor ckptlib."""
    alone = (
        "import sys, runpy; sys.modules |= {'torch': None, 'ckptlib': None}; "
        "runpy.run_path(sys.argv.pop(1), None, '__main__')"
    )
    command = [sys.executable, "-c", alone, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 250


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_roots_of_earlier_versions(kept: Path) -> None:
    root = kept / "root"
    assert [int(save[:12]) for save in history(root)] == STEPS[kept.name]
    assert run(root) == history(root)
    for rank in range(2):
        step = read(root, find(root, "latest"), rank)
        for name, (dtype, shape, data) in json.loads((kept / "expected.json").read_text()).items():
            found = step.tensors[name]
            assert [step.dtypes[name], list(found.shape), found.tobytes().hex()] == [dtype, shape, data]
        assert step.tensors["mine"].tolist() == [rank, 10 * rank]
        assert step.tensors["cut"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
        assert step.tensors["tied/0"].tolist() == step.tensors["tied/1"].tolist() == [1, 1, 1]
        assert (step.tensors["plain/scale"], step.values["epoch"]) == (2.5, 4)
        assert (
            step.tensors["plain/fp8"].tobytes()
            == torch.arange(5).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        )
        assert [step.values[f"tied/2/{i}"] for i in range(3)] == [1, "two", 3.5]
        assert step.values["optim/@group.0"]["lr"] == 0.01
    assert "plain/fp8 float8_e4m3fn [5]" in run(root, 2, "--rank", 1)


STEPS = {"written-by-0.1": [1, 2], "written-by-0.2": [2, 3, 4]}


def test_increments_and_what_is_no_increment(tmp_path: Path) -> None:
    """Chunks of four saves, of which one was dropped, and one by a job that resumed."""
    states = {}
    for steps in ((1, 2, 3), (4, 5)):
        given = {name: torch.zeros(70_000) for name in "abc"}
        with ckptlib.Checkpointer(tmp_path, given, every=1000, keep=ckptlib.Keep(last=4)) as job:
            job.restore()
            for step in steps:
                given["abc"[step % 2]].uniform_()
                job.save(step).wait_committed()
                states[step] = {name: bits(tensor) for name, tensor in given.items()}
    catalog = Catalog(LocalStore(str(tmp_path)))
    assert [save.step for save in catalog.saves()] == [*states][-4:]
    assert any(catalog.manifest(save).uses for save in catalog.saves())
    for save in catalog.saves():
        found = read(tmp_path, str(save)).tensors
        assert {name: found[name].tobytes() for name in "abc"} == states[save.step]


def test_frames_are_refused_by_name(tmp_path: Path) -> None:
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(300_000)}, every=1000, codec="planes") as job:
        job.save(1).wait_committed()
    with pytest.raises(NotImplementedError, match="frames of planes: this reader knows no codec"):
        read(tmp_path, find(tmp_path, "1"))


@pytest.mark.parametrize("runs", [[[0, 4096, 2]], [[0, 4096, 1], [0, 8192, 3]], [[0, 4096, 2**60]], []])
def test_places_that_are_not_of_all_chunks_are_refused(runs: list[list[int]]) -> None:
    part = {"save": "s", "rank": 0, "places": {"runs": runs}, "table": {"chunks": {"nbytes": [1, 2, 3]}}}
    with pytest.raises(ValueError, match="not of all chunks"):
        read_with_numpy.places(part)


VALUES: dict[str, object] = {
    "none": None,
    "bool": True,
    "int": 2**53 - 1,
    "ints": {1: 2**53, "2": -(2**53), 3: 10**5000},
    "float": 5.0,
    "zero": -0.0,
    "nan": math.nan,
    "infinities": {"a": math.inf, "b": -math.inf},
    "complex": complex(math.nan, -0.0),
    "text": '\U0001f600 \x00 "table":{}',
    "surrogates": "\ud83d\ude00 \udcff",
    "bytes": b"\xff\x00",
    "list": {"dict": [1, [2.0, (3, {"4"})], {}], "$dollar": {"$": 1}, "\udcff": 1},
    "frozen": frozenset({(1, 2), "x"}),
    "ordered": OrderedDict([((1,), 2), ("b", OrderedDict())]),
    "counter": Counter("abca"),
    "scalars": [np.float32(0.1), np.uint64(2**63), np.complex64(1 - 2j), np.bool_(True), np.float16("nan")],
    "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::-1],
    "arrays": [np.array(5), np.zeros((0, 3)), np.array([[True]])],
    "size": torch.Size([2, 0]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
}
TORCH_AS = {"size": (2, 0), "dtype": "bfloat16", "device": "cuda:1"}


def same(left: object, right: object) -> bool:
    """Equal in type and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, dict) and isinstance(right, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.generic) and isinstance(right, np.generic):
        return left.tobytes() == right.tobytes()
    return repr(left) == repr(right) if isinstance(left, (float, complex)) else left == right


def test_values_and_objects(tmp_path: Path) -> None:
    tree = {
        "t": torch.ones(2),
        1: [torch.zeros(3, 0)],
        (1, "z/%"): VALUES["list"],
        "e": {},
        "o": OrderedDict([(2.5, torch.ones(()))]),
    }
    given = {
        "values": {name: Holder(value) for name, value in VALUES.items()},
        "tree": Holder((tree, 3, {})),
        "nested": {1: 2.0, "x/y%": [3, (4, torch.arange(3))], "none": {"left": {}}},
        "empty": torch.empty(2, 0, dtype=torch.complex32),
    }
    with opened(tmp_path) as root:
        root.save(given)
    step = read(tmp_path, find(tmp_path, "1"))
    found = {path.removeprefix("values/"): value for path, value in step.values.items() if path.startswith("values/")}
    assert found.keys() == VALUES.keys()
    for name, value in found.items():
        assert same(value, TORCH_AS.get(name, VALUES[name])), name
    assert {path: step.values[path] for path in step.values if path.startswith("nested")} == {
        "nested/1": 2.0,
        "nested/x%2Fy%25/0": 3,
        "nested/x%2Fy%25/1/0": 4,
        "nested/none/left": {},
    }
    assert step.tensors["nested/x%2Fy%25/1/1"].tolist() == [0, 1, 2]
    assert (step.tensors["empty"].shape, step.dtypes["empty"]) == ((2, 0), "complex32")
    assert same(step.objects["tree"], as_numpy((tree, 3, {})))


def test_a_tensor_of_a_subclass_comes_as_its_parts(tmp_path: Path) -> None:
    given = {"one": scaled(0), "nested": around(1), "job": Holder({"step": 3, "momentum": [scaled(2)]})}
    with opened(tmp_path) as root:
        root.save(given)
    step = read(tmp_path, find(tmp_path, "1"))

    def parts(tensor: Scaled) -> dict[str, Any]:
        codes = parts(tensor.codes) if isinstance(tensor.codes, Scaled) else tensor.codes.numpy()
        return {"codes": codes, "scale": tensor.scale.numpy()}

    assert same(step.objects["one"], parts(scaled(0)))
    assert same(step.objects["nested"], parts(around(1)))
    assert same(step.objects["job"], {"step": 3, "momentum": [parts(scaled(2))]})
    assert "one/codes int8 [6, 3]" in run(tmp_path, 1)


def as_numpy(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.numpy()
    if isinstance(node, dict):
        return type(node)((key, as_numpy(value)) for key, value in node.items())
    return type(node)(map(as_numpy, node)) if isinstance(node, (list, tuple)) else node


def test_a_job_that_goes_back(tmp_path: Path) -> None:
    """With blake3, an optimizer, and chunks of their own; every step that is visible has the bits that it had."""
    Catalog(LocalStore(str(tmp_path))).open_root(Root("0" * 32, "blake3", 60.0))
    model = nn.Linear(300, 700)
    optim = torch.optim.AdamW(model.parameters())
    job: dict[str, Any] = {"model": model, "optim": optim, "at": 0}
    saved: dict[int, dict[str, bytes]] = {}
    with opened(tmp_path) as root:
        for step in (1, 2, 3, -2, 3, 4, -1, 2):  # negative: it goes back to that one
            if step < 0:
                ckptlib.load(root.url, job, -step)
                continue
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optim.step()
            job["at"] = step * 10
            ckptlib.save(root.url, job, step)
            saved[step] = {f"model/{name}": bits(param) for name, param in model.named_parameters()}
            for name, param in model.named_parameters():
                saved[step] |= {f"optim/model/{name}/{key}": bits(value) for key, value in optim.state[param].items()}
            visible = list(ckptlib.checkpoints(root.url))
            assert history(tmp_path) == [info.name for info in visible]
            assert visible[-1].step == step
            for info in visible:
                found = read(tmp_path, info.name)
                assert {name: found.tensors[name].tobytes() for name in saved[info.step]} == saved[info.step]
                assert found.values["at"] == info.step * 10
                assert found.objects["optim"] == [["model/weight", "model/bias"]]
    assert [info.step for info in visible] == [1, 2]
    assert len(list((tmp_path / "steps").iterdir())) == 6


def test_a_rewind_hides_later_steps_at_once(tmp_path: Path) -> None:
    """Its record is the head of history, though its generation has no step."""
    with opened(tmp_path) as root:
        for step in (1, 2, 3):
            assert root.save({"at": torch.tensor(step)}) == step
    command = [sys.executable, "-m", "ckptlib.cli", "rewind", str(tmp_path), "1", "--yes"]
    subprocess.run(command, check=True, capture_output=True, timeout=150)
    assert [int(save[:12]) for save in history(tmp_path)] == [1]
    assert read(tmp_path, find(tmp_path, "latest")).tensors["at"] == 1
    (tmp_path / "generations" / "notes.json").write_text("of somebody")
    assert len(history(tmp_path)) == 1, "a name that is no record's is left alone"
    record = max((tmp_path / "generations").glob("*-????????.json"))
    record.write_bytes(b"torn")
    assert len(history(tmp_path)) == 1, "its copy is read"
    (tmp_path / "copies" / "generations" / record.name).unlink()
    with pytest.raises(ValueError, match=f"{record.name}: no generation"):
        history(tmp_path)


@pytest.mark.parametrize("seed", [*range(12), 110])  # 110: a damaged record may be a rewind
def test_random_histories(tmp_path: Path, seed: int) -> None:
    """Ties of numbers, generations without manifests, rewinds, records that are lost or damaged, trash, missing
    origins."""
    draw = random.Random(seed)
    catalog = make_root(LocalStore(str(tmp_path)))
    ids: list[GenerationId] = []
    saves: list[SaveId] = []
    for number in range(1, 7):
        generation = GenerationId(draw.choice([number, max(number - 1, 1)]), f"{draw.getrandbits(32):08x}")
        origin = (
            draw.choice([*saves, None])
            if draw.random() < 0.3
            else max(saves, key=lambda s: (s.generation, s.step), default=None)
        )
        rewinds = draw.random() < 0.3 and origin is not None
        catalog.generations.put(Generation(generation, 1, origin, 0.0, {}, "here", rewind=rewinds))
        ids.append(generation)
        with_any = draw.random() < 0.8
        for step in sorted(draw.sample(range(1, 12), draw.randint(1, 4))) if with_any else []:
            saves.append(copied(tmp_path, SaveId(step, generation)))
    for key in [key for generation in ids for key in (generation.key, copy_key(generation.key))]:
        if draw.random() < 0.25:
            (tmp_path / key).unlink()
        elif draw.random() < 0.25:
            (tmp_path / key).write_bytes(b"{}" if draw.random() < 0.5 else b"")
    for save in saves:
        if draw.random() < 0.1:
            (tmp_path / save.manifest_key).unlink()
        if draw.random() < 0.2:
            (tmp_path / "trash").mkdir(exist_ok=True)
            (tmp_path / save.trash_key).write_text("{}")
    with LocalStore(str(tmp_path)) as store:
        catalog = Catalog(store)
        try:
            expected = catalog.visible()
        except CorruptData:  # whether the job went back cannot be told
            with pytest.raises(ValueError, match="no generation"):
                history(tmp_path)
            return
        # of two visible ones the later generation's counts
        assert {s.step: find(tmp_path, str(s.step)) for s in expected} == {s.step: str(s) for s in expected}
        assert all(str(catalog.resolve(save.step)) == find(tmp_path, str(save.step)) for save in expected)
    assert history(tmp_path) == [str(save) for save in expected]


def copied(root: Path, save: SaveId) -> SaveId:
    """A manifest of that name; nobody who asks for the history reads it."""
    (root / "steps").mkdir(exist_ok=True)
    (root / save.manifest_key).write_text("{}")
    return save


def test_every_altered_object_is_found(tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path)))
    generation = GenerationId(1, "0" * 8)
    catalog.generations.put(Generation(generation, 2, None, 0.0, {}, "here"))
    save = str(make_save(catalog, generation, 1, state(1), world_size=2))
    expected = state(1)
    assert all(np.array_equal(read(tmp_path, save).tensors[name], expected[name]) for name in expected)
    (layout,) = (tmp_path / "layouts").iterdir()
    flip_bit(layout, 100)
    assert read(tmp_path, save).tensors.keys() == expected.keys(), "its copy is read"
    flip_bit(layout, 100)
    shutil.rmtree(tmp_path / "copies")
    draw = random.Random(0)
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name != "generations"):
        whole = path.read_bytes()
        for _ in range(20):
            data, bit = bytearray(whole), draw.randrange(8 * len(whole))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                found = read(tmp_path, save)
            except (ValueError, KeyError):
                continue
            assert path.suffix == ".safetensors"  # a header, or slack
            assert all(np.array_equal(found.tensors[name], expected[name]) for name in expected)
        path.write_bytes(whole)
        path.rename(path.with_suffix(".gone"))
        with pytest.raises((OSError, ValueError)):
            read(tmp_path, save)
        path.with_suffix(".gone").rename(path)


def test_it_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    make_root(LocalStore(str(tmp_path)))
    data = (tmp_path / "ckptlib.json").read_bytes()
    (tmp_path / "ckptlib.json").write_bytes(of_version(data, 3))
    with pytest.raises(ValueError, match="no root of version 1 or 2"):
        read_with_numpy.document(tmp_path, "ckptlib.json", "root")
    with pytest.raises(ValueError, match="has no step 3"):
        find(tmp_path, "3")
