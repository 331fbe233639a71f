"""Names that only a checkpoint has, or only a state, told by all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from helpers.alike_ranks import AlikeRanks
from helpers.calls import num_calls
from rankthreads import run_ranks

from ckptlib.loading.lacked import lacked_anywhere
from ckptlib.loading.targets import Targets
from ckptlib.ranks.group import Group


def wanted(unexpected: list[str], missing: list[str], plain: set[str], taken: set[str]) -> Targets:
    found: Any = SimpleNamespace(unexpected=unexpected, missing=missing, plain=plain, taken=taken, excused=list)
    return cast(Targets, found)


def test_ranks_of_a_pipeline_lack_together_what_no_stage_has() -> None:
    """Two stages of two ranks each; "old" is nobody's, and "epoch" a value of the second stage alone."""
    mine = [
        wanted(["stage 1", "old", "epoch", "@rng/torch"], [], {"epoch"}, set()),
        wanted(["stage 0", "old", "@rng/torch"], ["new"], set(), {"epoch"}),
    ]

    def on_rank(group: Group) -> tuple[list[str], list[str], list[str]]:
        return lacked_anywhere(group, mine[group.rank // 2])

    assert run_ranks(4, on_rank) == [(["old"], ["new"], [])] * 4


def test_what_ranks_of_a_stage_say_alike_is_read_once() -> None:
    names = [f"layers.{i}" for i in range(10)]
    group, theirs = AlikeRanks(), wanted(names, [], set(), set())
    assert lacked_anywhere(group, theirs) == (names, [], [])
    assert num_calls(lambda: lacked_anywhere(group, theirs)) < group.size


def test_only_the_generators_own_names_go_unsaid() -> None:
    theirs = wanted(["@rng", "@rng/python", "@rngs/mine"], [], set(), set())
    assert lacked_anywhere(AlikeRanks(), theirs) == (["@rngs/mine"], [], [])
