"""Which codec the user wants for which tensors: `codec=`. Knows no codec; `codecs/choice` knows what they can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptlib.policy.patterns import covers

AUTO = "auto"
"""What pays: decided by where the checkpoint goes, and by samples of what is saved."""
RAW = "raw"
"""As it lies in memory."""
PLANES = "planes"
"""Lossless and dense, whether it pays or not: floats by byte planes, everything else by zstd."""
WORDS = (AUTO, RAW, PLANES)

Asked = str | Mapping[str, str]
"""As users write it: one of WORDS, or such words by pattern of tensor names."""


@dataclass(frozen=True, slots=True)
class CodecRules:
    """A word for each tensor."""

    rules: tuple[tuple[str, str], ...] = ()
    """(pattern, word). The first that covers a name counts; a name that none covers is AUTO."""

    @classmethod
    def of(cls, asked: Asked) -> CodecRules:
        """Raises ValueError or TypeError for what no user can have meant."""
        if isinstance(asked, str):
            return cls((("*", _word(asked, "codec")),))
        if not isinstance(asked, Mapping):
            raise TypeError(f"codec={asked!r}: expected {_expected()}, or a dict of these by pattern of tensor names")
        for pattern in asked:
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"codec={{{pattern!r}: ...}}: expected a pattern of tensor names, such as 'optim/**'")
        return cls(tuple((pattern, _word(word, f"codec[{pattern!r}]")) for pattern, word in asked.items()))

    def word(self, name: str) -> str:
        """What is asked for the tensor of this name."""
        return next((word for pattern, word in self.rules if covers(pattern, name)), AUTO)

    def to_json(self) -> list[list[str]]:
        """For the writer process; `from_json` is its inverse."""
        return [list(rule) for rule in self.rules]

    @classmethod
    def from_json(cls, data: list[list[str]]) -> CodecRules:
        return cls(tuple((pattern, word) for pattern, word in data))


def _word(word: object, where: str) -> str:
    if not isinstance(word, str):
        raise TypeError(f"{where}={word!r}: expected {_expected()}")
    if word not in WORDS:
        raise ValueError(f"{where}={word!r}: expected {_expected()}")
    return word


def _expected() -> str:
    return ", ".join(map(repr, WORDS[:-1])) + f" or {WORDS[-1]!r}"
