"""The user's choice of codec for each tensor: `codec=`. Knows no codec; `codecs/choice` knows what they can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptlib.policy.lossy import ROUNDED_DTYPE, Lossy
from ckptlib.policy.patterns import covers

AUTO = "auto"
"""What pays: decided by where the checkpoint goes, and by samples of the data."""
RAW = "raw"
"""The bytes as they lie in memory."""
PLANES = "planes"
"""Lossless and dense, whether it pays or not: floats by byte planes, everything else by zstd."""
WORDS = (AUTO, RAW, PLANES)

Asked = str | Mapping[str, str | Lossy]
"""A user's choice: one of WORDS, or such words and `Lossy` by pattern of tensor names."""


@dataclass(frozen=True, slots=True)
class CodecRules:
    """A word for each tensor; and for some a lossy codec, which applies if it rounds their dtype."""

    rules: tuple[tuple[str, str | Lossy], ...] = ()
    """(pattern, word or Lossy). The first that covers a name counts; a name that none covers is AUTO."""

    @classmethod
    def of(cls, asked: Asked) -> CodecRules:
        """Returns the rules that a user asked for. Raises ValueError or TypeError for an invalid choice."""
        if isinstance(asked, str):
            return cls((("*", _word(asked, "codec")),))
        if not isinstance(asked, Mapping):
            raise TypeError(f"codec={asked!r}: expected {_expected()}, or a dict of {_or_lossy()} by pattern of names")
        for pattern in asked:
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"codec={{{pattern!r}: ...}}: expected a pattern of tensor names, such as 'optim/**'")
        return cls(tuple((pattern, _value(pattern, value)) for pattern, value in asked.items()))

    @property
    def asked(self) -> Asked:
        """The choice that `of` turns into these rules."""
        match self.rules:
            case (("*", str(word)),):
                return word
        return dict(self.rules)

    def word(self, name: str) -> str:
        """Returns the word for the tensor of this name if it is to lose nothing."""
        words = ((pattern, value) for pattern, value in self.rules if isinstance(value, str))
        return next((word for pattern, word in words if covers(pattern, name)), AUTO)

    def lossy(self, name: str) -> str | None:
        """Returns the lossy codec for the float32 tensor of this name, or None if it is to lose nothing."""
        for pattern, value in self.rules:
            if not covers(pattern, name):
                continue
            if isinstance(value, str):
                return None
            if codec := value.codec(pattern, name):
                return codec
        return None

    def decides(self, name: str, dtype: str) -> str | None:
        """Returns the pattern that counts for the tensor of this name and dtype, or None if none covers it."""
        for pattern, value in self.rules:
            if not covers(pattern, name):
                continue
            if isinstance(value, str) or (dtype == ROUNDED_DTYPE and value.codec(pattern, name)):
                return pattern
        return None

    def to_json(self) -> list[list[object]]:
        """Returns JSON for the writer process; `from_json` decodes it."""
        return [[pattern, value if isinstance(value, str) else value.to_json()] for pattern, value in self.rules]

    @classmethod
    def from_json(cls, data: list[list[Any]]) -> CodecRules:
        return cls(tuple((pattern, v if isinstance(v, str) else Lossy.from_json(v)) for pattern, v in data))


def _value(pattern: str, value: object) -> str | Lossy:
    where = f"codec[{pattern!r}]"
    if isinstance(value, Lossy):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{where}={value!r}: expected {_or_lossy()}")
    return _word(value, where)


def _word(word: str, where: str) -> str:
    if word not in WORDS:
        raise ValueError(f"{where}={word!r}: expected {_expected()}")
    return word


def _expected() -> str:
    return ", ".join(map(repr, WORDS[:-1])) + f" or {WORDS[-1]!r}"


def _or_lossy() -> str:
    return ", ".join(map(repr, WORDS)) + " or ckptlib.Lossy(...)"
