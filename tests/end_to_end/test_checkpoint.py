"""save, save_async, load and checkpoints of one process: every tensor and value, bit for bit."""

from __future__ import annotations

import gc
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onerank import Holder, Root, bits, opened, same
from safetensors import safe_open
from torch import nn

import ckptlib
from ckptlib import (
    CheckpointNotFound,
    CorruptData,
    PerRank,
    SaveFailed,
    Sharded,
    StateMismatch,
    UnsupportedState,
    checkpoint,
)
from ckptlib.format import documents, dtypes
from ckptlib.loading.committed import Committed
from ckptlib.stores.testing import flip_bit

DTYPES = [
    dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and dtypes.known(str(dtype)[6:])
]
DTYPES = sorted(set(DTYPES), key=str)

RANDOM = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    with opened(tmp_path_factory.mktemp("root")) as root:
        yield root


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit random: NaNs of all payloads, denormals, negative zeros."""
    count = torch.empty(shape, dtype=torch.uint8).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=RANDOM)
    return raw.view(dtype).view(shape)


# -- what is too large


def test_a_value_too_large_for_a_document_is_refused_by_name(root: Root) -> None:
    seen = np.zeros(2**29 + 1, np.uint8)  # pages that nobody touches
    with pytest.raises(UnsupportedState, match="replay/0/seen: 536,870,913 bytes are too many for a value"):
        root.save({"replay": [{"seen": seen}], "w": torch.ones(1)})


def test_values_too_large_together_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 100_000)
    with (
        opened(tmp_path) as root,
        pytest.raises(SaveFailed, match=r"the snapshot would have 12.,... bytes; a document has at most 100,000"),
    ):
        root.save({"w": torch.ones(1), **{f"v{i}": "x" * 10_000 for i in range(12)}})


# -- tensors


def test_no_dtype_of_torch_is_forgotten() -> None:
    """A new one is either known, or is one that has no elements of whole bytes."""
    names = {str(d)[6:] for n in dir(torch) if isinstance(d := getattr(torch, n), torch.dtype)}
    unknown = {name for name in names if not dtypes.known(name)}
    assert {name for name in unknown if not name.startswith(("bits", "qint", "quint"))} == {
        *(f"int{n}" for n in range(1, 8)),
        *(f"uint{n}" for n in range(1, 8)),
    }
    assert {dtypes.itemsize(str(d)[6:]) == d.itemsize for d in DTYPES} == {True}


VIEWS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "0-d": lambda dtype: any_bits(dtype),
    "empty": lambda dtype: any_bits(dtype, 3, 0, 2),
    "plain": lambda dtype: any_bits(dtype, 5, 7),
    "transposed": lambda dtype: any_bits(dtype, 5, 7).t(),
    "strided": lambda dtype: any_bits(dtype, 9, 6)[1::3, ::2],
    "one row of many": lambda dtype: any_bits(dtype, 4, 6)[2],
    "expanded": lambda dtype: any_bits(dtype, 1, 5).expand(4, 5),
    "large": lambda dtype: any_bits(dtype, 300, 1031),
    "large and transposed": lambda dtype: any_bits(dtype, 80, 90).t(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(root: Root, dtype: torch.dtype) -> None:
    source = {name: make(dtype) for name, make in VIEWS.items()}
    expected = {name: bits(tensor) for name, tensor in source.items()}
    target = {name: torch.zeros(t.shape, dtype=torch.uint8).to(torch.bool) if dtype is torch.bool else
              torch.zeros(t.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(t.shape)
              for name, t in source.items()}  # fmt: skip
    root.move(source, target)
    assert {name: bits(tensor) for name, tensor in target.items()} == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_targets_may_be_views_and_their_surroundings_stay(root: Root, dtype: torch.dtype) -> None:
    source = any_bits(dtype, 90, 80)  # torch copies transposed matrices from some size on in a way of its own
    wide, high = any_bits(dtype, 90, 85), any_bits(dtype, 80, 90)
    around = bits(wide[:, 81:])
    root.save({"a": source})
    root.load({"a": wide[:, 1:81]})
    root.load({"a": high.t()})
    assert bits(wide[:, 1:81]) == bits(high.t()) == bits(source)
    assert bits(wide[:, 81:]) == around


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugates_and_negatives_are_values_and_no_ties(root: Root, dtype: torch.dtype) -> None:
    base = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).to(dtype)
    views = {"base": base, "conj": base.conj(), "imag of conj": base.conj().imag, "imag": base.imag}
    assert views["imag of conj"].is_neg()
    assert views["conj"].is_conj()
    target = {name: torch.zeros_like(view).resolve_conj().resolve_neg() for name, view in views.items()}
    root.move(views, target)
    assert all(same(target[name], view) for name, view in views.items())


@pytest.mark.parametrize("numel", [6, 600_000])
def test_targets_may_have_a_conjugation_or_negation_pending(root: Root, numel: int) -> None:
    source = {"c": any_bits(torch.complex64, numel), "n": torch.randn(numel)}
    target = {"c": torch.zeros(numel, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.zeros(numel))}
    root.move({"c": source["c"].nan_to_num(), "n": source["n"]}, target)
    assert torch.equal(target["c"], source["c"].nan_to_num())
    assert torch.equal(target["n"], source["n"])


def test_packs_are_safetensors_files_with_the_same_bytes(root: Root) -> None:
    """The oracle is safetensors' own reader."""
    source = {f"{dtype}/{name}": make(dtype) for dtype in DTYPES for name, make in VIEWS.items() if name != "large"}
    source["large"] = any_bits(torch.float32, 1200, 1031)
    root.save({"state": source})
    part, _ = root.saved()
    found: dict[str, list[tuple[int, bytes]]] = {}
    foreign = {}
    for pack in part.packs:
        with safe_open(root.path / pack.key, "pt") as file:
            for entry in file.keys():  # noqa: SIM118 (it is no dict)
                name, _, first = entry.rpartition("@")
                tensor = file.get_tensor(entry)
                found.setdefault(name, []).append((int(first or 0) if first.isdigit() else 0, bits(tensor)))
                if name.startswith("state/") and "%2F" in name:
                    dtype = source[name.removeprefix("state/").replace("%2F", "/")].dtype
                    foreign[entry] = tensor.dtype != dtype
    for name, tensor in source.items():
        key = "state/" + name.replace("/", "%2F")
        assert b"".join(data for _, data in sorted(found.get(key, []))) == bits(tensor), name
    assert {entry for entry, is_foreign in foreign.items() if is_foreign} == {
        entry for entry in foreign if not dtypes.has_own_word(entry.split("/")[1].split("%2F")[0][6:])
    }


# -- structure


def test_nesting_keys_and_names(root: Root) -> None:
    source = {
        "a": {"b": [torch.ones(2), (torch.zeros(1), 3)], "b/c": torch.full((2,), 2.0), "b%2Fc": torch.full((2,), 3.0)},
        1: torch.full((1,), 4.0),
        "": {"x": 5},
        (1, "two"): "tuple key",
    }
    target = {
        "a": {"b": [torch.zeros(2), (torch.ones(1), 0)], "b/c": torch.zeros(2), "b%2Fc": torch.zeros(2)},
        1: torch.zeros(1),
        "": {"x": 0},
        (1, "two"): "",
    }
    root.move(source, target)
    assert same(target, source)


def test_plain_values_come_back_in_place(root: Root) -> None:
    values = {
        "int": 2**80,
        "nan": float("nan"),
        "inner": {"list": [1, "two", None, b"\x00"], "tuple": (1, (2.5, True)), "set": {1, 2}},
        "ranks": PerRank((7, "own")),
        "dtype": torch.bfloat16,
    }
    target = {
        "int": 0,
        "nan": 0.0,
        "inner": {"list": [0, "", 0, b""], "tuple": (0, (0.0, False)), "set": set()},
        "ranks": PerRank((0, "")),
        "dtype": torch.float32,
    }
    inner = target["inner"]
    report = root.move(values, target)
    assert target["inner"] is inner
    assert same({k: v for k, v in target.items() if k != "ranks"}, {k: v for k, v in values.items() if k != "ranks"})
    assert target["ranks"] == values["ranks"]
    assert report.values["inner/tuple/1/0"] == 2.5
    assert report.values["int"] == 2**80


def test_tensors_in_tuples_are_filled_and_stay_the_same_objects(root: Root) -> None:
    weight = torch.zeros(2)
    target = {"pair": (weight, 0)}
    root.move({"pair": (torch.ones(2), 9)}, target)
    assert target["pair"] == (weight, 9)
    assert target["pair"][0] is weight
    assert torch.equal(weight, torch.ones(2))


def test_per_rank_and_sharded(root: Root) -> None:
    whole = torch.randn(6, 4)
    target = {"own": PerRank({"t": torch.zeros(3)}), "cut": [Sharded(torch.zeros(3, 4), (0, 0), (6, 4))]}
    root.save({"own": PerRank({"t": torch.arange(3.0)}), "cut": [Sharded(whole, (0, 0), (6, 4))]})
    root.load(target)
    assert torch.equal(target["own"].value["t"], torch.arange(3.0))  # type: ignore[attr-defined]
    assert torch.equal(target["cut"][0].tensor, whole[:3])  # type: ignore[index]


def test_generators_go_on_where_they_stopped(root: Root) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    root.save({"g": generator})
    expected = torch.rand(5, generator=generator)
    other = torch.Generator()
    root.load({"g": other})
    assert torch.equal(torch.rand(5, generator=other), expected)


def test_random_state_is_put_back_only_when_asked(root: Root) -> None:
    torch.manual_seed(3)
    root.save({"a": 1})
    expected = torch.rand(4)
    root.load({"a": 0}, random=True)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    root.load({"a": 0})
    assert torch.equal(torch.get_rng_state(), before)


# -- objects

CONTENTS: dict[str, object] = {
    "values": {"a": 1, 2: [None, (3.0,)]},
    "nothing": None,
    "a tensor": torch.arange(4.0),
    "nested": {"a": [torch.ones(2), {"b": (torch.zeros(1), 5, "x")}], 7: torch.arange(3), "s": {1, 2}, "e": []},
    "ordered": OrderedDict(z=torch.ones(1), a=OrderedDict(b=torch.ones(2))),
    "float8": {"q": any_bits(torch.float8_e4m3fn, 3, 5), "scale": torch.tensor(2.5)},
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_objects_get_back_exactly_what_they_gave(tmp_path: Path, kind: str) -> None:
    source, target = Holder(CONTENTS[kind]), Holder()
    with opened(tmp_path) as root:
        root.save({"o": source})
        assert (source.given, source.taken) == (1, 0)
        root.load({"o": target})
    assert target.taken == 1
    assert same(target.content, CONTENTS[kind])


def test_state_is_taken_on_the_callers_thread(root: Root) -> None:
    class Nosy(Holder):
        def state_dict(self) -> object:
            self.content = threading.current_thread() is threading.main_thread()
            return super().state_dict()

    source, target = Nosy(), Holder()
    root.move({"o": source}, {"o": target})
    assert target.content is True


def test_schedulers_and_scalers_go_on_as_if_nothing_happened(root: Root) -> None:
    from torch.optim import lr_scheduler as lr

    makers: dict[str, Callable[[torch.optim.Optimizer], lr.LRScheduler]] = {
        "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
        "milestones": lambda o: lr.MultiStepLR(o, [2, 4, 4, 6]),
        "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=20),
        "sequential": lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, total_iters=3), lr.CosineAnnealingLR(o, 10)], milestones=[3]
        ),
        "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
        "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    }

    def make(kind: str, tensor_lr: bool) -> tuple[torch.optim.Optimizer, lr.LRScheduler]:
        rate = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)
        return optimizer, makers[kind](optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: lr.LRScheduler, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    for kind in makers:
        for tensor_lr in (False, True):
            optimizer, scheduler = make(kind, tensor_lr)
            run(optimizer, scheduler, 5)
            root.save({"o": optimizer, "s": scheduler})
            expected = run(optimizer, scheduler, 6)
            optimizer, scheduler = make(kind, tensor_lr)
            root.load({"o": optimizer, "s": scheduler})
            assert run(optimizer, scheduler, 6) == expected, (kind, tensor_lr)


def test_plateau_and_scaler(root: Root) -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau, torch.amp.GradScaler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return optimizer, plateau, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    optimizer, plateau, scaler = make()
    for loss in (1.0, 2.0, 3.0, 4.0):
        plateau.step(loss)
    scaler.scale(torch.ones(1))
    scaler.update(256.0)
    state = {"o": optimizer, "p": plateau, "s": scaler}
    root.save(state)
    fresh = dict(zip("ops", make(), strict=True))
    root.load(fresh)
    assert fresh["p"].state_dict() == plateau.state_dict()  # type: ignore[attr-defined]
    assert fresh["s"].state_dict() == scaler.state_dict()  # type: ignore[attr-defined]
    assert fresh["o"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1  # type: ignore[attr-defined]


# -- saves


def test_a_save_is_of_the_moment_of_its_call(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        weight, note = torch.zeros(300, 1031), {"n": 1}
        pending = []
        for step in range(1, 6):
            weight.fill_(step)
            note["n"] = step
            pending.append(ckptlib.save_async(root.url, {"w": weight, "t": weight.t(), "note": note}, step))
        weight.fill_(-1)
        for save in pending:
            save.wait_committed(60)
            assert save.committed
        for step in range(1, 6):
            target = {"w": torch.zeros(300, 1031), "t": torch.zeros(1031, 300), "note": {"n": 0}}
            ckptlib.load(root.url, target, step)
            assert target["note"] == {"n": step}
            assert (target["w"] == step).all()  # type: ignore[attr-defined]
            assert (target["t"] == step).all()  # type: ignore[attr-defined]


def test_steps_are_listed_and_found(tmp_path: Path) -> None:
    assert list(ckptlib.checkpoints(tmp_path / "nothing")) == []
    with opened(tmp_path / "root") as root:
        target = {"a": 0}
        with pytest.raises(CheckpointNotFound):
            ckptlib.load(root.url, target)
        for step in (0, 7, 30):
            ckptlib.save(root.url, {"a": step}, step, metrics={"loss": step / 2})
        found = list(ckptlib.checkpoints(root.url))
        assert [(info.step, info.metrics["loss"], info.world_size) for info in found] == [
            (0, 0, 1),
            (7, 3.5, 1),
            (30, 15, 1),
        ]
        assert ckptlib.load(root.url, target).step == 30
        assert ckptlib.load(root.url, target, 7).step == 7
        assert ckptlib.load(root.url, target, found[0].name).step == target["a"] == 0
        with pytest.raises(CheckpointNotFound, match="no step 8; the last ones are: 0, 7, 30"):
            ckptlib.load(root.url, target, 8)
        assert target == {"a": 0}


def test_a_job_that_goes_back_leaves_the_later_steps_behind(tmp_path: Path) -> None:
    """In one process: the latest step is the one that was saved last, and not the one of the highest number."""
    with opened(tmp_path) as root:
        for step in (10, 20, 30):
            ckptlib.save(root.url, {"a": step}, step)
        with pytest.raises(ValueError, match=r"step 15 was saved already .* or comes before step 30, which was"):
            ckptlib.save(root.url, {"a": 15}, 15)
        target = {"a": 0}
        ckptlib.load(root.url, target, 10)
        ckptlib.save(root.url, {"a": 16}, 15)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 15]
        ckptlib.save(root.url, {"a": 21}, 20)
        assert (ckptlib.load(root.url, target).step, target["a"]) == (20, 21)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 15, 20]
        with pytest.raises(ValueError, match="or comes before step 20"):
            ckptlib.save(root.url, {"a": 15}, 15)


def test_to_look_at_an_older_step_is_not_to_go_back(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        for step in (10, 20, 30):
            ckptlib.save(root.url, {"a": step}, step)
        ckptlib.load(root.url, {"a": 0}, 10)
        ckptlib.save(root.url, {"a": 40}, 40)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 20, 30, 40]


def test_a_step_is_saved_once_and_refused_states_leave_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        root.save({"a": 1})
        with pytest.raises(ValueError, match="step 1 was saved already"):
            ckptlib.save(root.url, {"a": 2}, 1)
        with pytest.raises(ValueError, match="between 0 and"):
            ckptlib.save(root.url, {"a": 2}, -1)
        with pytest.raises(TypeError, match="a dict of what is to be saved"):
            ckptlib.save(root.url, [1, 2], 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ckptlib's own name"):
            ckptlib.save(root.url, {"@rng": 2}, 2)
        with pytest.raises(UnsupportedState, match="f: cannot save"):
            ckptlib.save(root.url, {"a": torch.ones(2), "f": lambda: 0}, 2)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [1]
        root.save({"a": 2})
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [1, 2]


@pytest.mark.parametrize("step", [1.0, float("nan"), "3", None, [1]])
def test_a_step_is_an_int(tmp_path: Path, step: Any) -> None:
    told = rf"step={re.escape(repr(step))}: expected a whole number, not a {type(step).__name__}"
    with opened(tmp_path) as root:
        for save in (ckptlib.save, ckptlib.save_async):
            with pytest.raises(TypeError, match=told):
                save(root.url, {"a": 2}, step)
        with ckptlib.Checkpointer(root.url, {"a": 2}, every=1) as ckpt:
            for call in (ckpt.after_step, ckpt.save):
                with pytest.raises(TypeError, match=told):
                    call(step)
        assert list(ckptlib.checkpoints(root.url)) == []
        root.save({"a": 2})
        with pytest.raises(CheckpointNotFound if isinstance(step, str) else TypeError):
            ckptlib.load(root.url, {"a": 2}, step)


def test_a_failed_save_says_so_and_is_not_listed(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text('[{"op": "commit", "key": "packs/0{11}2-", "action": "full"}]')
    url = f"fault+file://{tmp_path}/root?plan={plan}"
    root = Root(tmp_path / "root")
    root.url = url
    try:
        root.save({"a": torch.ones(3)})
        pending = ckptlib.save_async(url, {"a": torch.ones(3)}, 2)
        with pytest.raises(SaveFailed, match="no space"):
            pending.wait_committed(60)
        with pytest.raises(SaveFailed):
            pending.wait_committed(60)
        assert not pending.committed
        ckptlib.save(url, {"a": torch.ones(3)}, 3)
        assert [info.step for info in ckptlib.checkpoints(url)] == [1, 3]
    finally:
        root.close()


def test_altered_bytes_name_their_tensor(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        root.save({"model": {"w": torch.randn(300, 1031), "b": torch.randn(7)}})
        part, layout = root.saved()
        table = part.table
        for name in ("model/w", "model/b"):
            shard = next(s for s, t in enumerate(table.tensors) if layout.tensors[t].name == name)
            chunk = table.first_chunks[shard]
            path = root.path / part.packs[table.packs[chunk]].key
            flip_bit(path, table.offsets[chunk] + table.nbytes[chunk] // 2)
            with pytest.raises(CorruptData, match=rf"{name}\[0:\d+.*{part.packs[0].key}.*does not match"):
                root.load({"model": {"w": torch.zeros(300, 1031), "b": torch.zeros(7)}})
            flip_bit(path, table.offsets[chunk] + table.nbytes[chunk] // 2)
        root.load({"model": {"w": torch.zeros(300, 1031), "b": torch.zeros(7)}})


@pytest.mark.parametrize("quick", [True, False])
def test_garbage_is_collected_again_after_a_load_and_during_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    saved = {"a": torch.randn(1000), "b": torch.randn(9)}
    nbytes = sum(tensor.nbytes for tensor in saved.values())
    monkeypatch.setattr(checkpoint, "QUICK_BYTES", nbytes if quick else nbytes - 1)
    read_into, seen = Committed.read_into, {}

    def read(source: Committed, pack: str, offset: int, buffer: memoryview) -> None:
        seen["read"] = gc.isenabled()
        read_into(source, pack, offset, buffer)

    def name(path: str) -> str:
        seen["plan"] = gc.isenabled()
        return path

    monkeypatch.setattr(Committed, "read_into", read)
    with opened(tmp_path) as root:
        root.save(saved)
        root.load({"a": torch.zeros(1000), "b": torch.zeros(9)}, map=name)
        assert seen == {"plan": False, "read": not quick}
        assert gc.isenabled()
        with pytest.raises(StateMismatch):
            root.load({"a": torch.zeros(1001)}, map=name)
        assert gc.isenabled()
        gc.disable()
        try:
            root.load({"a": torch.zeros(1000), "b": torch.zeros(9)}, map=name)
            assert seen == {"plan": False, "read": False}
            assert not gc.isenabled()
        finally:
            gc.enable()
