"""A codec that tells what is asked of it, and numbers for it."""

from __future__ import annotations

import threading
import time

import numpy as np

from ckptlib.codecs.codec import Content
from ckptlib.codecs.planes import Planes

MIB = 1 << 20
WIDTH = 64


def floats(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, WIDTH)).astype(np.float32)


def mib(num: int, seed: int = 0) -> np.ndarray:
    """Weights of so many MiB."""
    return floats(num * MIB // 4 // WIDTH, seed)


class Watched(Planes):
    """The real codec; knows how often it was called, and can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.fail_at: int | None = None
        self.stalls: dict[int, float] = {}
        """Seconds that a call takes longer, by its number, from 1."""
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise OSError("an encoder failed, as planned")
        self.gate.wait()
        time.sleep(self.stalls.get(self.num_calls, 0.0))
        return super().encode(raw, content)
