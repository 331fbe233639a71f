"""`ckptlib.open`: by name, in part, lazily, checked; against what older versions wrote and torch.save'd oracles."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onerank import Root, bits, opened
from places import DATA
from support import make_generation, make_root, make_save

import ckptlib
from ckptlib.stores.local import LocalStore

KEPT = sorted(DATA.glob("written-by-*"))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Root]:
    """Without a step."""
    with opened(tmp_path) as made:
        yield made


def described(tensor: torch.Tensor) -> list[object]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits(tensor).hex()]


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_what_two_ranks_of_older_versions_wrote(kept: Path) -> None:
    expected = json.loads((kept / "expected.json").read_text())
    with ckptlib.open(kept / "root") as step:
        assert {name: described(step.get_tensor(name)) for name in expected} == expected
        for name, (_, shape, _) in expected.items():
            assert step.get_slice(name).get_shape() == shape
        assert step.get_tensor("cut").tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
        assert step.get_slice("cut")[1:3, 1].tolist() == [0, 1]
        assert step.aliases() == {"tied/1": "tied/0"}
        assert step.get_tensor("tied/1").tolist() == [1, 1, 1]
        assert step.get_slice("plain/fp8").get_dtype() == "F8_E4M3"
        assert step.values["epoch"] == 4
        assert step.metadata()["world_size"] == 2
        assert {"@rng/python", "@rng/torch"} <= {*step.keys()}
    for rank in (0, 1):
        with ckptlib.open(kept / "root", rank=rank) as step:
            assert step.get_tensor("mine").tolist() == [rank, 10 * rank]


def test_a_step_by_number_and_name(fresh: Root) -> None:
    for value in (1.0, 2.0):
        fresh.save({"x": torch.full((3,), value)})
    names = {info.step: info.name for info in ckptlib.checkpoints(fresh.url)}
    for step, expected in ((1, 1.0), ("1", 1.0), ("latest", 2.0), (names[1], 1.0)):
        with ckptlib.open(fresh.url, step) as found:
            assert found.get_tensor("x").tolist() == [expected] * 3
    with pytest.raises(ckptlib.CheckpointNotFound):
        ckptlib.open(fresh.url, 7)
    with pytest.raises(ckptlib.CheckpointNotFound, match="Is this a run's URL"):
        ckptlib.open(fresh.path / "elsewhere")
    with pytest.raises(ValueError, match="ranks 0 to 0"):
        ckptlib.open(fresh.url, rank=1)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
ONLY_TORCH = [torch.bfloat16, torch.float8_e5m2, torch.complex32]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def test_every_dtype_in_both_frameworks(root: Root) -> None:
    state = {str(dtype): random_bits(dtype, 5, 6) for dtype in (*DTYPES, *ONLY_TORCH)}
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "bytes16": random_bits(torch.complex128, 70_000)}
    root.save(state)
    with ckptlib.open(root.url) as torches, ckptlib.open(root.url, framework="numpy") as arrays:
        for name, tensor in state.items():
            found = torches.get_tensor(name)
            assert described(found) == described(tensor)
            assert bits(torches.get_slice(name)[...]) == bits(tensor)
            if tensor.dtype in ONLY_TORCH:
                with pytest.raises(ckptlib.UnsupportedState, match=f"{name}: numpy has no .*framework='pt'"):
                    arrays.get_tensor(name)
                continue
            array = arrays.get_tensor(name)
            assert isinstance(array, np.ndarray)
            assert (array.dtype.name, array.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert array.tobytes() == bits(tensor)


INDICES: list[Any] = [
    *(
        0,
        -1,
        slice(None),
        slice(2, 5),
        slice(1, 40, 7),
        ...,
        (),
        (3, 4),
        (slice(1, 3), -2),
        (..., 1),
        (4, ..., slice(3)),
    ),
    *(slice(5, 2), (slice(0, 0), 1), (slice(None), slice(None, None, 3)), slice(-3, None), (np.int64(2), slice(0, 1))),
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_slices_are_those_of_numpy(tmp_path: Path, world_size: int) -> None:
    whole = np.random.default_rng(0).standard_normal((41, 9, 4)).astype(np.float32)
    catalog = make_root(LocalStore(str(tmp_path)))
    make_save(catalog, make_generation(catalog, world_size=world_size), 1, {"w": whole, "b": whole[:5]}, world_size)
    with ckptlib.open(tmp_path, framework="numpy") as step:
        found = step.get_slice("w")
        assert (found.get_shape(), found.get_dtype()) == ([41, 9, 4], "F32")
        for index in INDICES:
            np.testing.assert_array_equal(found[index], whole[index], err_msg=str(index), strict=True)
        for wrong, error in ((41, IndexError), ((0, 0, 0, 0), IndexError), ((..., ...), IndexError), ("a", TypeError)):
            with pytest.raises(error, match=r"^w: "):
                found[wrong]
        with pytest.raises(ValueError, match="step of -1"):
            found[::-1]


def test_nothing_is_read_before_it_is_asked_for_and_then_little(root: Root) -> None:
    root.save({"large": torch.arange(16 << 20, dtype=torch.float32), "small": torch.ones(3)})
    with ckptlib.open(root.url) as step:
        assert step.get_slice("large").get_shape() == [16 << 20]
        assert (len(step.keys()), step.nbytes_read) == (5, 0)
        part = step.get_slice("large")[1000:2000]
        assert part.tolist() == list(range(1000, 2000))
        assert step.nbytes_read <= 4 << 20
        before = step.nbytes_read
        assert step.get_tensor("large")[-1] == (16 << 20) - 1
        assert step.nbytes_read - before <= 1.05 * (64 << 20)


def test_a_slice_with_a_step_holds_no_memory_but_its_own(root: Root) -> None:
    large = torch.arange(1 << 20, dtype=torch.int32).reshape(1024, 1024)
    root.save({"large": large})
    index = slice(None, None, 100), slice(5, None, 7)
    with ckptlib.open(root.url) as step:
        found = step.get_slice("large")[index]
        assert found.equal(large[index])
        assert found.untyped_storage().nbytes() == found.nbytes
    with ckptlib.open(root.url, framework="numpy") as step:
        array = step.get_slice("large")[index]
        assert np.array_equal(array, large[index].numpy())
        assert array.flags.owndata


def test_a_name_that_is_no_tensor(root: Root) -> None:
    root.save({"model": torch.nn.Linear(2, 2), "epoch": 3})
    with ckptlib.open(root.url) as step:
        for name, why in (
            ("epoch", "it is a plain value"),
            ("model", "it holds 2 tensors"),
            ("model/weigth", "did you mean model/weight"),
            ("zzz", "keys"),
        ):
            with pytest.raises(ckptlib.StateMismatch, match=why):
                step.get_tensor(name)


def test_where_to_cut_what_is_no_tensor(root: Root) -> None:
    root.save({"w": torch.ones(2), "epoch": 3})
    told: list[str] = []
    with ckptlib.open(root.url) as step:

        def ask() -> None:
            with pytest.raises(ckptlib.StateMismatch) as raised:
                step.chunk_begins("epoch")
            told.append(str(raised.value))

        asking = threading.Thread(target=ask, daemon=True)  # one that waits for itself holds up nothing else
        asking.start()
        asking.join(60)
        assert ["it is a plain value" in text for text in told] == [True]


def test_a_process_that_is_forked_while_a_thread_reads_can_read(root: Root) -> None:
    """A data loader's: the thread that was reading is not there to let others read."""
    root.save({"w": torch.arange(1000)})
    with ckptlib.open(root.url, framework="numpy") as step, step._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, since there are threads
        child = os.fork()
        if not child:
            signal.alarm(60)
            failed = 1
            try:
                failed = step.get_slice("w")[10:20].tolist() != list(range(10, 20))
            finally:
                os._exit(failed)
        assert os.waitpid(child, 0)[1] == 0


def test_compressed_and_rounded(fresh: Root) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(70_000), "m": torch.randn(70_000)}
    codec = {"w": "planes", "m": ckptlib.Lossy("bfloat16")}
    ckptlib.save(fresh.url, state, 1, codec=codec)
    ckptlib.save(fresh.url, {**state, "w": state["w"].clone()}, 2, codec=codec)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ckptlib.load(fresh.url, loaded)
    with ckptlib.open(fresh.url) as step:
        assert bits(step.get_tensor("w")) == bits(state["w"])
        assert bits(step.get_slice("w")[30_000:40_000]) == bits(state["w"][30_000:40_000])
        assert bits(step.get_tensor("m")) == bits(loaded["m"]) != bits(state["m"])
        assert step.rounded.keys() == {"m"}
