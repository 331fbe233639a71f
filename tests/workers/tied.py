"""Ties, boxes and meshes that not all ranks have alike: cases for `anystate.py`, on four ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptlib
from ckptlib.errors import SaveFailed, UnsupportedState

ALONE = ("tied_on_one_rank", "an_own_tensor_that_appears")
"""Those with a Checkpointer, which has a root of its own."""

WHOLE = torch.arange(24.0).view(8, 3)


def rank() -> int:
    return dist.get_rank()


def placed(mesh: DeviceMesh, *placements: object, value: torch.Tensor = WHOLE) -> DTensor:
    return distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)


STEPS = itertools.count(1)


def save(url: Path, state: Mapping[str, object]) -> int:
    """As the next step of a root that the cases share, since each more has a writer for each rank."""
    step = next(STEPS)
    ckptlib.save(url, state, step)
    return step


def loaded(url: Path, *names: str) -> list[torch.Tensor]:
    """The newest step's, as a whole, under each of the names."""
    target = {str(i): torch.zeros_like(WHOLE) for i in range(len(names))}
    ckptlib.load(url, target, strict=False, map={str(i): name for i, name in enumerate(names)})
    return list(target.values())


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left, right)


def tied_on_a_sub_mesh(url: Path) -> None:
    """The ranks outside have neither of its names."""
    for ranks in ([0], [1, 2]):
        tensor = placed(DeviceMesh("cpu", ranks), Shard(0))
        model = nn.Module()
        model.embed, model.head = nn.Embedding(8, 3), nn.Linear(3, 8, bias=False)
        model.embed.weight = model.head.weight = nn.Parameter(tensor)
        save(url, {"a": tensor, "b": tensor, "m": model})
        expected = tensor.to_local().clone()
        with torch.no_grad():
            tensor.to_local().zero_()
        ckptlib.load(url, {"a": tensor, "b": tensor, "m": model})
        assert equal(tensor.to_local(), expected)
        assert all(equal(found, WHOLE) for found in loaded(url, "a", "b", "m/embed.weight", "m/head.weight"))


class Sharding:
    """Its state is a DTensor that is made anew whenever it is asked for, and is gone soon after."""

    def __init__(self, mesh: DeviceMesh, value: float) -> None:
        self.mesh, self.value = mesh, value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"p": placed(self.mesh, Replicate(), value=torch.full((4,), self.value))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["p"].to_local()[0].item() if state["p"].to_local().numel() else -1.0


def tensors_that_are_gone_soon(url: Path) -> None:
    """One outside of this rank's mesh, then one inside that may get the id of the first."""
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [2, 3])]
    save(url, {str(i): Sharding(meshes[i % 3], float(i)) for i in range(30)})
    target = {f"t{i}": torch.zeros(4) for i in range(30)}
    ckptlib.load(url, target, map={f"t{i}": f"{i}/p" for i in range(30)}, strict=False)
    assert [int(tensor[0]) for tensor in target.values()] == [*range(30)]


def tied_on_one_rank(url: Path) -> None:
    """`best = last if rank == 0`, by the Checkpointer."""
    for alike in (False, True):
        last = torch.full((2,), 1.0 if alike else 1.0 + rank())
        state = {"last": last, "best": last if rank() == 0 else torch.full((2,), 9.0)}
        expected = {name: tensor.clone() for name, tensor in state.items()}
        root = url / f"{alike}"
        with ckptlib.Checkpointer(root, state, every=1) as ckpt:
            for step in range(1, 4):
                ckpt.after_step(step)
                ckpt.save(step).wait_committed(60)
        for tensor in state.values():
            tensor.zero_()
        assert ckptlib.load(root, state).step == 3
        assert all(equal(state[name], tensor) for name, tensor in expected.items()), state


def halo(value: torch.Tensor) -> ckptlib.Sharded:
    low, high = max(2 * rank() - 1, 0), min(2 * rank() + 3, 8)
    return ckptlib.Sharded(value[low:high].clone(), (low, 0), (8, 3))


def boxes_with_halos(url: Path) -> None:
    large = torch.arange(8 * 3e5).view(8, -1)
    low, high = max(2 * rank() - 1, 0), min(2 * rank() + 3, 8)
    state = {
        "x": halo(WHOLE),
        "y": ckptlib.Sharded(WHOLE.clone(), (0, 0), (8, 3)),
        "z": ckptlib.Sharded(large[low:high].clone(), (low, 0), tuple(large.shape)),
    }
    expected = {name: held.tensor.clone() for name, held in state.items()}
    step = save(url, state)
    nbytes = sum(path.stat().st_size for path in (url / "packs").glob(f"{step:012}-*/*.safetensors"))
    assert nbytes < 1.1 * large.nbytes, "what several ranks hold is written once"
    for held in state.values():
        held.tensor.zero_()
    ckptlib.load(url, state)
    assert all(equal(state[name].tensor, tensor) for name, tensor in expected.items())
    assert all(equal(found, WHOLE) for found in loaded(url, "x", "y"))


def boxes_that_differ(url: Path) -> None:
    before = [info.step for info in ckptlib.checkpoints(url)][-1:]
    for state, where in (
        ({"x": halo(WHOLE + rank())}, r"ranks 0 and 1 both hold x\[1:3, 0:3\]"),
        ({"x": ckptlib.Sharded(WHOLE + (rank() == 2), (0, 0), (8, 3))}, r"ranks 0 and 2 both hold x\[0:8, 0:3\]"),
    ):
        with pytest.raises(UnsupportedState, match=where):
            save(url, state)
    assert [info.step for info in ckptlib.checkpoints(url)][-1:] == before


def boxes_that_move(url: Path) -> None:
    """Their shapes, and all else, stay as they were."""
    for turn in (0, 1, 3):
        at = 2 * ((rank() + turn) % 4)
        save(url, {"x": ckptlib.Sharded(WHOLE[at : at + 2].clone(), (at, 0), (8, 3))})
        assert all(equal(found, WHOLE) for found in loaded(url, "x"))


def half_of_the_replicas(url: Path) -> None:
    """As optimizer state that the experts of one replica have before those of the other."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
    tensor = placed(mesh, Replicate(), Shard(0))
    names = [f"t{i}" for i in range(6)]
    made = [tensor * 1 for _ in names]
    if rank() < 2:
        made.clear()
    save(url, {"z": torch.ones(1), **dict(zip(names, made, strict=False))})
    assert all(equal(found, WHOLE) for found in loaded(url, *names))


def an_own_tensor_that_appears(url: Path) -> None:
    """Between two comparisons: no step exists that has it and that ranks did not compare before."""
    state: dict[str, torch.Tensor] = {"w": torch.ones(3)}
    with ckptlib.Checkpointer(url, state, every=1) as ckpt:
        for step in range(1, 6):
            if step == 3:
                state["count"] = torch.full((2,), float(rank()))
            ckpt.after_step(step)
            with suppress(SaveFailed):
                ckpt.save(step).wait_committed(60)
        ckpt.save(6).wait_committed(60)
    for info in ckptlib.checkpoints(url):
        target = {"w": torch.zeros(3), "count": torch.full((2,), -1.0)}
        ckptlib.load(url, target, info.step, strict=info.step >= 3)
        assert target["count"].tolist() == [rank() if info.step >= 3 else -1] * 2


class Pair(torch.Tensor):
    """A subclass that is made of two tensors."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: object, size: object, stride: object
    ) -> Pair:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple[Pair, ...], kwargs: object = None) -> Pair:
        return cls(args[0].codes, args[0].scale)  # a view, for DTensor


def pair(value: int) -> Pair:
    return Pair(torch.full((2, 3), value, dtype=torch.int8), torch.full((1,), value / 2))


def shards_made_of_others(url: Path) -> None:
    """On all ranks, and on two of them; beside replicas of one, and one that each rank has for itself."""
    for ranks in ([0, 1, 2, 3], [1, 2]):
        mesh = DeviceMesh("cpu", ranks)

        def sharded(mesh: DeviceMesh, local: Pair, *placement: object) -> DTensor:
            return DTensor.from_local(local, mesh, placement or [Shard(0)], run_check=False)

        def made(mesh: DeviceMesh, own: int, alike: int) -> tuple[list[Pair], dict[str, torch.Tensor]]:
            locals_ = [pair(own), pair(own + 10), pair(alike)]
            return locals_, {"x": sharded(mesh, locals_[0]), "own": locals_[1], "alike": locals_[2]}

        def values(pairs: list[Pair]) -> list[tuple[int, float]]:
            return [(int(p.codes[1, 2]), float(p.scale[0])) for p in pairs]

        save(url, made(mesh, 1 + rank(), 7)[1])
        target, state = made(mesh, 0, 0)
        ckptlib.load(url, state)
        expected = [1 + rank() if rank() in ranks else 0, 11 + rank(), 7]
        assert values(target) == [(n, n / 2) for n in expected]
        if ranks == [0, 1, 2, 3]:
            turned = DeviceMesh("cpu", ranks[::-1])
            for other in (sharded(turned, pair(0)), sharded(mesh, pair(0), Replicate())):
                with pytest.raises(ckptlib.StateMismatch):
                    ckptlib.load(url, {"x": other}, only="x")


CASES = [
    shards_made_of_others,
    tied_on_a_sub_mesh,
    tensors_that_are_gone_soon,
    boxes_with_halos,
    boxes_that_differ,
    boxes_that_move,
    half_of_the_replicas,
    tied_on_one_rank,
    an_own_tensor_that_appears,
]
