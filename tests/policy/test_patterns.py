"""Patterns of tensor names mean the same to every argument that takes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.loading.selection import Selection, check_selection
from ckptlib.policy.patterns import Patterns, covers

NAMES = st.lists(st.sampled_from(["a", "b", "ab", "exp_avg", "exp_avg_sq"]), min_size=1, max_size=4).map("/".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "**", "exp_avg*", "a*", "?", "[ab]"]), min_size=1, max_size=4).map(
    "/".join
)


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("optim", "optim/state/w/exp_avg", True),
        ("optim", "optimizer/state", False),
        ("optim/**", "optim/state/w/exp_avg", True),
        ("optim/**", "optim", False),
        ("optim/**/exp_avg*", "optim/state/w/exp_avg_sq", True),
        ("optim/**/exp_avg", "optim/state/w/exp_avg_sq", False),
        ("*.weight", "model/layers.0.weight", True),
        ("model/w", "model/w", True),
        ("model/[w]", "model/[w]", True),  # a name that looks like a pattern names itself
        ("MODEL", "model", False),
    ],
)
def test_covers(pattern: str, name: str, covered: bool) -> None:
    assert covers(pattern, name) is covered


@settings(deadline=None)
@given(PATTERNS, NAMES)
def test_only_of_a_load_means_the_same(pattern: str, name: str) -> None:
    assert covers(pattern, name) == Selection(pattern, None).wanted(name)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"only": 3}, "only=3: expected names or patterns, such as only='model/"),
        ({"only": ["model", 3]}, r"only=\['model', 3\]: expected names"),
        ({"only": iter(["model"])}, "only=<.*>: expected names"),
        ({"optional": None}, "optional=None: expected names"),
        ({"rename": "model"}, "map='model': expected a function, or a dict"),
        ({"rename": {3: "model"}}, "map={3: 'model'}: expected a function, or a dict"),
    ],
)
def test_what_is_neither_names_nor_patterns_is_told(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_selection(**{"only": None, "rename": None, "optional": (), **asked})


def test_what_is_taken() -> None:
    for only in (None, "model", ["model"], ("model",), {"model"}, {"model": 1}.keys()):
        check_selection(only, {"model": "net"}, ())
    check_selection(None, str.upper, [])


@given(st.lists(st.text("ab/*?[]", max_size=5)), st.text("ab/", max_size=6))
def test_several_cover_what_each_covers(patterns: list[str], name: str) -> None:
    assert Patterns(patterns).covering(name) == {pattern for pattern in patterns if covers(pattern, name)}
