"""Steps of optimizers, coded by what the state before says of them: bit for bit, and small where a rule fits."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from ckptlib.codecs import optimizer_step
from ckptlib.codecs.bit_residuals import Scratch, Words, floats_of, flushes_denormals
from ckptlib.codecs.optimizer_step import MAX_ELEMENTS, OptimizerStep
from ckptlib.codecs.update_rules import RULES, Adam, Lion, Momentum, Nesterov, Scalars, UpdateRule
from ckptlib.errors import FormatError

SHAPE = (64, 512)


class LionOptimizer(torch.optim.Optimizer):
    """Chen et al. 2023, as its paper has it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (average * beta1 + param.grad * (1 - beta1)).sign_()
                param.mul_(1 - lr * decay).add_(update, alpha=-lr)
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)


def words(tensor: torch.Tensor) -> Words:
    wide = tensor.dtype == torch.float32
    found: Words = tensor.detach().reshape(-1).view(torch.int32 if wide else torch.int16).numpy().copy()
    return found.view(np.uint32 if wide else np.uint16)


def two_steps(optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, keys: Sequence[str]) -> Any:
    """The state after 30 steps and after 31, of gradients that have something in common from step to step."""
    generator = torch.Generator().manual_seed(7)
    param = torch.nn.Parameter(torch.randn(SHAPE, generator=generator).mul(0.02).to(dtype))
    made = optimizer([param])
    drift = torch.randn(SHAPE, generator=generator) * torch.rand(SHAPE[0], 1, generator=generator) * 1e-3
    states = []
    for _ in range(31):
        noise = torch.randn(SHAPE, generator=generator) * torch.rand(SHAPE[1], generator=generator) * 3e-3
        param.grad = (drift + noise).to(dtype)
        param.grad[5] = 0  # as a row of an embedding that was not looked up
        made.step()
        states = [*states[-1:], [*(words(made.state[param][key]) for key in keys), words(param)]]
    return states


def adam(**options: Any) -> Any:
    return lambda params: torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), **options)


def sgd(**options: Any) -> Any:
    return lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, **options)


MOMENTS, AVERAGE, BUFFER = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)
AT = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "step": 31.0}
CASES: dict[str, tuple[Any, Sequence[str], UpdateRule, Scalars, float]] = {
    "AdamW, for-loop": (
        adam(foreach=False, weight_decay=0.1),
        MOMENTS,
        Adam(),
        Adam.scalars(decay=0.1, **AT),
        3.5 / 12,
    ),
    "AdamW, foreach": (adam(foreach=True, weight_decay=0.1), MOMENTS, Adam(), Adam.scalars(decay=0.1, **AT), 3.5 / 12),
    "AdamW, fused": (adam(fused=True, weight_decay=0.1), MOMENTS, Adam(), Adam.scalars(decay=0.1, **AT), 3.5 / 12),
    "AdamW, no decay": (adam(weight_decay=0.0), MOMENTS, Adam(), Adam.scalars(decay=0.0, **AT), 3.5 / 12),
    "AdamW, maximize": (adam(maximize=True), MOMENTS, Adam(), Adam.scalars(decay=0.01, **AT), 3.5 / 12),
    "Adam, L2": (
        lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        *(MOMENTS, Adam(), Adam.scalars(decay=0.0, **AT), 3.5 / 12),
    ),
    "SGD": (sgd(weight_decay=1e-4), BUFFER, Momentum(), Momentum.scalars(lr=1e-2, momentum=0.9), 3.5 / 8),
    "SGD, dampening": (sgd(dampening=0.5), BUFFER, Momentum(), Momentum.scalars(lr=1e-2, momentum=0.9), 3.5 / 8),
    "SGD, Nesterov": (
        sgd(nesterov=True),
        *(BUFFER, Nesterov(), Nesterov.scalars(lr=1e-2, momentum=0.9, dampening=0.0), 3.6 / 8),
    ),
    "Lion": (
        lambda params: LionOptimizer(params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
        *(AVERAGE, Lion(), Lion.scalars(lr=1e-4, betas=(0.9, 0.99), decay=0.1), 3.5 / 8),
    ),
}


def both_ways(step: OptimizerStep, rule: UpdateRule, by: Scalars, old: Any, new: Any) -> float | None:
    """The share of bytes that is left."""
    frame = step.encode(rule, by, old, new)
    if frame is None:
        return None
    there = [np.full_like(array, 0x55) for array in new]
    OptimizerStep().decode(memoryview(frame), old, there)
    for array, other in zip(new, there, strict=True):
        np.testing.assert_array_equal(array, other)
    return len(frame) / sum(array.nbytes for array in new)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_of_torch(name: str, dtype: torch.dtype) -> None:
    optimizer, keys, rule, by, most = CASES[name]
    old, new = two_steps(optimizer, dtype, keys)
    step = OptimizerStep()
    share = both_ways(step, rule, by, old, new)
    assert share is not None
    assert share < most
    tried = step.try_sample(rule, by, old, new)
    assert tried is not None
    assert abs(tried - share) < 0.05


@pytest.mark.parametrize("factor", [1.0001, 0.9, 0.0])
def test_another_learning_rate_costs_more(factor: float) -> None:
    """So whoever is in doubt between two tries both."""
    optimizer, keys, rule, by, _ = CASES["AdamW, foreach"]
    old, new = two_steps(optimizer, torch.float32, keys)
    step = OptimizerStep()
    tried = step.try_sample(rule, by, old, new)
    assert tried is not None
    others = step.try_sample(rule, Adam.scalars(decay=0.1, **{**AT, "lr": factor * 1e-3}), old, new)
    assert others is None or others > tried + 0.01


def test_what_no_rule_fits_has_no_frame() -> None:
    generator = np.random.default_rng(0)
    old, new = ([generator.integers(0, 2**32, 70_000, np.uint32) for _ in range(3)] for _ in range(2))
    step = OptimizerStep()
    assert step.encode(Adam(), Adam.scalars(decay=0.1, **AT), old, new) is None
    assert step.try_sample(Adam(), Adam.scalars(decay=0.1, **AT), old, new) is None


INTERESTING = [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x3F800000, 0x007FFFFF]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_bit_comes_back(data: st.DataObject) -> None:
    """NaNs with their payloads, denormals, zeros of both signs, whatever the scalars are, at any size."""
    rule = data.draw(st.sampled_from([*RULES.values()]))
    count = data.draw(st.integers(1, 300))
    dtypes = data.draw(st.lists(st.sampled_from([4, 2]), min_size=rule.num_arrays, max_size=rule.num_arrays))
    word = st.one_of(st.sampled_from(INTERESTING), st.integers(0, 2**32 - 1))
    pool = data.draw(st.lists(word, min_size=1, max_size=20))
    chance = random.Random(data.draw(st.integers()))

    def arrays() -> list[Any]:
        drawn = [np.array(chance.choices(pool, k=count), np.uint32) for _ in dtypes]
        return [a if size == 4 else (a >> 16).astype(np.uint16) for a, size in zip(drawn, dtypes, strict=True)]

    scalar = st.floats(width=32, allow_nan=True, allow_infinity=True)
    by = [np.float32(data.draw(scalar)) for _ in range(rule.num_scalars)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_step, "MAX_SHARE", 10**6)
        assert both_ways(OptimizerStep(), rule, by, arrays(), arrays()) is not None


@pytest.mark.parametrize("count", [1, 2, optimizer_step.BLOCK - 1, optimizer_step.BLOCK, optimizer_step.BLOCK + 1])
def test_sizes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "MAX_SHARE", 10**6)
    generator, step = np.random.default_rng(count), OptimizerStep()
    for sizes in ((4, 4, 4), (2, 2, 2), (4, 2, 4)):
        old, new = ([generator.integers(0, 2 ** (8 * size), count, f"u{size}") for size in sizes] for _ in range(2))
        assert both_ways(step, Adam(), Adam.scalars(decay=0.1, **AT), old, new) is not None


def test_what_nans_are_predicted_as_does_not_depend_on_the_processor() -> None:
    """Of two NaNs, one takes the payload of its first operand, another one of its second."""
    scratch = Scratch(8)
    for payload in (0x7FC00000, 0xFFC00123, 0x7F800001):
        predicted = np.array([payload, 0x3F800000], np.uint32).view(np.float32)
        true = np.array([0x7FC00000, 0x3F800000], np.uint32)
        np.testing.assert_array_equal(scratch.residual(true, predicted), [0, 0])


def test_rounding_to_bfloat16_is_torchs() -> None:
    floats = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    floats[:4] = torch.tensor([1.00390625, 1.01171875, float("inf"), 3.4e38])  # ties, and what rounds to infinity
    scratch = Scratch(len(floats))
    true = words(floats.to(torch.bfloat16))
    assert not scratch.residual(true, floats.numpy().copy()).any()
    np.testing.assert_array_equal(floats_of(true, np.empty(len(true), np.float32)), floats.bfloat16().float().numpy())


# Frames of peers


def a_frame() -> tuple[bytes, Any, Any]:
    optimizer, keys, rule, by, _ = CASES["AdamW, foreach"]
    old, new = ([array[:3000].copy() for array in state] for state in two_steps(optimizer, torch.float32, keys))
    new[2][7] ^= 0x00700000  # an exception
    frame = OptimizerStep().encode(rule, by, old, new)
    assert frame is not None
    return frame, old, new


def test_frames_that_are_cut_or_longer() -> None:
    frame, old, new = a_frame()
    step = OptimizerStep()
    for length in [*range(200), *range(200, len(frame), 41), len(frame) - 1]:
        with pytest.raises(FormatError):
            step.decode(frame[:length], old, [np.empty_like(array) for array in new])
    with pytest.raises(FormatError, match="should have ended after"):
        step.decode(frame + b"\0", old, [np.empty_like(array) for array in new])


def test_frames_with_bits_that_changed() -> None:
    """An error, or other numbers, which the digests of the snapshot tell; never anything else."""
    frame, old, new = a_frame()
    step, chance, refused = OptimizerStep(), random.Random(0), 0
    for _ in range(600):
        at = chance.randrange(len(frame)) if chance.random() < 0.5 else chance.randrange(120)
        changed = bytearray(frame)
        changed[at] ^= 1 << chance.randrange(8)
        out = [np.zeros_like(array) for array in new]
        try:
            step.decode(changed, old, out)
        except FormatError:
            refused += 1
    assert refused > 50
    out = [np.zeros_like(array) for array in new]
    step.decode(frame, old, out)
    np.testing.assert_array_equal(out[2], new[2])


def test_frames_for_others() -> None:
    frame, old, _ = a_frame()
    step = OptimizerStep()
    narrow = [array.astype(np.uint16) for array in old]
    for arrays in (narrow, [array[:-1] for array in old], old[:2], [*old, old[0]]):
        with pytest.raises(FormatError, match="expected"):
            step.decode(frame, arrays, [np.empty_like(array) for array in arrays])


def test_frames_of_other_versions_and_rules() -> None:
    """Which read on would make other numbers of them, and no error."""
    frame, old, new = a_frame()
    scalars = 4 + 3 + 4
    momentum = frame[:1] + bytes([Momentum.number]) + frame[2 : scalars + 4 * Momentum.num_scalars]
    momentum += frame[scalars + 4 * Adam.num_scalars :]
    for forged, told in (
        (bytes([frame[0] + 1]) + frame[1:], f"version {frame[0] + 1}, rule 1"),
        (frame[:1] + b"\x63" + frame[2:], "rule 99"),
        (momentum, "expected"),
    ):
        with pytest.raises(FormatError, match=told):
            OptimizerStep().decode(forged, old, [np.empty_like(array) for array in new])


@pytest.mark.parametrize("place", [6, 8, 2999, 3000, 2**32 - 1])
def test_an_exception_that_is_not_where_the_residuals_say(place: int) -> None:
    frame, old, new = a_frame()
    at = len(frame) - (5 + 4) - 4  # before the words of the exceptions: the last place of one
    assert struct.unpack_from("<BI", frame, at - 5) == (0, 4), "there is one"
    assert struct.unpack_from("<I", frame, at) == (7,)
    forged = frame[:at] + struct.pack("<I", place) + frame[at + 4 :]
    with pytest.raises(FormatError, match="exceptions are not where the residuals say"):
        OptimizerStep().decode(forged, old, [np.empty_like(array) for array in new])


class Unlike(Adam):
    """Rounds otherwise than the rule that has its number, as a decoder of another machine might."""

    @override
    def follow(self, *given: Any) -> Any:
        found = super().follow(*given)
        found.view(np.uint32)[:] += 1
        return found


def test_a_sample_that_does_not_come_back_fits_no_rule() -> None:
    optimizer, keys, _, by, _ = CASES["AdamW, foreach"]
    old, new = two_steps(optimizer, torch.float32, keys)
    step = OptimizerStep()
    assert step.encode(Unlike(), by, old, new) is not None
    assert step.try_sample(Unlike(), by, old, new) is None


def test_a_plane_that_claims_what_no_memory_has() -> None:
    frame, old, new = a_frame()
    head = 4 + 3 + 4 + 4 * Adam.num_scalars
    huge = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    step = OptimizerStep()
    for plane in (huge, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60) + bytes(20)):
        forged = frame[:head] + struct.pack("<BI", 1, len(plane)) + plane
        tracemalloc.start()
        with pytest.raises(FormatError):
            step.decode(forged, old, [np.empty_like(array) for array in new])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_memory_is_bounded() -> None:
    step = OptimizerStep()
    arrays = [np.zeros(MAX_ELEMENTS, np.uint32) for _ in range(3)]
    out = [np.empty_like(array) for array in arrays]
    tracemalloc.start()
    frame = step.encode(Adam(), Adam.scalars(decay=0.1, **AT), arrays, arrays)
    assert frame is not None
    step.decode(frame, arrays, out)
    assert tracemalloc.get_traced_memory()[1] < 10 * MAX_ELEMENTS
    tracemalloc.stop()


def test_denormals_taken_for_zeros() -> None:
    """It is a matter of each thread, and numpy's sums follow it, so both ends must have it alike."""
    frame, old, new = a_frame()
    old, new = ([array >> 6 for array in state] for state in (old, new))  # many of them
    found: list[object] = []

    def flushing() -> None:
        if not torch.set_flush_denormal(True):
            return
        found.append(flushes_denormals())
        try:
            OptimizerStep().decode(frame, old, [np.empty_like(array) for array in new])
        except FormatError as error:
            found.append(str(error))

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert not flushes_denormals()
    if not found:
        pytest.skip("this processor does not flush denormals")
    assert found[0] is True
    assert "made where denormals are kept" in str(found[1])
