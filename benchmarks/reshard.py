"""How much is read when the layout changes? Bytes read over bytes needed, on 2, 4 and 8 ranks, ckptlib and DCP.

Bytes are counted twice by the kernel, summed over all ranks: those asked of files (rchar) and those that came from the
disk with a cold cache (read_bytes), where readahead and whole blocks show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptlib
import ckptlib.checkpoint
from benchmarks import limits, peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import LOADERS

STEP = 1
SUBJECTS = ("ckptlib", "DCP")
CASES = ((2, 4), (4, 2), (8, 1))
"""Ranks that save, ranks that load."""

PARTS = {"an eighth of the rows": 0, "an eighth of the columns": 1}
"""What one rank loads of one tensor: a contiguous box, and one that has a piece of every row."""


def main(arguments: list[str]) -> None:
    run(arguments, "reshard", measure, gb=0.25, rounds=1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = 32_000_000 if options.toy else int(options.gb * 1e9)
    cases = ((2, 1),) if options.toy else CASES
    for subject in SUBJECTS[:1] if options.toy else SUBJECTS:
        place = {"peer": subject, "directory": str(directory / subject), "nbytes": nbytes}
        for before, after in cases:
            case = f"FSDP {before} to {after}"
            save = {**place, "doing": "save", "case": case}
            figures.attempt(case, subject, __name__, before, save, options.timeout_s)
            for _ in range(options.rounds):
                _note(options, figures, case, subject, after, {**save, "doing": "load"})
        before = cases[-1][0]
        for part, dim in PARTS.items():
            order = {**place, "doing": "load part", "case": f"FSDP {before} to 1", "dim": dim}
            _note(options, figures, part, subject, 1, order)


def _note(
    options: Options, figures: Figures, case: str, subject: str, num_ranks: int, order: dict[str, object]
) -> None:
    lines = figures.attempt(case, subject, __name__, num_ranks, order, options.timeout_s)
    if not lines:
        return
    needed = sum(line["needed"] for line in lines)
    for what, name in (("asked of files", "rchar"), ("came from the disk", "read_bytes")):
        ratio = sum(line[name] for line in lines) / needed
        figures.add(case, subject, what, "x", [ratio], needed=needed)
    figures.add(case, subject, "load", "s", [max(line["seconds"] for line in lines)], needed=needed)


# In the ranks


def work() -> None:
    """Saves a state cut over as many ranks as there are, or loads it."""
    given = told()
    peer = LOADERS[given["peer"]]
    directory = Path(given["directory"]) / given["case"].replace(" ", "-")
    shapes = _shapes(given["nbytes"])
    if given["doing"] == "load part":
        _load_part(given["peer"], shapes["large"], given["dim"], directory)
        return
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: states.State = {name: _dtensor(shape, mesh) for name, shape in shapes.items()}
    if given["doing"] == "save":
        peer().begin(state, directory, STEP)()
    else:
        _count(lambda: peer().load(state, directory, STEP), state, directory)
        wrong = [name for name, tensor in state.items() if not _is_filled(tensor, mesh)]
        assert not wrong, f"not filled as they were saved: {wrong[:3]}"
    dist.destroy_process_group()


def _count(load: Callable[[], None], state: states.State, directory: Path) -> None:
    """Tells what a load into zeroes reads."""
    states.clear(state)
    if int(os.environ["RANK"]) == 0:
        limits.evict(directory)
    peers.barrier()
    before, began = _io(), time.perf_counter()
    load()
    seconds, after = time.perf_counter() - began, _io()
    counts = {name: after[name] - before[name] for name in ("rchar", "read_bytes")}
    tell(needed=states.nbytes_local(state), seconds=seconds, **counts)


def _load_part(subject: str, shape: tuple[int, int], dim: int, directory: Path) -> None:
    """What rank 3 of 8 would hold of a tensor, in one process."""
    mine = tuple(size // 8 if d == dim else size for d, size in enumerate(shape))
    box = torch.zeros(mine)
    if subject == "ckptlib":
        offset = tuple(3 * size if d == dim else 0 for d, size in enumerate(mine))
        marked = {"large": ckptlib.Sharded(box, offset, shape)}
        _count(lambda: _ignore(ckptlib.load(directory, marked, STEP, only="large")), {"large": box}, directory)
    else:  # it takes DTensors, whose mesh wants a group, which is never talked to here
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
        mesh = init_device_mesh("cpu", (8,))
        state: states.State = {"large": distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)], src_data_rank=None)}
        path = directory / f"step-{STEP}"
        _count(lambda: dcp.load(state, checkpoint_id=path, no_dist=True), state, directory)
        box = states.local(state)["large"]
    rows = torch.arange(shape[0], dtype=torch.float32)[:, None].repeat(1, shape[1])
    assert torch.equal(box, rows.chunk(8, dim)[3]), "not filled as it was saved"


def _ignore(report: object) -> None:
    pass


def _io() -> dict[str, int]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}


def _shapes(nbytes: int) -> dict[str, tuple[int, int]]:
    """Of one large tensor (half the bytes), and 40 smaller ones whose rows no rank count divides."""
    columns = 1024
    rows = nbytes // 4 // columns
    return {"large": (rows // 16 * 8, columns), **{f"layers.{i}": (rows // 80 | 1, columns) for i in range(40)}}


def _dtensor(shape: tuple[int, int], mesh: DeviceMesh) -> DTensor:
    """Row i is filled with i, so that every rank knows what any box must hold."""
    ranks, mine = mesh.size(), mesh.get_local_rank()
    share = -(-shape[0] // ranks)
    first, last = min(share * mine, shape[0]), min(share * (mine + 1), shape[0])
    local = torch.arange(first, last, dtype=torch.float32)[:, None].repeat(1, shape[1])
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _is_filled(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    again = _dtensor((tensor.shape[0], tensor.shape[1]), mesh)
    return bool(torch.equal(states.local({"": again})[""], states.local({"": tensor})[""]))


if __name__ == "__main__":
    work()
