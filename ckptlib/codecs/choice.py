"""Which codec a chunk gets, from the user's choice and from what pays. Pure: imports no codec, measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.codecs.registry import RAW
from ckptlib.policy import codec as asked
from ckptlib.policy.lossy import ROUNDED_DTYPE

PLANES, ZSTD = "planes", "zstd"

_WORTH_SAVING = 0.03
"""Share of the bytes; a smaller saving is not worth a load that has to decode."""

_HEADROOM = 1.1
"""How much faster than the store encoding must be. If both are equally fast, saving a sixth of the bytes makes a save
no shorter, because the store waits for the first frames."""


class Candidate(NamedTuple):
    """A codec to try on the chunks of one tensor."""

    codec: str
    """Name of the codec in `registry`."""
    if_it_pays: bool
    """Whether a sample and the store decide, by `weigh`; if not, the user did."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements that a decision rests on."""

    local: bool
    """Whether the store is a file system of this machine."""
    store_bps: float | None
    """Bytes per second that this process writes to the store; None if not known yet."""
    encode_bps: float
    """Raw bytes per second that this process encodes."""
    ratio: float
    """Encoded bytes over raw ones, in a sample."""


class Verdict(NamedTuple):
    """Whether to encode, and why."""

    encode: bool
    why: str
    """A sentence for `show` and the log."""


def candidate(rules: asked.CodecRules, name: str, dtype: str) -> Candidate:
    """Returns the codec to try on a tensor's chunks. `dtype` is torch's name, "" if a chunk holds several."""
    lossy = rules.lossy(name)
    if lossy is not None and dtype == ROUNDED_DTYPE:
        return Candidate(lossy, False)
    word = rules.word(name)
    if word == asked.RAW:
        return Candidate(RAW, False)
    return Candidate(PLANES if "float" in dtype else ZSTD, word == asked.AUTO)


def weigh(measured: Measured) -> Verdict:
    """Decides whether encoding pays if the user left the choice to ckptlib.

    Encoding runs alongside the upload, so a save ends when the slower of the two does. Encoding pays if it is faster
    than the store takes raw bytes: then the store is the bottleneck, and gets fewer bytes.
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
