"""What users may ask of `codec=`, and what it means for each name."""

from __future__ import annotations

import json

import pytest

from ckptlib.policy.codec import AUTO, PLANES, RAW, CodecRules

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


def test_survives_the_way_to_the_writer() -> None:
    rules = CodecRules.of({"optim/**": PLANES, "model": RAW})
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


@pytest.mark.parametrize("asked", [None, 3, ["planes"], {"optim": None}, {"optim": 8}])
def test_refuses_other_kinds_of_values(asked: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        CodecRules.of(asked)  # type: ignore[arg-type]
