"""What users may ask of `codec=`, and what it means for each name."""

from __future__ import annotations

import json

import pytest

from ckptlib.policy.codec import AUTO, PLANES, RAW, CodecRules
from ckptlib.policy.lossy import Lossy

NAME = "optim/state/layers.0.weight/exp_avg"


@pytest.mark.parametrize("word", [AUTO, RAW, PLANES])
def test_a_word_is_for_every_tensor(word: str) -> None:
    assert {CodecRules.of(word).word(name) for name in (NAME, "model/w", "w")} == {word}


def test_the_first_pattern_counts() -> None:
    rules = CodecRules.of({"optim/**/exp_avg": PLANES, "optim": RAW, "**": AUTO})
    assert rules.word(NAME) == PLANES
    assert rules.word(NAME + "_sq") == RAW
    assert rules.word("model/w") == AUTO


def test_what_no_pattern_covers_is_auto() -> None:
    assert CodecRules.of({"optim/**": PLANES}).word("model/w") == AUTO
    assert CodecRules().word("model/w") == AUTO


def test_lossy_counts_where_it_reaches_and_no_rule_before_covers() -> None:
    rules = CodecRules.of({"optim/frozen": RAW, "optim/**": Lossy(bits=8), "**": PLANES})
    assert rules.lossy("optim/w/exp_avg") == "lossy8-linear"
    assert rules.lossy("optim/w/exp_avg_sq") == "lossy8-log"
    assert rules.lossy("optim/frozen/exp_avg") is None
    assert rules.lossy("optim/w/step") is None
    assert rules.lossy("model/w") is None
    assert rules.word("optim/w/exp_avg") == PLANES, "for another dtype than it rounds"
    assert rules.word("optim/w/step") == PLANES
    assert rules.word("optim/frozen/exp_avg") == RAW
    assert CodecRules.of({"**": Lossy(bits=8)}).word("model/w") == AUTO


def test_the_first_lossy_that_reaches_a_name_counts() -> None:
    rules = CodecRules.of({"optim/w/exp_avg": Lossy("bfloat16"), "**": Lossy(bits=8), "model/w": Lossy("bfloat16")})
    assert rules.lossy("optim/w/exp_avg") == "lossy-bfloat16"
    assert rules.lossy("optim/v/exp_avg") == "lossy8-linear"
    assert rules.lossy("model/w") == "lossy-bfloat16", "named in full; the rule before does not reach it"
    assert rules.lossy("model/w/x") is None


@pytest.mark.parametrize("word", [AUTO, RAW, PLANES])
def test_no_word_loses_anything(word: str) -> None:
    assert CodecRules.of(word).lossy(NAME) is None
    assert CodecRules.of({"**": word}).lossy(NAME) is None
    assert CodecRules().lossy(NAME) is None


def test_survives_the_way_to_the_writer() -> None:
    rules = CodecRules.of({"optim/**": PLANES, "model": RAW, "ema/**": Lossy(bits=8), "ema/w": Lossy("bfloat16")})
    assert CodecRules.from_json(json.loads(json.dumps(rules.to_json()))) == rules


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("plane", r"codec='plane': expected 'auto', 'raw' or 'planes'"),
        ("", r"codec=''"),
        ({"optim/**": "zip"}, r"codec\['optim/\*\*'\]='zip': expected 'auto', 'raw' or 'planes'"),
        ({"": "raw"}, r"such as 'optim/\*\*'"),
        ({7: "raw"}, r"codec=\{7: ...\}"),
    ],
)
def test_refuses_words_that_mean_nothing(asked: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodecRules.of(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [None, 3, ["planes"], {"optim": None}, {"optim": 8}, Lossy(bits=8)])
def test_refuses_other_kinds_of_values(asked: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        CodecRules.of(asked)  # type: ignore[arg-type]
