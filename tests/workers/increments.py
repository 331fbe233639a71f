"""Two ranks, each with a part of the model and an optimizer of its own, that keep each other's snapshots by increments.

increments.py <directory>: runs all cases, and writes what each rank found to <directory>/<case>.rank<n>. After each
step the replica is compared with the slot that it is of, byte by byte, header and documents included.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.inside import settle, snapshots_of

import ckptlib
from ckptlib import Peers
from ckptlib.codecs.optimizer_step import SAMPLE, OptimizerStep
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers import increments
from ckptlib.peers.increment_sender import NO_BASE, NO_FIT, NOT_NEXT
from ckptlib.peers.parameters import OTHER
from ckptlib.policy.peers import Coverage

SHAPE = (64, 600)
LARGE = 64 * 600 * 4
"""Bytes of each array of the one parameter that is worth it."""


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (average * beta1 + param.grad * (1 - beta1)).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)


class Stranger(torch.optim.AdamW):
    """Keeps what AdamW keeps, and does something else with it."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for param in self.param_groups[0]["params"]:
            param.add_(torch.randn_like(param), alpha=1e-2)


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 1e-3, "betas": (0.9, 0.95), **options})


class Job:
    """A training of layers that learn apart from one another, and what became of its snapshots."""

    def __init__(self, directory: Path, **makers: Callable[[Any], torch.optim.Optimizer]) -> None:
        """`makers`: of the optimizer of each layer, by its name."""
        rank = dist.get_rank()
        self.directory = directory
        self.layers = {name: torch.nn.Linear(SHAPE[1], SHAPE[0]) for name in makers}
        self.optimizers = {name: make(self.layers[name].parameters()) for name, make in makers.items()}
        self._generator = torch.Generator().manual_seed(rank)
        self._drift = torch.randn(SHAPE, generator=self._generator) * 1e-3
        self.step = 0
        arena = directory / f"host{rank}"
        arena.mkdir(parents=True, exist_ok=True)
        peers = Peers(domain=f"host{rank}", timeout=timedelta(seconds=20), link="optimizer")
        modules = torch.nn.ModuleDict({f"part{rank}": torch.nn.ModuleDict(self.layers)})
        state = {"model": modules, **self.optimizers}
        self.ckpt = ckptlib.Checkpointer(directory / "root", state, every=10**6, peers=peers, arena=arena)

    def update(self) -> None:
        noise = torch.randn(SHAPE, generator=self._generator) * torch.rand(SHAPE[1], generator=self._generator) * 3e-3
        for name, layer in self.layers.items():
            layer.weight.grad = self._drift + noise
            layer.bias.grad = noise[:, 0].clone()
            self.optimizers[name].step()

    def after_step(self, same: bool = True) -> Coverage:
        """Of the snapshot that this takes, when it has come to its end. `same`: whether its replica must be there."""
        self.step += 1
        self.ckpt.after_step(self.step)
        settle(self.ckpt, 30)
        coverage = self.ckpt.coverage
        assert coverage is not None
        dist.barrier()
        if same:
            self.compare()
        dist.barrier()
        return coverage

    def compare(self) -> None:
        own, replica = (self._slot(host) for host in (dist.get_rank(), 1 - dist.get_rank()))
        assert own
        assert own == replica, f"the replica of step {self.step} is another"

    def _slot(self, host: int) -> bytes:
        """The ready slot there with this rank's snapshot of the newest step; nothing where there is none."""
        for path in (self.directory / f"host{host}").glob("*.slot"):
            data = path.read_bytes()
            page = data[:PAGE_BYTES].rstrip(b"\0")
            header = json.loads(page)["body"] if page.endswith(b"}\n") else {}
            found = header and (header["rank"], int(header["save"][:12]), header["sequence"] % 2)
            if found == (dist.get_rank(), self.step, 0):
                return data[: max(offset + nbytes for offset, nbytes, _ in header["documents"].values())]
        return b""

    def steps(self, count: int) -> Iterator[Coverage]:
        for _ in range(count):
            self.update()
            yield self.after_step()

    def some_steps(self, until: Callable[[list[Coverage]], bool]) -> list[Coverage]:
        """Of those for which there was a slot: behind a snapshot that failed there is none for a step or two."""
        taken, begun = list[Coverage](), self.step
        while not until(taken):
            self.update()
            coverage = self.after_step(same=False)
            if self._slot(dist.get_rank()):
                self.compare()
                taken.append(coverage)
            dist.barrier()
            assert self.step < begun + 8, taken
        return taken

    def tensors(self) -> list[torch.Tensor]:
        (layer,), (optimizer,) = self.layers.values(), self.optimizers.values()
        return [layer.weight.detach(), *optimizer.state[layer.weight].values()]

    def close(self) -> None:
        self.ckpt.close()


KNOWN: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "for-loop": (lambda params: adamw(params, foreach=False), 3),
    "foreach": (lambda params: adamw(params, foreach=True, weight_decay=0.1), 3),
    "fused": (lambda params: adamw(params, fused=True), 3),
    "l2": (lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1), 3),
    "sgd": (lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=1e-4), 2),
    "nesterov": (lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True), 2),
    "lion": (lambda params: Lion(params, lr=1e-4), 2),
}
"""With the number of arrays that each keeps for a parameter, the weights among them."""


def optimizers_that_are_known(directory: Path) -> None:
    """From the first replica on, which has nothing to build on, all travels by increments."""
    job = Job(directory, **{name: make for name, (make, _) in KNOWN.items()})
    first, *others = job.steps(5)
    nbytes, one_of_each = (sum(count for _, count in KNOWN.values()) * LARGE, len(KNOWN) * LARGE)
    assert (first.coded, first.uncoded[NO_BASE]) == (0, nbytes)
    for coverage in others:
        assert coverage.coded == nbytes, coverage
        assert set(coverage.uncoded) <= {"small", OTHER}, coverage
        assert coverage.sent - (first.sent - nbytes) < 0.97 * one_of_each, coverage
    job.close()


def optimizers_that_are_not(directory: Path) -> None:
    """They keep other state, or the same and mean something else by it."""
    job = Job(
        directory,
        adagrad=lambda params: torch.optim.Adagrad(params, lr=1e-2),
        rmsprop=lambda params: torch.optim.RMSprop(params, lr=1e-2),
        plain=lambda params: torch.optim.SGD(params, lr=1e-2),
        stranger=lambda params: Stranger(params, lr=1e-3),
        known=adamw,
    )
    *_, coverage = job.steps(4)
    assert coverage.coded == 3 * LARGE
    assert coverage.uncoded[NO_FIT] == 3 * LARGE
    assert 5 * LARGE <= coverage.uncoded[OTHER] < 5.5 * LARGE
    job.close()


def schedulers(directory: Path) -> None:
    """That step before `after_step`, behind it, or now and then: that step's rate is in no snapshot."""
    job = Job(directory, never=adamw, before=adamw, behind=adamw, changing=adamw)
    made = {name: torch.optim.lr_scheduler.ExponentialLR(job.optimizers[name], 0.9) for name in list(job.layers)[1:]}
    for n in range(6):
        job.update()
        made["before"].step()
        if n % 2:
            made["changing"].step()
        coverage = job.after_step()
        made["behind"].step()
        if not n % 2:
            made["changing"].step()
        lacking = 3 * LARGE if n % 2 else 0
        assert n == 0 or (coverage.coded, coverage.uncoded.get(NO_FIT, 0)) == (12 * LARGE - lacking, lacking), coverage
    job.close()


def steps_that_are_skipped(directory: Path) -> None:
    """By a scaler, or two at once."""
    job = Job(directory, layer=adamw)
    [*job.steps(2)]
    for count in (0, 2, 3):
        for _ in range(count):
            job.update()
        coverage = job.after_step()
        assert (coverage.coded, coverage.uncoded[NOT_NEXT]) == (0, 3 * LARGE)
        assert [coverage.coded for coverage in job.steps(2)] == [3 * LARGE] * 2
    job.close()


def learning_rate_in_a_tensor(directory: Path) -> None:
    """It is in the snapshot of one of the ranks; to the other it is not known."""
    job = Job(directory, layer=lambda params: adamw(params, lr=torch.tensor(1e-3), foreach=False))
    *_, coverage = job.steps(4)
    coded: list[int] = [0, 0]
    dist.all_gather_object(coded, coverage.coded)
    assert sorted(coded) == [0, 3 * LARGE]
    job.close()


def steps_past_a_void_snapshot(directory: Path) -> None:
    """Nothing builds on it."""
    job = Job(directory, layer=adamw)
    [*job.steps(3)]
    for _ in range(2):
        snapshots_of(job.ckpt).void(job.step)
        taken = job.some_steps(lambda taken: taken != [] and taken[-1].coded > 0)
        assert (taken[0].coded, taken[0].uncoded[NO_BASE]) == (0, 3 * LARGE), taken
    job.close()


def frames_damaged_on_the_way(directory: Path) -> None:
    """Found by the digests, or by their form: that replica is not kept, and all later ones come as they are."""
    for place in (-1, 40):
        job = Job(directory / str(place), layer=adamw)
        [*job.steps(2)]
        if dist.get_rank() == 0:
            with pytest.MonkeyPatch.context() as patch:
                _damage(patch, place)
                job.update()
                job.after_step(same=False)
        else:
            job.update()
            job.after_step(same=False)
        if dist.get_rank() == 0:
            assert job._slot(1) == b"", "a replica that nobody sealed"
        else:
            job.compare()
        damaged = job.step
        taken = job.some_steps(lambda taken: len(taken) == 4)
        assert taken[-1].coded == (0 if dist.get_rank() == 0 else 3 * LARGE)
        assert taken[-1].step is not None
        assert taken[-1].step > damaged, "replicas are held again"
        job.close()


def _damage(patch: pytest.MonkeyPatch, place: int) -> None:
    encode = OptimizerStep.encode

    def damaging(self: OptimizerStep, *args: Any) -> bytes | None:
        frame = encode(self, *args)
        if frame is None or len(args[2][0]) <= SAMPLE:
            return frame
        damaged = bytearray(frame)
        damaged[place] ^= 1
        return bytes(damaged)

    patch.setattr(OptimizerStep, "encode", damaging)


def restored_from_replicas(directory: Path) -> None:
    """Of a job that was let go of: what the other host keeps fills a state, bit for bit."""
    job = Job(directory, layer=adamw)
    [*job.steps(4)]
    expected = [tensor.clone() for tensor in job.tensors()]
    job.ckpt.__exit__(KeyError, KeyError(), None)
    dist.barrier()
    for path in (directory / f"host{dist.get_rank()}").glob("*.slot"):
        header = json.loads(path.read_bytes()[:PAGE_BYTES].rstrip(b"\0"))["body"]
        if header["rank"] == dist.get_rank():
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    again = Job(directory, layer=adamw)
    report = again.ckpt.restore()
    assert (report.step, report.in_memory) == (4, True)
    found = again.tensors()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    again.step = 4
    again.some_steps(lambda taken: taken != [] and taken[-1].coded == 3 * LARGE)
    again.close()


CASES = [
    *(optimizers_that_are_known, optimizers_that_are_not, schedulers, steps_that_are_skipped),
    *(learning_rate_in_a_tensor, steps_past_a_void_snapshot, frames_damaged_on_the_way, restored_from_replicas),
]


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    logging.basicConfig()
    torch.set_num_threads(1)
    increments.STRETCH = 10_000  # several to each array
    for case in CASES:
        verdict = directory / f"{case.__name__}.rank{dist.get_rank()}"
        here = directory / case.__name__
        here.mkdir(exist_ok=True)
        try:
            case(here)
            verdict.write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            verdict.write_text("".join(traceback.format_exception(error)))
            os._exit(0)  # the cases behind it say nothing
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
