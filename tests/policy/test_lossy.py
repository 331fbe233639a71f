"""Which tensors Lossy reaches: moments, and what is named in full; never a weight by accident."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib.codecs.codec import Codec
from ckptlib.codecs.registry import find
from ckptlib.policy.lossy import Lossy
from ckptlib.state.flatten import flatten

EIGHT, HALF = Lossy(bits=8), Lossy("bfloat16")
both = pytest.mark.parametrize("lossy", [EIGHT, HALF])


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("optim/layers.0.weight/exp_avg", "lossy8-linear"),
        ("optim/layers.0.weight/exp_avg_sq", "lossy8-log"),
        ("optim/layers.0.weight/max_exp_avg_sq", "lossy8-log"),
        ("exp_avg", "lossy8-linear"),
        ("optim/layers.0.weight/step", None),
        ("optim/layers.0.weight/square_avg", None),
        ("optim/layers.0.weight/grad_avg", None),
        ("optim/layers.0.weight/momentum_buffer", None),
        ("optim/layers.0.weight/exp_avg_sq_row", None),
        ("model/layers.0.weight", None),
        ("model/layers.0.exp_avg", None),
        ("exp_avg/weight", None),
        ("", None),
    ],
)
def test_the_codec_follows_from_the_last_part_of_the_name(name: str, codec: str | None) -> None:
    assert EIGHT.codec("**", name) == codec
    assert EIGHT.codec(name, name) == codec, "named in full, too"
    assert HALF.codec("**", name) == (codec and "lossy-bfloat16")
    assert HALF.codec(name, name) == "lossy-bfloat16"


@both
@pytest.mark.parametrize("pattern", ["**", "*", "model", "model/", "model/**", "model/w*", "model/?", "[a-z]*"])
def test_no_pattern_rounds_a_weight(lossy: Lossy, pattern: str) -> None:
    assert lossy.codec(pattern, "model/w") is None


@both
@given(st.text("*?[]a/_", max_size=6), st.lists(st.sampled_from(["model", "w", "a", "*", "step"]), min_size=1))
def test_no_pattern_but_the_name_itself_rounds_what_is_no_moment(lossy: Lossy, pattern: str, parts: list[str]) -> None:
    name = "/".join(parts)
    found = lossy.codec(pattern, name)
    assert found is None or (pattern == name and lossy == HALF)


@both
def test_of_a_real_state_it_reaches_the_moments_only(lossy: Lossy) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    names = [leaf.name for leaf in flatten({"model": model, "optim": optimizer}).leaves]
    reached = {name for name in names if fnmatchcase(name, "**") and lossy.codec("**", name)}
    assert len(reached) == 4 * 3
    assert {name.rpartition("/")[2] for name in reached} == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert len(names) > len(reached) + 4


@both
def test_every_codec_it_names_is_there(lossy: Lossy) -> None:
    for moment in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        codec = find(lossy.codec("**", moment) or "")
        assert isinstance(codec, Codec)
        assert not codec.lossless


@both
def test_survives_the_way_to_the_writer(lossy: Lossy) -> None:
    assert Lossy.from_json(json.loads(json.dumps(lossy.to_json()))) == lossy
    assert ckptlib.Lossy is Lossy


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bits": 4}, {"bits": 16}, {"dtype": "float16"}, {"dtype": "bfloat16", "bits": 8}, {"bits": "8"}, {"bits": 0}],
)
def test_refuses_what_it_cannot_do(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected Lossy\('bfloat16'\) or Lossy\(bits=8\)"):
        Lossy(**arguments)  # type: ignore[arg-type]
