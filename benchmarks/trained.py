"""Real training state for benchmarks of codecs: a small GPT, trained by AdamW on the sources of Python's own library.

Random numbers say nothing about codecs: how far weights and moments compress follows from how they came about. The text
is on every machine, so that nothing is downloaded. Trained once per machine: see `states`. Knows no codec.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

KINDS = ("master", "bf16", "exp_avg", "exp_avg_sq")
"""Of each parameter: its fp32 weight, that in bfloat16, and AdamW's two moments in fp32."""
STEPS = (300, 301, 302, 310, 400)
"""Neighbours, and steps 10 and 100 apart."""
LEARNING_RATE, WARMUP, BETAS, WEIGHT_DECAY = 6e-4, 50, (0.9, 0.95), 0.1
_TEXT_BYTES = 3_000_000
_HELD_OUT = 0.05

State = dict[str, dict[str, Tensor]]
"""By kind, by name of the parameter."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of its batches."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    words: int


REAL = Size(width=192, layers=3, heads=4, context=64, batch=8, words=2048)
"""2.1 M parameters."""
TOY = Size(width=32, layers=1, heads=2, context=16, batch=2, words=256)


def states(size: Size = REAL, steps: Sequence[int] = STEPS) -> dict[int, State]:
    """By step. The first call on a machine trains: 40 s of one core for `STEPS`. Later ones read what it left in /tmp.

    Another user, torch, Python or processor has a file of its own: floating-point results differ between them.
    """
    place = Path(tempfile.gettempdir()) / f"ckptlib-trained-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user; set TMPDIR to a directory of your own")
    missing = [step for step in steps if not _path(place, size, step).exists()]
    if missing:
        training = Training(size)
        for step in sorted(missing):
            training.advance(step - training.step)
            _put(training.state(), _path(place, size, step))
    return {step: _get(_path(place, size, step)) for step in steps}


class Training:
    """A run: the same seed gives the same bits. `copy.deepcopy` forks it."""

    def __init__(self, size: Size = REAL, seed: int = 0) -> None:
        """`seed`: of the initial weights, and of which text stands in which batch."""
        self.size, self.seed, self.step = size, seed, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Gpt(size)
        groups: list[dict[str, object]] = [
            {"params": [weight for weight in self.model.parameters() if weight.dim() > 1]},
            {"params": [weight for weight in self.model.parameters() if weight.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def advance(self, num_steps: int) -> list[float]:
        """Trains; returns the loss of each step, on its own batch."""
        with _one_thread():
            return [self._one() for _ in range(num_steps)]

    def _one(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.step + 1) / WARMUP)
        self.optimizer.zero_grad()
        loss = self._loss(_tokens(self.size.words)[0], self.seed * 1_000_003 + self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def held_out_loss(self, num_batches: int = 100) -> float:
        """On text that no run trains on: the same batches for every run, so that losses of runs can be compared."""
        with torch.no_grad(), _one_thread():
            text = _tokens(self.size.words)[1]
            return sum(float(self._loss(text, number)) for number in range(num_batches)) / num_batches

    def _loss(self, text: Tensor, batch: int) -> Tensor:
        context = self.size.context
        generator = torch.Generator().manual_seed(batch)
        starts = torch.randint(len(text) - context - 1, (self.size.batch, 1), generator=generator)
        words = text[starts + torch.arange(context + 1)]
        logits = self.model(words[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def state(self) -> State:
        """Copies of it."""
        found: State = {kind: {} for kind in KINDS}
        for name, weight in self.model.named_parameters():
            found["master"][name] = weight.detach().clone()
            found["bf16"][name] = weight.detach().bfloat16()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[kind][name] = self.optimizer.state[weight][kind].clone()
        return found


class Block(nn.Module):
    """Attention, then two linear layers; each on the normalised stream, and added to it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )

    @override
    def forward(self, stream: Tensor) -> Tensor:
        joint = self.query_key_value(self.attention_norm(stream))
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in joint.tensor_split(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(seen.transpose(1, 2).flatten(2))
        return stream + self.feed_forward(stream)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Words in, logits of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    @override
    def forward(self, words: Tensor) -> Tensor:
        stream = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))  # type: ignore[no-any-return]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same bits on any number of cores; and four times as fast as two threads on two cores that others use, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _tokens(num_words: int) -> tuple[Tensor, Tensor]:
    """The library's text as numbers of words, the most frequent one 1, rare ones 0: to train on, and held out."""
    words = list(itertools.islice(_split(), _TEXT_BYTES // 3))
    frequent = collections.Counter(words).most_common(num_words - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
    tokens = torch.tensor([numbers.get(word, 0) for word in words])
    cut = int(len(tokens) * (1 - _HELD_OUT))
    return tokens[:cut], tokens[cut:]


def _split() -> Iterator[str]:
    """Names, numbers, line breaks with their indentation; other characters one by one, or with a blank before."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from re.findall(r"[^\W\d]+|\d+|\n\s*| ?[^\w\s]|\s+", text)


def _path(place: Path, size: Size, step: int) -> Path:
    """Named by all that the bits depend on, this file included."""
    says = (size, torch.__version__, platform.python_version(), _processor())
    made = hashlib.sha256(repr(says).encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    return place / f"{made}-step-{step}.safetensors"


def _processor() -> str:
    return torch.backends.cpu.get_cpu_capability() + platform.machine()


def _put(state: State, path: Path) -> None:
    """Whole or not at all: another process may train the same at the same time."""
    flat = {f"{kind}/{name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file(flat, unfinished)
    unfinished.replace(path)


def _get(path: Path) -> State:
    found: State = {kind: {} for kind in KINDS}
    for key, tensor in load_file(path).items():
        kind, _, name = key.partition("/")
        found[kind][name] = tensor
    return found
