"""Which tensors may lose bits, and how many, if the user asks for it. Knows names of codecs, no codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EIGHT_BITS = {"exp_avg": "lossy8-linear", "exp_avg_sq": "lossy8-log", "max_exp_avg_sq": "lossy8-log"}
"""Codecs for the moments of Adam and its kin, by the last part of their names. Moments forget: a rounding error fades
within some dozens of steps. State of other optimizers was not measured, and some of it must not be rounded: a centered
RMSprop takes the root of the difference of two averages."""
_BFLOAT16 = "lossy-bfloat16"

ROUNDED_DTYPE = "float32"
"""The only dtype that is rounded."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """Stores tensors in fewer bits; a load gives rounded values back. For `codec=`, by pattern of tensor names.

        codec={"optim/**": ckptlib.Lossy(bits=8)}

    Nothing but float32 is rounded. A pattern that is not a tensor's whole name reaches only its moments of Adam's kind
    (`exp_avg`, `exp_avg_sq`, `max_exp_avg_sq`), whatever else it covers: "**" rounds no weight. What it does not reach
    is stored without loss.

    dtype:  "bfloat16": half the bytes; each value is off by 0.4 % of itself at most. Rounds any tensor that a
            pattern names in full, too.
    bits:   8: a quarter of the bytes; `exp_avg` is off by 0.4 % of the largest value among its 256 neighbours at most,
            `exp_avg_sq` by 4.5 % of its own value, or too large if it is 3 billion times smaller than the largest
            value. Rounds moments only, even if another tensor is named in full.
    """

    dtype: str | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        if (self.dtype, self.bits) not in (("bfloat16", None), (None, 8)):
            raise ValueError(f"{self!r}: expected Lossy('bfloat16') or Lossy(bits=8)")

    def codec(self, pattern: str, name: str) -> str | None:
        """Returns the codec of the tensor `name`, which `pattern` covers, or None if it is to lose nothing."""
        moment = _EIGHT_BITS.get(name.rpartition("/")[2])
        if self.bits is not None:
            return moment
        return _BFLOAT16 if moment is not None or pattern == name else None

    def to_json(self) -> dict[str, object]:
        """Returns JSON for the writer process; `from_json` decodes it."""
        return {"dtype": self.dtype, "bits": self.bits}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lossy:
        return cls(data["dtype"], data["bits"])
