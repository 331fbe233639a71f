"""What users ask for is what is tried; where they leave it open, what pays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs import registry
from ckptlib.codecs.choice import PLANES, ZSTD, Candidate, Measured, candidate, weigh
from ckptlib.codecs.float_bits import KINDS
from ckptlib.format.dtypes import _DTYPES
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.lossy import Lossy

FAR = Measured(local=False, store_bps=0.2e9, encode_bps=1.9e9, ratio=0.83)


@pytest.mark.parametrize("dtype", [*_DTYPES, ""])
def test_every_dtype_has_a_codec_that_knows_it(dtype: str) -> None:
    asked_for = candidate(CodecRules.of("planes"), "w", dtype)
    assert asked_for == Candidate(PLANES if dtype in KINDS else ZSTD, False)
    assert candidate(CodecRules.of("auto"), "w", dtype) == (asked_for.codec, True)
    assert candidate(CodecRules.of("raw"), "w", dtype) == (registry.RAW, False)
    assert registry.find(asked_for.codec).name == asked_for.codec


def test_by_name() -> None:
    rules = CodecRules.of({"optim/**": "planes", "model": "raw"})
    assert candidate(rules, "optim/state/w/exp_avg", "float32") == (PLANES, False)
    assert candidate(rules, "optim/state/w/step", "int64") == (ZSTD, False)
    assert candidate(rules, "model/w", "float32") == (registry.RAW, False)
    assert candidate(rules, "ema/w", "float32") == (PLANES, True)


def test_lossy_rounds_float32_alone() -> None:
    rules = CodecRules.of({"**": Lossy(bits=8), "optim/**": "planes"})
    assert candidate(rules, "optim/w/exp_avg", "float32") == ("lossy8-linear", False)
    assert candidate(rules, "optim/w/exp_avg", "bfloat16") == (PLANES, False)
    assert candidate(rules, "optim/w/exp_avg", "") == (ZSTD, False), "a chunk of several tensors"
    assert candidate(rules, "model/w", "float32") == (PLANES, True)


@pytest.mark.parametrize("asked", ["auto", "planes", "raw"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_nothing_is_lost_unless_asked_for(asked: str, dtype: str) -> None:
    codec = candidate(CodecRules.of(asked), "optim/w/exp_avg", dtype).codec
    assert codec == registry.RAW or registry.find(codec).lossless


def test_encodes_for_a_slow_store() -> None:
    encode, why = weigh(FAR)
    assert encode
    assert why == "encoded: saves 17.0%; the store takes 0.20 GB/s, encoding reaches 1.90 GB/s"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"local": True}, "raw: the store is local"),
        ({"store_bps": None}, "raw: the speed of the store is not known yet"),
        ({"store_bps": 2e9}, "raw: the store takes 2.00 GB/s, encoding reaches 1.90 GB/s"),
        ({"store_bps": 1.8e9}, "raw: the store takes 1.80 GB/s, encoding reaches 1.90 GB/s"),
        ({"ratio": 0.975}, "raw: encoding saves 2.5%, less than 3%"),
        ({"ratio": 1.2}, "raw: encoding saves 0.0%, less than 3%"),
    ],
)
def test_raw_where_it_does_not_pay(change: dict[str, float], why: str) -> None:
    fields = {name: getattr(FAR, name) for name in Measured.__slots__}
    assert weigh(Measured(**{**fields, **change})) == (False, why)


SPEEDS = st.floats(1e6, 1e11)


@settings(deadline=None)
@given(SPEEDS, SPEEDS, st.floats(0.01, 1.5))
def test_a_save_is_never_longer_for_it(store_bps: float, encode_bps: float, ratio: float) -> None:
    if weigh(Measured(False, store_bps, encode_bps, ratio)).encode:
        assert max(1 / encode_bps, ratio / store_bps) <= 1 / store_bps  # alike where one is larger by a last bit
        assert ratio <= 0.97
