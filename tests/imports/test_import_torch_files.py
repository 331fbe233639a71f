"""Files of torch.save, as steps: bit for bit what torch.load gives, in any dtype and form."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from launch import fork_ranks
from sources import WRITTEN, assert_same_state, read, refuses, same, whole
from torch import nn
from typing_extensions import override

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.imports.unfinished import SOURCE
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import write_plan


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight

    @override
    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.inner(self.wte(tokens))))


def job(seed: int, num_steps: int) -> tuple[Tied, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(seed)
    model = Tied()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(num_steps):
        model(torch.arange(5)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    by_id = {id(param): f"model/{name}" for name, param in model.named_parameters()}
    return [by_id[id(param)] for group in optimizer.param_groups for param in group["params"]]


def test_a_script_goes_on(tmp_path: Path) -> None:
    model, optimizer, schedule = job(0, 3)
    saved: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "iter_num": 3,
        "config": {"lr": 0.1},
    }
    torch.save(saved, tmp_path / "ckpt.pt")
    params = {"optimizer": names_of(model, optimizer)}
    report = ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "root", step=3, params=params, scratch=tmp_path)
    assert (report.kind, report.step, report.notes) == ("torch.save", 3, ())
    assert report.aliases == {"model/head.weight": "model/wte.weight"}

    other, fresh, later = job(1, 0)
    state: dict[str, object] = {"model": other, "optimizer": fresh, "schedule": later, "iter_num": 0}
    loaded = ckptlib.load(tmp_path / "root", state, strict=False)
    assert loaded.missing == ()
    assert loaded.unexpected == ("config",)
    assert state["iter_num"] == 3
    assert_same_state(saved["model"], other.state_dict())
    assert_same_state(saved["optimizer"]["state"], fresh.state_dict()["state"])
    assert saved["optimizer"]["param_groups"] == fresh.state_dict()["param_groups"]
    assert saved["schedule"] == later.state_dict()
    assert not list(tmp_path.glob("ckptlib-*")), "the copy in scratch is gone"


def test_an_optimizer_without_names_is_loaded_alone(tmp_path: Path) -> None:
    model, optimizer, _ = job(0, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    report = ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "root")
    assert any("only positions" in note for note in report.notes)
    other, fresh, _ = job(1, 0)
    ckptlib.load(tmp_path / "root", {"model": other}, only="model")
    ckptlib.load(tmp_path / "root", {"optimizer": fresh}, strict=False)
    assert_same_state(model.state_dict(), other.state_dict())
    assert_same_state(optimizer.state_dict()["state"], fresh.state_dict()["state"])


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    model, optimizer, _ = job(0, 1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    names = names_of(model, optimizer)
    for wrong, match in ((names[::-1], "order"), (names[:-1], "names 4"), (["x", *names[1:]], "does not have")):
        with pytest.raises(ckptlib.CkptError, match=match):
            ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "root", params={"optimizer": wrong})


def test_every_dtype_and_form(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    values = {
        **{str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES},
        "nan": torch.tensor([float("nan"), -0.0]),
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "same": base,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    torch.save(values, tmp_path / "all.pt")
    foreign = read(tmp_path / "all.pt")
    found = whole(foreign)
    assert found.keys() == {f"model/{name}" for name in values}
    for name, tensor in values.items():
        assert same(found[f"model/{name}"], tensor), name
    ckptlib.convert(tmp_path / "all.pt", tmp_path / "root")
    targets = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in values.items()}
    ckptlib.load(tmp_path / "root", {"model": targets})
    for name, tensor in values.items():
        assert same(targets[name], tensor), name


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint64),
]


def test_conjugates_and_negatives_that_share_memory(tmp_path: Path) -> None:
    """torch notes a bit for each, beside the memory of what it was made of."""
    base, other = torch.randn(2, 3, 4, dtype=torch.complex64)
    base, other = base.clone(), other.clone()  # torch saves no memory as elements of two types
    values = {"x": base, "conj": base.conj(), "imag": other.conj().imag, "strided": other.conj().imag[1:].t()}
    torch.save(values, tmp_path / "bits.pt")
    found = whole(read(tmp_path / "bits.pt"))
    for name, tensor in values.items():
        assert same(found[f"model/{name}"], tensor.resolve_conj().resolve_neg()), name


def test_properties_of_a_tensor_that_are_unknown(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, dtype=torch.complex64).conj(), "n": 1}, tmp_path / "bits.pt")
    data = (tmp_path / "bits.pt").read_bytes()
    assert data.count(b"conj") == 1
    (tmp_path / "bits.pt").write_bytes(data.replace(b"conj", b"bits"))
    refuses(tmp_path / "bits.pt", tmp_path / "root", "unknown properties: .*bits")


class Colour(enum.Enum):
    RED, BLUE = 1, 2


def test_keys_that_are_objects_stop_an_import(tmp_path: Path) -> None:
    """All seemed to be the same key, so that one of their tensors came and the others did not."""
    torch.save({"ema": {Colour.RED: torch.ones(2), Colour.BLUE: torch.zeros(2)}, "n": 1}, tmp_path / "keys.pt")
    refuses(tmp_path / "keys.pt", tmp_path / "root", "ema/a key")
    report = ckptlib.convert(tmp_path / "keys.pt", tmp_path / "skipped", skip="ema")
    assert (report.tensors, report.values) == (0, 1)


ONE_AND_TWO = {Colour.RED: torch.ones(2), Colour.BLUE: torch.zeros(2)}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({(key, 1): tensor for key, tensor in ONE_AND_TWO.items()}, "ema/a key/0"),
        ({"state": {0: ONE_AND_TWO}, "param_groups": [{"params": [0]}]}, "ema/@0.0/a key"),
        ({"state": {0: {"GG": ONE_AND_TWO}}, "param_groups": [{"params": [0]}]}, "ema/@0.0/GG/a key"),
        ({"state": {}, "param_groups": [{"params": [0], **ONE_AND_TWO}]}, "ema/@group.0/a key"),
    ],
    ids=["in a tuple", "optimizer", "dict in an optimizer", "group"],
)
def test_keys_that_are_objects_wherever_they_are(tmp_path: Path, values: dict[object, object], named: str) -> None:
    torch.save({"ema": values, "n": 1}, tmp_path / "keys.pt")
    refuses(tmp_path / "keys.pt", tmp_path / "root", f"^{named} ")
    report = ckptlib.convert(tmp_path / "keys.pt", tmp_path / "skipped", skip="ema")
    assert (report.tensors, report.values) == (0, 1)


@pytest.mark.parametrize("values", [ONE_AND_TWO, dict.fromkeys(ONE_AND_TWO, 1), {Colour.RED: {"w": torch.ones(2)}}])
def test_keys_that_are_objects_at_the_top(tmp_path: Path, values: dict[object, object]) -> None:
    torch.save({**values, "m": {"w": torch.ones(1)}}, tmp_path / "keys.pt")
    refuses(tmp_path / "keys.pt", tmp_path / "root", "^a key ")
    assert ckptlib.convert(tmp_path / "keys.pt", tmp_path / "skipped", skip="a key").tensors == 1


def test_keys_that_are_numbers_of_numpy_or_dtypes(tmp_path: Path) -> None:
    """They are named as in a save of ckptlib's own."""
    state = {"ema": {torch.float32: torch.ones(2), np.int64(3): torch.zeros(2)}, "plain": {np.int64(4): 1}}
    torch.save(state, tmp_path / "keys.pt")
    ckptlib.convert(tmp_path / "keys.pt", tmp_path / "root")
    ckptlib.save(tmp_path / "own", state, 1)
    for root in (tmp_path / "root", tmp_path / "own"):
        found = ckptlib.read(root, only=["ema", "plain"])
        assert_same_state({"torch.float32": torch.ones(2), "3": torch.zeros(2)}, found["ema"])
        assert found["plain"] == {4: 1}


def test_an_optimizer_whose_state_has_lists_of_tensors(tmp_path: Path) -> None:
    def made(seed: int, num_steps: int) -> tuple[nn.Module, torch.optim.LBFGS]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        step(model, optimizer, num_steps)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.LBFGS, num_steps: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        for _ in range(num_steps):
            optimizer.step(closure)

    model, optimizer = made(0, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 1}, tmp_path / "lbfgs.pt")
    names = [f"model/{name}" for name, _ in model.named_parameters()]
    ckptlib.convert(tmp_path / "lbfgs.pt", tmp_path / "root", params={"optimizer": names})
    other, fresh = made(1, 0)
    ckptlib.load(tmp_path / "root", {"model": other, "optimizer": fresh, "n": 0})
    (theirs,), (mine,) = optimizer.state.values(), fresh.state.values()
    assert len(theirs["old_dirs"]) > 1
    for key, value in theirs.items():
        several = value if isinstance(value, list) else [value]
        found = mine[key] if isinstance(value, list) else [mine[key]]
        for a, b in zip(several, found, strict=True):
            assert same(a, b) if isinstance(a, torch.Tensor) else a == b, key
    for pair in ((model, optimizer), (other, fresh)):
        step(*pair, 2)
    assert_same_state(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_keep_their_types(tmp_path: Path, protocol: int) -> None:
    plain = {
        "none": None,
        "big": 2**70,
        "float": 0.1,
        "nan": np.float64("inf"),
        "bytes": b"\xff\0",
        "no bytes": b"",
        "complex": 1 - 2j,
        "text": "a\u00e4",
        "set": {1, 2},
        "frozen": frozenset({1, 2}),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "array": np.arange(6).reshape(2, 3),
        "empty array": np.zeros((0, 2), np.float32),
        "nested": {"a": [1, (2, 3)], 4: "int key"},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "empty counter": Counter(),
    }
    saved = {"t": torch.ones(1), **plain, "default": defaultdict(int, a=1)}
    torch.save(saved, tmp_path / "values.pt", pickle_protocol=protocol)
    ckptlib.convert(tmp_path / "values.pt", tmp_path / "root")
    state = dict.fromkeys((*plain, "default"), 0) | {"t": torch.zeros(1)}
    ckptlib.load(tmp_path / "root", state)
    for name, value in plain.items():
        assert type(state[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert state[name].dtype == value.dtype
            assert state[name].shape == value.shape
        assert np.array_equal(state[name], value) if "array" in name else state[name] == value, name
    assert state["default"] == {"a": 1}


def test_names_that_a_wrapper_gave(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "ckpt.pt")
    report = ckptlib.convert(tmp_path / "ckpt.pt", tmp_path / "root")
    assert "_orig_mod.module." in report.notes[0]
    other = nn.Linear(3, 2)
    ckptlib.load(tmp_path / "root", {"model": other})
    assert_same_state(model.state_dict(), other.state_dict())


def test_only_and_skip(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict(), "x": 1}, tmp_path / "c.pt")
    report = ckptlib.convert(tmp_path / "c.pt", tmp_path / "root", only="model", skip="*/bias")
    assert report.tensors == 1
    assert report.left_out == ("ema/bias", "ema/weight", "model/bias", "x")
    report = ckptlib.convert(tmp_path / "c.pt", tmp_path / "all", only=None)
    assert report.left_out == (), "as every load has it"
    with pytest.raises(TypeError, match=r"skip=<.*: expected names or patterns"):
        ckptlib.convert(tmp_path / "c.pt", tmp_path / "other", skip=iter(["model", "x"]))  # type: ignore[arg-type]


def test_names_in_another_order_are_the_same_import(tmp_path: Path) -> None:
    """A set of them has another order in each process; a killed import is to go on all the same."""
    torch.save({"model": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict()}, tmp_path / "c.pt")
    found = set()
    for name, only in (("a", ["model", "ema"]), ("b", ["ema", "model"]), ("c", {"model", "ema"})):
        ckptlib.convert(tmp_path / "c.pt", tmp_path / name, only=only)
        catalog = Catalog(LocalStore(str(tmp_path / name)))
        found.add(catalog.generations.record(catalog.saves()[0].generation).tags[SOURCE])
    assert len(found) == 1


def test_a_later_step_of_a_run_is_not_imported_behind_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "c.pt")
    ckptlib.convert(tmp_path / "c.pt", tmp_path / "root", step=5)
    with pytest.raises(ckptlib.StateError, match="has step 5 already"):
        ckptlib.convert(tmp_path / "c.pt", tmp_path / "root", step=4)
    ckptlib.convert(tmp_path / "c.pt", tmp_path / "root", step=5)  # the same again: compared, not written
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "c.pt")
    with pytest.raises(ckptlib.CorruptData, match="is not what the source has"):
        ckptlib.convert(tmp_path / "c.pt", tmp_path / "root", step=5)
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [5]


def test_what_cannot_be_read_back_is_not_left_as_a_step(tmp_path: Path) -> None:
    """The store gives other bytes than it was given; what it listed by then is taken off the list."""
    source, plan, root = tmp_path / "c.pt", tmp_path / "plan.json", tmp_path / "root"
    torch.save(nn.Linear(200, 200).state_dict(), source)
    write_plan(plan, [{"op": "write", "key": "^packs/", "action": "flip"}])
    url = f"fault+file://{root}?plan={quote(str(plan))}"
    with pytest.raises(ckptlib.CorruptData):
        ckptlib.convert(source, url, step=5)
    assert not [*(root / "steps").glob("*.json")]
    assert [*(root / "packs").rglob("*")], "it was put"
    assert ckptlib.convert(source, root, step=5).step == 5
    assert [info.step for info in ckptlib.checkpoints(root)] == [5]


def test_checkfreq(tmp_path: Path) -> None:
    """As its manager writes a `.chk`: what it tracks by the caller's names, and further state beside."""
    model, optimizer, _ = job(1, 2)
    tracked = OrderedDict(model=model.state_dict(), optim=optimizer.state_dict())
    torch.save(OrderedDict(**tracked, epoch=1, iter=300), tmp_path / "300.chk")
    other, fresh, _ = job(2, 1)
    names = names_of(model, optimizer)
    ckptlib.convert(tmp_path / "300.chk", tmp_path / "root", params={"optim": names})
    ckptlib.load(tmp_path / "root", {"model": other, "optim": fresh}, only=["model", "optim"])
    assert_same_state(model.state_dict(), other.state_dict())
    assert_same_state(optimizer.state_dict()["state"], fresh.state_dict()["state"])


def test_lightning(tmp_path: Path) -> None:
    """Written by Lightning 2.6.6."""
    path = WRITTEN / "lightning-2.6.6.ckpt"
    truth = torch.load(path, weights_only=False)
    report = ckptlib.convert(path, tmp_path / "root", params={"optimizer": ["model/net.weight", "model/net.bias"]})
    assert (report.kind, report.step) == ("Lightning", truth["global_step"])
    net = nn.Module()
    net.net = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": net, "optimizer": optimizer, "scheduler": schedule, "epoch": 0}
    ckptlib.load(tmp_path / "root", state, strict=False)
    assert_same_state(truth["state_dict"], net.state_dict())
    assert_same_state(truth["optimizer_states"][0]["state"], optimizer.state_dict()["state"])
    assert truth["lr_schedulers"][0] == schedule.state_dict()
    assert state["epoch"] == truth["epoch"]


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_an_entry_of_the_users_own_in_a_checkpoint_of_lightning(tmp_path: Path, name: str) -> None:
    """It took the place of what Lightning saved, or lost its own."""
    state = torch.load(WRITTEN / "lightning-2.6.6.ckpt", weights_only=False)
    torch.save({**state, name: {"mine": torch.ones(1)}}, tmp_path / "user.ckpt")
    refuses(tmp_path / "user.ckpt", tmp_path / "root", f"an entry '{name}' of its own")


def test_files_before_torch_1_6_are_refused_with_the_way_round(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refuses(tmp_path / "old.pt", tmp_path / "root", r"torch\.load\(\.\.\., weights_only=True\)")


def test_a_file_without_a_single_element(tmp_path: Path) -> None:
    torch.save({"config": {"lr": 0.1}, "empty": torch.empty(0, 3)}, tmp_path / "x.pt")
    report = ckptlib.convert(tmp_path / "x.pt", tmp_path / "root", scratch=tmp_path)
    assert (report.tensors, report.nbytes, report.values) == (1, 0, 1)
    found = ckptlib.read(tmp_path / "root")
    assert found["config"] == {"lr": 0.1}
    assert same(found["empty"], torch.empty(0, 3))


def test_one_rank_of_a_job_imports_alone(tmp_path: Path) -> None:
    fork_ranks(str(Path(__file__).parent / "convert_ranks.py"), 2, tmp_path, timeout_s=120)
