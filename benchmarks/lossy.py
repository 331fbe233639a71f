"""What does a resume from lossy optimizer state do to the loss? A small GPT, held-out loss after 10 to 300 more steps.

All runs go on from one trained state, with the same batches: bit for bit, with moments through a lossy codec, or with
something worse. How far runs differ that lost nothing shows what a difference means: one with the last bit of one
weight flipped, and two with other batches. One process, one thread: the same figures whenever a machine runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.figures import Figures, Options, run
from benchmarks.trained import REAL, TOY, Training
from ckptlib.codecs.codec import Codec, Content
from ckptlib.codecs.registry import find

EXACT = "exact"
NOISE = ("exact, one bit of one weight flipped", "exact, other batches", "exact, again other batches")
LOSSY = {
    "8 bits": {"exp_avg": "lossy8-linear", "exp_avg_sq": "lossy8-log"},
    "8 bits, resumed 10 times": {"exp_avg": "lossy8-linear", "exp_avg_sq": "lossy8-log"},
    "bfloat16": {"exp_avg": "lossy-bfloat16", "exp_avg_sq": "lossy-bfloat16"},
    "8 bits, linear exp_avg_sq": {"exp_avg": "lossy8-linear", "exp_avg_sq": "lossy8-linear"},
}
"""By subject: the codec of each moment. The last one cannot be asked for: it is here to show why."""
NOTHING = "no moments"


def main(arguments: list[str]) -> None:
    run(arguments, "lossy", measure, gb=0.0)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    size, trained, points = (TOY, 10, (10, 20)) if options.toy else (REAL, 300, (10, 30, 100, 200, 300))
    start = Training(size)
    start.advance(trained)
    num_weights = sum(weight.numel() for weight in start.model.parameters())
    case = f"AdamW, {num_weights:,} parameters, {trained} steps before"

    exact: dict[int, float] = {}

    def follow(subject: str, training: Training, again: Callable[[Training], object] | None = None) -> None:
        for step in range(10, points[-1] + 1, 10):
            training.advance(10)
            if step in points:
                loss = training.held_out_loss(2 if options.toy else 100)
                if subject == EXACT:
                    exact[step] = loss
                    figures.add(case, subject, f"loss after {step} steps", "nats per word", [loss])
                else:
                    what = f"loss after {step} steps, less that of the exact run"
                    figures.add(case, subject, what, "nats per word", [loss - exact[step]], step=step)
            if again is not None and step % (points[-1] // 10) == 0:
                again(training)

    follow(EXACT, copy.deepcopy(start))
    for number, subject in enumerate(NOISE):
        fork = copy.deepcopy(start)
        if number:
            fork.seed = number
        else:
            _flip_one_bit(fork)
        follow(subject, fork)
    for subject, names in LOSSY.items():
        codecs = {kind: _codec(name) for kind, name in names.items()}
        fork = copy.deepcopy(start)
        nbytes = through(fork, codecs)
        figures.add(case, subject, "moments, stored", "B per parameter", [nbytes / num_weights])
        follow(subject, fork, (lambda training, c=codecs: through(training, c)) if "10 times" in subject else None)
    fork = copy.deepcopy(start)
    for state in fork.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    follow(NOTHING, fork)


def through(training: Training, codecs: dict[str, Codec]) -> int:
    """Replaces moments by what comes back of their frames. Returns how many bytes the frames have."""
    nbytes = 0
    for state in training.optimizer.state.values():
        for kind, codec in codecs.items():
            nbytes += _through(state[kind], codec)
    return nbytes


def _through(tensor: Tensor, codec: Codec) -> int:
    raw = memoryview(tensor.numpy()).cast("B")
    frame = codec.encode(raw, Content("float32", 1))
    if frame is None:
        return raw.nbytes
    codec.decode(memoryview(frame), raw)
    return len(frame)


def _codec(name: str) -> Codec:
    codec = find(name)
    assert isinstance(codec, Codec)
    return codec


def _flip_one_bit(training: Training) -> None:
    with torch.no_grad():
        weight = next(training.model.parameters())
        weight.view(torch.int32).reshape(-1)[0] ^= 1
