"""The numbers of the sources: bytes per parameter, a week of checkpoints, activations, intervals."""

from __future__ import annotations

import math

import pytest

from ckptlib.sizing.activations import Transformer
from ckptlib.sizing.intervals import by_budget, ettr, young
from ckptlib.sizing.parameters import MOMENTS, PRECISIONS, per_parameter
from ckptlib.sizing.plan import Plan, Question, Subject
from ckptlib.sizing.storage import num_puts, num_requests, storage

HOUR, DAY = 3600.0, 86400.0


def question(**changed: float | None) -> Question:
    usual: dict[str, float | None] = {
        "ranks_per_host": 8,
        "copies": 0,
        "every": None,
        "period": 7 * DAY,
        "keep": 10,
        "at_most": 0.035,
        "mtbf": None,
        "restart": 120.0,
        "bandwidth": None,
        "host_memory": None,
        "device_memory": None,
    }
    return Question(**{**usual, **changed})  # type: ignore[arg-type]


def test_sixteen_bytes_of_mixed_precision() -> None:
    """2 + 2 + 4 + 4 + 4 in training, of which gradients are not saved."""
    found = per_parameter("mixed", "adamw")
    assert (found.weights, found.gradients, found.master, found.moments) == (2, 2, 4, 4 + 4)
    assert (found.in_training, found.in_checkpoint) == (16, 14)
    assert per_parameter("fp32", "adamw").in_training == 16
    assert per_parameter("fp32", "none").in_checkpoint == per_parameter("fp32", "none").in_training == 4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", MOMENTS)
def test_gradients_are_never_saved(precision: str, optimizer: str) -> None:
    found = per_parameter(precision, optimizer)
    assert found.in_training - found.in_checkpoint == PRECISIONS[precision].gradients > 0


@pytest.mark.parametrize(
    ("precision", "optimizer", "each", "written", "kept"),
    [("fp32", "none", 700e9, 58.8e12, 7.0e12), ("mixed", "adamw", 2.45e12, 205.8e12, 24.5e12)],
)
def test_a_week_of_175b(precision: str, optimizer: str, each: float, written: float, kept: float) -> None:
    nbytes = 175e9 * per_parameter(precision, optimizer).in_checkpoint
    found = storage(nbytes, 2 * HOUR, 7 * DAY, 10)
    assert nbytes == each
    assert (found.num_saves, found.num_kept) == (84, 10)
    assert (found.nbytes_written, found.nbytes_kept) == (pytest.approx(written), pytest.approx(kept))


def test_increments_are_written_and_kept() -> None:
    found = storage(100.0, 1.0, 10.0, 3, nbytes_changed=10.0)
    assert (found.nbytes_written, found.nbytes_kept) == (100 + 9 * 10, 100 + 2 * 10)
    assert storage(100.0, 20.0, 10.0, 3) == storage(100.0, 11.0, 10.0, 3)  # none at all
    assert storage(100.0, 20.0, 10.0, 3).nbytes_written == 0


def test_activations_of_gpt3() -> None:
    """By hand: 2048 x 1 x 12288 = 25.17 M; 34/8 = 4.25; 5 x 96 x 2048 / 12288 / 8 = 10; 96 layers."""
    model = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, batch=1, tensor_parallel=8)
    assert model.activations == pytest.approx(96 * 2048 * 12288 * 14.25)
    assert model.activations_without_scores == pytest.approx(96 * 2048 * 12288 * 4.25)


@pytest.mark.parametrize("stall_s", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("mtbf_s", [HOUR, DAY])
def test_no_interval_is_better_than_youngs(stall_s: float, mtbf_s: float) -> None:
    """Searched for: the share of time that counts is largest there."""

    def counts(interval: float) -> float:
        return ettr(interval, stall_s, 0.0, 0.0, mtbf_s)

    best = max((young(stall_s, mtbf_s) * 1.02**n for n in range(-100, 100)), key=counts)
    assert best == pytest.approx(young(stall_s, mtbf_s), rel=0.15)


def test_the_budget() -> None:
    assert by_budget(0.035, 0.035) == pytest.approx(1.0)
    plan = Plan(Subject(1e9, 8), question(mtbf=12 * HOUR), stall_s=10.0, persist_s=2000.0)
    assert plan.interval == 2000.0, "no save begins while one is written"
    assert Plan(Subject(1e9, 8), question(mtbf=12 * HOUR), 10.0, None).interval == pytest.approx(
        math.sqrt(2 * 10 * 12 * HOUR)
    )
    assert Plan(Subject(1e9, 8), question(every=60.0), 10.0, None).interval == 60.0


def test_what_fits() -> None:
    each = per_parameter("mixed", "adamw")
    subject = Subject(7e9 * 14, 8, 7e9, each)  # 12.25 GB of each rank are saved, 14 GB are in training
    plan = Plan(subject, question(host_memory=197e9, device_memory=26.3e9), 1.0, None)
    assert (plan.num_slots, plan.host_nbytes) == (2, 2 * 8 * 12.25e9)
    assert plan.fits_host is True
    assert plan.device_spare_nbytes == pytest.approx(12.3e9)
    assert plan.fits_device is True
    plan = Plan(subject, question(host_memory=195e9, device_memory=26.2e9, copies=1), 1.0, None)
    assert (plan.num_slots, plan.fits_host, plan.fits_device) == (6, False, False)
    assert Plan(subject, question(), 1.0, None).fits_device is None


def test_requests() -> None:
    mib = 1 << 20
    assert [num_puts(n * mib) for n in (1, 16, 17, 2048)] == [1, 3, 4, 130]
    assert num_puts(16 * mib - 1) == 1
    assert num_puts(1 << 40) < 16 * 1024 + 2, "a terabyte in parts of 64 MiB or more"
    assert num_requests(8 * 64e6, 8) == 8 * (4 + 2 + 2) + 12
