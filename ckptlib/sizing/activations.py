"""Memory of a transformer's activations. Pure.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys 2023): 16-bit activations, with
tensor and sequence parallelism. No checkpoint holds activations: they are computed anew in each step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a model and of one rank's micro-batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    tensor_parallel: int = 1

    @property
    def activations(self) -> float:
        """Bytes of one rank for a micro-batch, without recomputation: layers x sbh (34/t + 5as/(ht))."""
        s, b, h, a, t = self.sequence, self.batch, self.hidden, self.heads, self.tensor_parallel
        return self.layers * s * b * h * (34 / t + 5 * a * s / (h * t))

    @property
    def activations_without_scores(self) -> float:
        """The same if attention scores are recomputed, as FlashAttention does: layers x sbh 34/t."""
        return self.layers * self.sequence * self.batch * self.hidden * 34 / self.tensor_parallel
