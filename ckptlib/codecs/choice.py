"""Which codec a chunk gets: what users ask for, and what pays. Pure: imports no codec, measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.codecs.registry import RAW
from ckptlib.policy import codec as asked
from ckptlib.policy.lossy import ROUNDED_DTYPE

PLANES, ZSTD = "planes", "zstd"

_WORTH_SAVING = 0.03
"""Of the bytes: less is not worth a load that has to decode."""

_HEADROOM = 1.1
"""Encoding must be faster than the store by this: where the two are as fast, a sixth of the bytes fewer makes a save no
shorter, since the first frames are waited for."""


class Candidate(NamedTuple):
    """For the chunks of one tensor."""

    codec: str
    """By the name that `registry` knows it by."""
    if_it_pays: bool
    """Whether a sample and the store decide; see `weigh`. Otherwise the user did."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a decision stands on."""

    local: bool
    """The store is a file system of this machine."""
    store_bps: float | None
    """Bytes per second that this process gets into it; None: not known yet."""
    encode_bps: float
    """Raw bytes per second that it encodes."""
    ratio: float
    """Encoded bytes over raw ones, of a sample."""


class Verdict(NamedTuple):
    """What to do, and why."""

    encode: bool
    why: str
    """A sentence for `show` and the log."""


def candidate(rules: asked.CodecRules, name: str, dtype: str) -> Candidate:
    """The codec to try on a tensor's chunks. `dtype`: torch's name of it, "" where a chunk holds several."""
    lossy = rules.lossy(name)
    if lossy is not None and dtype == ROUNDED_DTYPE:
        return Candidate(lossy, False)
    word = rules.word(name)
    if word == asked.RAW:
        return Candidate(RAW, False)
    return Candidate(PLANES if "float" in dtype else ZSTD, word == asked.AUTO)


def weigh(measured: Measured) -> Verdict:
    """Whether encoding pays where nobody asked for it.

    Encoding runs beside the upload, so that a save ends when the slower of the two does: encoding pays where it is
    faster than the store takes raw bytes, for then the store is what is waited for, and gets fewer.
    """
    if measured.local:
        return Verdict(False, "raw: the store is local")
    if measured.store_bps is None:
        return Verdict(False, "raw: the speed of the store is not known yet")
    saved, store, encoding = 1 - measured.ratio, _speed(measured.store_bps), _speed(measured.encode_bps)
    if saved < _WORTH_SAVING:
        return Verdict(False, f"raw: encoding saves {max(0.0, saved):.1%}, less than {_WORTH_SAVING:.0%}")
    if _HEADROOM * measured.store_bps >= measured.encode_bps:
        return Verdict(False, f"raw: the store takes {store}, encoding reaches {encoding}")
    return Verdict(True, f"encoded: saves {saved:.1%}; the store takes {store}, encoding reaches {encoding}")


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
