"""Four ranks with optimizer state that stands beside its parameter: nested, of other shapes, sharded with it or whole.

The oracle is the whole of each tensor, made of its name. What is loaded is compared with what the optimizer itself has
in that layout, cut by torch.
"""

from __future__ import annotations

import resource
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from workers.rank_cases import committed, rank, run_cases

import ckptlib
from ckptlib.errors import ReplicasDiffer, StateMismatch, UnsupportedState

SHAPES = {"matrix": (5, 3), "square": (4, 4), "bias": (5,)}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: dict[str, tuple[int, tuple[int, ...], tuple[Placement, ...]]] = {
    "whole": (1, (), ()),
    "fsdp-1": (1, (1,), (S0,)),
    "fsdp-2": (2, (2,), (S0,)),
    "fsdp-3": (3, (3,), (S0,)),
    "hsdp-4": (4, (2, 2), (R, S0)),
    "fsdp+tp-4": (4, (2, 2), (S0, S1)),
}
"""Ranks, mesh, placements; `whole` has plain tensors."""


GROUPS: list[dist.ProcessGroup] = []
MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def make_groups() -> None:
    """By all ranks, members or not, as torch demands."""
    if not GROUPS:
        GROUPS.extend(dist.new_group([*range(n)]) for n in range(1, 5))
        for shape in [(1,), (2,), (3,), (4,), (2, 2)]:
            MESHES[shape] = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))


def whole(shape: Sequence[int], *name: object) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(repr(name).encode())))


class Keeping(torch.optim.Optimizer):
    """Keeps whatever it is given."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__(params.items(), {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        pass


class Job:
    """Parameters in a layout, and an optimizer with no state yet."""

    def __init__(self, layout: str, seed: str) -> None:
        self.seed = seed
        self.size, mesh, self.placements = LAYOUTS[layout]
        self.mesh = MESHES.get(mesh)
        self.params = {
            name: nn.Parameter(self.beside(name, shape, {0: 0, 1: 1}, "param")) for name, shape in SHAPES.items()
        }
        self.optim = Keeping(self.params)

    @property
    def state(self) -> dict[str, object]:
        return {"params": self.params, "optim": self.optim}

    def beside(self, name: str, shape: Sequence[int], dims: dict[int, int], *key: object) -> torch.Tensor:
        """A tensor of this shape. `dims`: those that are sharded, by the parameter's that they are sharded with."""
        full = whole(shape, name, self.seed, *key)
        if self.mesh is None:
            return full
        of_param = [R if isinstance(p, Shard) and p.dim >= len(SHAPES[name]) else p for p in self.placements]
        placements = [Shard(dims[p.dim]) if isinstance(p, Shard) and p.dim in dims else R for p in of_param]
        return distribute_tensor(full, self.mesh, placements, src_data_rank=None)

    def made(self, name: str) -> dict[str, object]:
        """The state that the optimizer has of a parameter in this layout."""
        shape, alike = SHAPES[name], {0: 0, 1: 1}
        rows, last = shape[0], len(shape) - 1
        return {
            "step": torch.tensor(3.0),
            "m": self.beside(name, shape, alike, "m"),
            "pair": [self.beside(name, shape, alike, "p", i) for i in range(2)],
            "nest": {
                "a": (self.beside(name, shape, alike, "a"), 7, ["x"]),
                "b/c": self.beside(name, shape, alike, "b"),
            },
            "factors": [self.beside(name, (rows, rows), {0: 0}, "L"), self.beside(name, (7, 7), {}, "R")],
            "left": self.beside(name, (rows, rows), {0: 0}, "left"),
            "whole": self.beside(name, (6, 2), {}, "whole"),
            "plain": whole((6, 6), name, self.seed, "plain"),
            # of one parameter a DTensor, of the others a plain tensor
            "either": self.beside(name, (6, 2), {}, "e") if name == "matrix" else whole((6, 2), name, self.seed, "e"),
            "row": self.beside(name, (rows,), {0: 0}, "row"),
            "column": self.beside(name, (1, shape[last]), {last: 1}, "column"),
            "history": self.beside(name, (2, *shape), {0: 1, 1: 2}, "history"),
            "blocks": self.beside(name, (2 * rows,), {0: 0}, "blocks"),
            "scale": [self.beside(name, (), {}, "scale")],
        }

    def fill(self) -> None:
        for name, param in self.params.items():
            self.optim.state[param] = self.made(name)


def walk(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, (dict, list, tuple)):
        yield path, (type(node), len(node))
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from walk(value, f"{path}/{key}")
    else:
        yield path, node


def wrong(job: Job, expected: dict[str, dict[str, object]], *, kinds: bool) -> Iterator[str]:
    """What a job's state is not. `kinds`: whether each tensor is of the kind that the optimizer itself makes."""
    for name, param in job.params.items():
        found, wanted = dict(walk(job.optim.state[param])), dict(walk(expected[name]))
        if found.keys() != wanted.keys():
            yield f"{name}: has {found.keys()}"
        for path, want in wanted.items():
            have = found.get(path)
            if not isinstance(want, torch.Tensor):
                yield from [] if have == want else [f"{name}{path}: {have}"]
                continue
            assert isinstance(have, torch.Tensor), path
            if kinds and type(have) is not type(want):
                yield f"{name}{path}: is a {type(have).__name__}"
            full = want.full_tensor() if isinstance(want, DTensor) else want
            if isinstance(have, DTensor):
                full = distribute_tensor(full, have.device_mesh, have.placements, src_data_rank=None).to_local()
            if not torch.equal(have.to_local() if isinstance(have, DTensor) else have, full):
                yield f"{name}{path}: has other values"


def test_each_layout_loads_into_each(directory: Path) -> None:
    make_groups()
    for source, (size, *_) in LAYOUTS.items():
        if rank() < size:
            job = Job(source, "saved")
            job.fill()
            ckptlib.save(directory / source, job.state, 1, process_group=GROUPS[size - 1])
        dist.barrier()  # a rank waits for another that saves alone no longer than a save may take
    found = []
    for source in LAYOUTS:
        for layout, (size, *_) in LAYOUTS.items():
            for stepped in ((False, True) if source == "fsdp-2" else (False,)) if rank() < size else ():
                job, oracle = Job(layout, "other"), Job(layout, "saved")
                if stepped:
                    job.fill()
                ckptlib.load(directory / source, job.state, process_group=GROUPS[size - 1])
                expected = {name: oracle.made(name) for name in SHAPES}
                lines = wrong(job, expected, kinds=stepped or source != "whole")
                found += [f"{source} -> {layout}, {stepped}: {line}" for line in lines]
            dist.barrier()
    assert not found, "\n".join(found[:20])


def pieces(values: float, layout: str = "fsdp-2") -> Job:
    """A job whose optimizer keeps its part of a parameter in plain tensors."""
    job = Job(layout, "saved")
    param = job.params["square"]
    local = param.to_local() if isinstance(param, DTensor) else param
    job.optim.state[param] = {"m": torch.full(local.shape, values), "pair": [torch.full(local.shape, values)]}
    return job


def test_pieces_in_plain_tensors_are_refused_when_they_are_saved(directory: Path) -> None:
    """Also nested ones, which would be each rank's own, and rank 0's where there are more ranks."""
    make_groups()
    if rank() < 2:
        for key in ("m", "pair"):
            job = pieces(rank())
            state = job.optim.state[job.params["square"]]
            job.optim.state[job.params["square"]] = {key: state[key]}
            with pytest.raises(ReplicasDiffer, match=rf"square/{key}.* use DTensor"):
                ckptlib.save(directory / key, job.state, 1, process_group=GROUPS[1])
            assert not committed(directory / key)


def test_pieces_that_were_alike_when_they_were_saved_are_not_taken_for_the_whole(directory: Path) -> None:
    """All of them were zeros, as before the first gradient."""
    make_groups()
    if rank() < 2:
        ckptlib.save(directory, pieces(0).state, 1, process_group=GROUPS[1])
    dist.barrier()
    for layout in ("whole", "fsdp-2", "fsdp-3"):
        if rank() >= LAYOUTS[layout][0]:
            continue
        for job in (pieces(1, layout), Job(layout, "other")):
            before = job.params["bias"].detach().clone()
            if layout == "fsdp-2":
                ckptlib.load(directory, job.state, process_group=GROUPS[1])
                state = job.optim.state[job.params["square"]]
                assert all(t.shape == (2, 4) and not t.any() for t in (state["m"], *state["pair"]))
                continue
            with pytest.raises(StateMismatch, match=r"square/(m|pair/0): is \[2, 4\], as each rank's part"):
                ckptlib.load(directory, job.state, process_group=GROUPS[LAYOUTS[layout][0] - 1])
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (job.params["bias"], before)))


def test_one_number_is_no_piece(directory: Path) -> None:
    """A count in a tensor of one element, beside a parameter of which each rank has one."""
    make_groups()
    full = whole((2,), "biases")

    def job(mesh: DeviceMesh | None) -> tuple[dict[str, object], Keeping, nn.Parameter]:
        param = nn.Parameter(full if mesh is None else distribute_tensor(full, mesh, [S0], src_data_rank=None))
        optim = Keeping({"bias": param})
        return {"bias": param, "optim": optim}, optim, param

    if rank() < 2:
        state, optim, param = job(MESHES[2,])
        optim.state[param] = {"count": torch.tensor([5.0]), "more": [torch.tensor([7.0])]}
        ckptlib.save(directory, state, 1, process_group=GROUPS[1])
    dist.barrier()
    for mesh in (None, MESHES[1,]) if rank() < 1 else ():
        state, optim, param = job(mesh)
        ckptlib.load(directory, state, process_group=GROUPS[0])
        assert optim.state[param] == {"count": torch.tensor([5.0]), "more": [torch.tensor([7.0])]}


def test_a_rank_outside_of_the_mesh_has_no_part_that_could_be_another(directory: Path) -> None:
    """It has all parameters, as one that made the whole model has, and a factor of the shape of the others' parts."""
    make_groups()

    def job(seed: str) -> Job:
        made = Job("fsdp-2", seed)
        assert made.mesh is not None
        local = whole((2, 4), seed) if rank() < 2 else torch.empty(0, 4)
        shape, stride = torch.Size(SHAPES["square"]), (4, 1)
        param = DTensor.from_local(local, made.mesh, made.placements, run_check=False, shape=shape, stride=stride)
        made.params = {"square": nn.Parameter(param)}
        made.optim = Keeping(made.params)
        return made

    factor = whole((2, 4), "factor")
    saved = job("saved")
    saved.optim.state[saved.params["square"]] = {"factor": factor, "pair": [factor]}
    ckptlib.save(directory, saved.state, 1)
    other = job("other")
    ckptlib.load(directory, other.state)
    state = other.optim.state[other.params["square"]]
    assert torch.equal(state["factor"], factor)
    assert torch.equal(state["pair"][0], factor)


def test_the_whole_does_not_go_where_a_piece_is_kept(directory: Path) -> None:
    make_groups()
    if rank() < 1:
        ckptlib.save(directory, pieces(0, "whole").state, 1, process_group=GROUPS[0])
    dist.barrier()
    if rank() < 2:
        with pytest.raises(StateMismatch, match=r"square/m: is \[4, 4\].*plain tensor of \[2, 4\].*zeros_like"):
            ckptlib.load(directory, pieces(1).state, process_group=GROUPS[1])


def test_no_room_is_told_by_name(directory: Path) -> None:
    """Nothing has as many bytes as a damaged or hostile step may tell of, or such strides."""
    make_groups()
    if rank() >= 1:
        return
    shape, stride = torch.Size((0, 1 << 40, 1 << 40)), (1, 1, 1)
    empty = torch.empty_strided(shape, stride)
    placed = DTensor.from_local(empty, MESHES[1,], [S0], run_check=False, shape=shape, stride=stride)
    for key, value in {"plain": empty, "placed": placed}.items():
        job = Job("fsdp-1", "saved")
        job.optim.state[job.params["bias"]] = {"m": value}
        ckptlib.save(directory / key, job.state, 1, process_group=GROUPS[0])
        with pytest.raises(StateMismatch, match=r"optim/params/bias/m: no room for float32\[0, 1099511627776, "):
            ckptlib.load(directory / key, Job("fsdp-1", "other").state, process_group=GROUPS[0])
    nbytes = 64 << 20  # what has as many is mapped by itself, wherever memory was freed before
    param = nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8), requires_grad=False)
    optim = Keeping({"w": param})
    optim.state[param] = {"m": torch.zeros_like(param)}
    ckptlib.save(directory / "alike", {"w": param, "optim": optim}, 1, process_group=GROUPS[0])
    optim.state.clear()
    with address_space(nbytes // 2), pytest.raises(StateMismatch, match=r"optim/w/m: no room for uint8\[67108864\]"):
        ckptlib.load(directory / "alike", {"w": param, "optim": optim}, process_group=GROUPS[0])


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Of so many bytes more than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_state_that_one_rank_alone_has_is_of_its_kind_on_all(directory: Path) -> None:
    """Beside state of the same parameter that all have."""
    make_groups()
    if rank() >= 2:
        return
    saved, job = Job("fsdp-2", "saved"), Job("fsdp-2", "other")
    keys = ("whole", "either")[: rank() + 1]
    saved.optim.state[saved.params["matrix"]] = {key: saved.made("matrix")[key] for key in keys}
    ckptlib.save(directory, saved.state, 1, process_group=GROUPS[1])
    ckptlib.load(directory, job.state, process_group=GROUPS[1])
    state = job.optim.state[job.params["matrix"]]
    assert {key: type(value) for key, value in state.items()} == {"whole": DTensor, "either": DTensor}


def by_hand(seed: str, rows: Sequence[int]) -> tuple[dict[str, object], Keeping, dict[str, object]]:
    """A square matrix cut by hand, its optimizer, and the state that this has."""
    first, count = sum(rows[: rank()]), rows[rank()]

    def cut(*name: object) -> torch.Tensor:
        return whole((8, 8), seed, *name)[first : first + count].clone()

    param = nn.Parameter(cut("param"))
    state = {"m": cut("m"), "pair": (cut(0), [cut(1)]), "factor": whole((8, 8), seed, "f")}
    optim = Keeping({"w": param})
    return {"w": ckptlib.Sharded(param, (first, 0), (8, 8)), "optim": optim}, optim, state


def test_what_is_nested_beside_a_parameter_that_is_cut_by_hand(directory: Path) -> None:
    """It is cut like it; what is whole beside a parameter that was cut stays so, though it has the shape of all of it.
    Nested parts are saved by nobody: a factor of their shape could not be told from them."""
    make_groups()
    if rank() < 1:
        state, optim, kept = by_hand("saved", (8,))
        optim.state[optim.param_groups[0]["params"][0]] = {key: kept[key] for key in ("m", "pair")}
        ckptlib.save(directory / "nested", {**state, "w": state["w"].tensor}, 1, process_group=GROUPS[0])
    dist.barrier()
    if rank() >= 3:
        return
    state, optim, kept = by_hand("saved", (1, 2, 5))
    param = optim.param_groups[0]["params"][0]
    optim.state[param] = kept
    with pytest.raises(UnsupportedState, match=r"w/pair/0 is not the same tensor"):
        ckptlib.save(directory / "parts", state, 1, process_group=GROUPS[2])
    optim.state[param] = {key: kept[key] for key in ("m", "factor")}
    ckptlib.save(directory / "parts", state, 1, process_group=GROUPS[2])
    for root, keys in (("nested", ("m", "pair")), ("parts", ("m", "factor"))) if rank() < 2 else ():
        for rows, stepped in (((3, 5), False), ((1, 7), True)):
            state, optim, other = by_hand("other", rows)
            param = optim.param_groups[0]["params"][0]
            if stepped:
                optim.state[param] = other
            ckptlib.load(directory / root, state, process_group=GROUPS[1])
            expected = {key: by_hand("saved", rows)[2][key] for key in keys}
            for (path, have), (_, want) in zip(walk(optim.state[param]), walk(expected), strict=True):
                assert torch.equal(have, want) if isinstance(want, torch.Tensor) else have == want, (path, rows)


if __name__ == "__main__":
    run_cases(
        [
            test_each_layout_loads_into_each,
            test_pieces_in_plain_tensors_are_refused_when_they_are_saved,
            test_pieces_that_were_alike_when_they_were_saved_are_not_taken_for_the_whole,
            test_one_number_is_no_piece,
            test_a_rank_outside_of_the_mesh_has_no_part_that_could_be_another,
            test_the_whole_does_not_go_where_a_piece_is_kept,
            test_no_room_is_told_by_name,
            test_state_that_one_rank_alone_has_is_of_its_kind_on_all,
            test_what_is_nested_beside_a_parameter_that_is_cut_by_hand,
        ]
    )
