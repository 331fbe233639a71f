"""A checkpoint with lossy moments: only these are rounded, within the bound, and it resumes, verifies and is reused."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store
from ckptlib.verify import verify_save

State = dict[str, object]


def made(seed: int) -> State:
    """Large enough that tensors have chunks of their own."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(700, 700)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), amsgrad=True)}


def train(state: State, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = state["model"](torch.randn(8, 700)).square().mean()  # type: ignore[operator]
        loss.backward()
        state["optim"].step()  # type: ignore[attr-defined]


def moments(state: State) -> dict[str, torch.Tensor]:
    weight = state["model"].weight  # type: ignore[attr-defined]
    found: dict[str, torch.Tensor] = state["optim"].state[weight]  # type: ignore[attr-defined]
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error, relative to the largest value in its block of 256. Chunks are multiples of a block."""
    pairs = zip(found.double().flatten().split(256), wanted.double().flatten().split(256), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("lossy", "bounds"),
    [
        (ckptlib.Lossy(bits=8), {"exp_avg": 0.004, "exp_avg_sq": 0.042, "max_exp_avg_sq": 0.042}),
        (ckptlib.Lossy("bfloat16"), dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 0.004)),
    ],
)
def test_moments_alone_are_rounded(tmp_path: Path, lossy: ckptlib.Lossy, bounds: dict[str, float]) -> None:
    state, loaded, again = made(0), made(1), made(2)
    with ckptlib.Checkpointer(tmp_path, state, every=ckptlib.Steps(1000), codec={"**": lossy}) as ckpt:
        ckpt.restore()
        train(state, 3)
        ckpt.save(1).wait_committed()
        wanted = copy.deepcopy(state)
        ckpt.save(2).wait_committed()
    train(loaded, 1)
    report = ckptlib.load(tmp_path, loaded, step=1)
    assert {name.rpartition("/")[2] for name in report.rounded} == bounds.keys()
    assert all(0 < bound < 0.05 for bound in report.rounded.values())
    assert "saved rounded" in str(report)
    assert same(loaded["model"].weight, wanted["model"].weight)  # type: ignore[attr-defined]
    assert moments(loaded)["step"] == 3
    for kind, bound in bounds.items():
        found, exact = moments(loaded)[kind], moments(wanted)[kind]
        assert not same(found, exact)
        assert off(found, exact) <= bound
        if kind != "exp_avg":
            assert bool(((found > 0) == (exact > 0)).all())
    train(again, 1)
    ckptlib.load(tmp_path, again, step=2)
    assert all(same(moments(again)[kind], moments(loaded)[kind]) for kind in bounds)

    catalog = Catalog(open_store(str(tmp_path), {}))
    first, second = (catalog.part(catalog.manifest(save).parts[0]) for save in sorted(catalog.saves()))
    assert {coding.codec for coding in first.codings.values() if coding.loss} >= {
        lossy.codec("**", kind) for kind in bounds
    }
    assert second.nbytes_put < first.nbytes_put / 100, "what has not changed is not stored again, lossy or not"
    assert not [finding for save in catalog.saves() for finding in verify_save(catalog, save)]


def test_weights_are_not_rounded_unless_named_in_full(tmp_path: Path) -> None:
    state, loaded = made(0), made(1)
    half = ckptlib.Lossy("bfloat16")
    for name, rounded in (("model", False), ("model/*", False), ("model/weight", True)):
        root = tmp_path / name.replace("/", "-").replace("*", "all")
        with ckptlib.Checkpointer(root, {"model": state["model"]}, every=ckptlib.Steps(9), codec={name: half}) as ckpt:
            ckpt.restore()
            ckpt.save(1).wait_committed()
        ckptlib.load(root, {"model": loaded["model"]}, step=1)
        weights = [each["model"].weight.detach() for each in (loaded, state)]  # type: ignore[attr-defined]
        assert same(*weights) != rounded
        if rounded:
            assert same(weights[0], weights[1].bfloat16().float())


@pytest.mark.parametrize(("codec", "rounds"), [("raw", False), ({"*": ckptlib.Lossy("bfloat16")}, False), (None, True)])
def test_what_is_asked_for_now_counts_for_what_was_rounded_before(tmp_path: Path, codec: object, rounds: bool) -> None:
    """The job goes on from memory, where nothing was rounded, with tensors that have not changed since."""
    state: State = {"frozen": torch.randn(300, 300), "step": torch.zeros(())}
    expected = state["frozen"].clone()  # type: ignore[attr-defined]
    before = {"frozen": ckptlib.Lossy("bfloat16")}
    options = {"every": 1, "peers": ckptlib.Peers(copies=0), "arena": tmp_path}
    root = tmp_path / "root"
    with suppress(KeyError), ckptlib.Checkpointer(root, state, codec=before, **options) as ckpt:  # type: ignore[arg-type]
        ckpt.after_step(1)
        ckpt.save(1).wait_committed(150)
        raise KeyError("the trainer's own trouble")
    assert not same(read(root, 1), expected)
    state["frozen"].zero_()  # type: ignore[attr-defined]
    with ckptlib.Checkpointer(root, state, codec=codec or before, **options) as ckpt:  # type: ignore[arg-type]
        assert ckpt.restore().in_memory
        assert same(state["frozen"], expected)  # type: ignore[arg-type]
        ckpt.after_step(2)
        ckpt.save(2).wait_committed(150)
    assert same(read(root, 2), expected) is not rounds
    with open_store(str(root)) as store:
        catalog = Catalog(store)
        part = catalog.part(catalog.manifest(catalog.saves()[-1]).parts[0])
    assert (part.nbytes_put < expected.nbytes // 2) is rounds, "written again where it must be, and only there"


def read(root: Path, step: int) -> torch.Tensor:
    found = torch.zeros(300, 300)
    ckptlib.load(root, {"frozen": found}, step, strict=False)
    return found
