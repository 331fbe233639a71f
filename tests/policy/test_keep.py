"""Which steps Keep drops, and what it refuses."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.best import Best
from ckptlib.policy.keep import Keep

SAVES = st.lists(st.builds(SaveId, st.integers(0, 60), st.just(GenerationId(1, "0" * 8))), unique=True)


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_drops_all_but_the_newest_and_the_first_from_each_multiple_on(
    saves: list[SaveId], last: int, every: int | None
) -> None:
    dropped = Keep(last, every).choose(saves, {}, {})
    assert dropped == sorted(dropped)
    assert set(dropped) <= set(saves)
    for save in saves:
        newer = sum(other.step > save.step for other in saves)
        multiples = range(every, 61, every) if every else ()
        firsts = [min((other.step for other in saves if other.step >= n), default=None) for n in multiples]
        stays = newer < last or save.step in firsts or (every is not None and save.step == 0)
        assert (save in dropped) == (not stays)
    if saves:
        assert max(saves) not in dropped


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_again_drops_nothing_more(saves: list[SaveId], last: int, every: int | None) -> None:
    keep = Keep(last, every)
    assert keep.choose([save for save in saves if save not in keep.choose(saves, {}, {})], {}, {}) == []


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 3), st.integers(1, 10), st.randoms())
def test_what_every_keeps_does_not_depend_on_when_retention_looks(
    gaps: list[int], last: int, every: int, chance: random.Random
) -> None:
    """Nor on how often, if each step is kept while it is the newest."""
    keep, lazy, eager = Keep(last, every), list[SaveId](), list[SaveId]()
    for gap in gaps:
        save = SaveId(lazy[-1].step + gap if lazy else gap, GenerationId(1, "0" * 8))
        lazy.append(save)
        eager.append(save)
        if chance.random() < 0.5:
            dropped = keep.choose(eager, {}, {})
            eager = [other for other in eager if other not in dropped]
    assert {*lazy} - {*keep.choose(lazy, {}, {})} == {*eager} - {*keep.choose(eager, {}, {})}
    assert not any(save.step % every == 0 for save in keep.choose(lazy, {}, {}))


def test_keep_refuses_what_would_drop_the_newest() -> None:
    with pytest.raises(ValueError, match="last >= 1"):
        Keep(last=0)
    with pytest.raises(ValueError, match="every=0"):
        Keep(every=0)


class Told(NamedTuple):
    """What a manifest says."""

    created: float
    metrics: dict[str, float]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best": "val_loss"}, r"'val_loss' are best is not said: expected mode='min' .* got None"),
        ({"best": "val_loss", "mode": "least"}, "got 'least'"),
        ({"best": "", "mode": "min"}, "expected the name of a metric"),
        ({"best": 3, "mode": "min"}, "expected the name of a metric"),
        ({"mode": "min"}, "these need best=, the name of a metric"),
        ({"num_best": 2}, "these need best=, the name of a metric"),
        ({"best": "val_loss", "mode": "min", "num_best": 0}, "expected a number of steps >= 1"),
        ({"within": timedelta(hours=-1)}, r"expected a time above 0, such as timedelta\(hours=24\)"),
        ({"within": timedelta(0)}, "expected a time above 0"),
        ({"within": 3600}, "expected a timedelta"),
        ({"exempt": [1, 2]}, "expected a function of the step, such as lambda step"),
        ({"last": 1.5}, r"Keep\(last=1.5\): expected a whole number, not a float"),
        ({"every": 2.5}, r"Keep\(every=2.5\): expected a whole number, not a float"),
        ({"last": True}, r"Keep\(last=True\): expected a whole number, not a bool"),
        ({"best": "acc", "mode": "max", "num_best": "2"}, r"Keep\(num_best='2'\): expected a whole number, not a str"),
        ({"grace": 5}, r"Keep\(grace=5\): expected a timedelta"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Keep(**options)


def test_what_the_writer_is_told_is_what_the_trainer_said() -> None:
    keep = Keep(2, 100, timedelta(hours=3), timedelta(days=1), "acc", "max", 4, exempt=bool)
    assert Keep.from_json(json.loads(json.dumps(keep.to_json()))) == replace(keep, exempt=None)
    assert Keep.from_json(Keep().to_json()) == Keep()
    longest = Keep.from_json(Keep(grace=timedelta.max, within=timedelta.max).to_json())
    assert longest.grace == longest.within == timedelta(days=timedelta.max.days)


def test_of_equals_the_latest_is_the_best_and_nan_never_is() -> None:
    saves = [SaveId(step, GenerationId(1, "0" * 8)) for step in range(6)]
    losses = [math.nan, 2.0, 1.0, 1.0, -math.inf, math.nan]
    told = {save: Told(0.0, {"loss": loss}) for save, loss in zip(saves, losses, strict=True)}
    assert Best("loss", "min").choose({save: t.metrics["loss"] for save, t in told.items()}, 3) == [
        saves[4],
        saves[3],
        saves[2],
    ]
    assert Keep(last=1, best="loss", mode="max").choose(saves, told, {}) == [saves[0], *saves[2:5]]
    told[saves[1]] = Told(0.0, {})
    assert Keep(last=1, best="loss", mode="max").choose(saves, told, {}) == [*saves[:3], saves[4]]
    assert Keep(last=1, best="acc", mode="max").choose(saves, told, {}) == saves[:5]


def test_within_counts_from_the_newest_step() -> None:
    saves = [SaveId(step, GenerationId(1, "0" * 8)) for step in range(4)]
    told = {save: Told(1e9 + 3600.0 * save.step, {}) for save in saves}
    put = {save: told[save].created + 60.0 for save in saves}
    assert Keep(last=1, within=timedelta(hours=2)).choose(saves, told, put) == saves[:1]
    del told[saves[3]]  # its manifest cannot be read
    assert Keep(last=1, within=timedelta(hours=1)).choose(saves, told, put) == saves[:1]


def test_within_goes_by_two_clocks() -> None:
    """The job has gone on on a host whose clock is a day ahead; or all was copied a day later, the newest step last."""
    saves = [SaveId(step, GenerationId(1, "0" * 8)) for step in range(4)]
    hourly, keep = {save: 1e9 + 3600.0 * save.step for save in saves}, Keep(last=1, within=timedelta(hours=2))
    ahead = {save: Told(at + 86400.0 * (save.step > 1), {}) for save, at in hourly.items()}
    assert keep.choose(saves, ahead, hourly) == saves[:1]
    told = {save: Told(at, {}) for save, at in hourly.items()}
    assert keep.choose(saves, told, {save: 1e9 + 86400.0 + save.step for save in saves}) == []
    assert keep.choose(saves, told, {**hourly, saves[0]: hourly[saves[3]]}) == []
    assert keep.choose(saves, told, {save: at for save, at in hourly.items() if save != saves[3]}) == []  # who knows?
    assert keep.choose(saves, told, {saves[3]: hourly[saves[3]]}) == saves[:1]


def test_copies_of_a_step_are_one_step_of_which_the_latest_stays() -> None:
    """Each start of a job that crashes may save the step again that it went on from."""
    first, *again = (SaveId(36, GenerationId(n, "0" * 8)) for n in range(1, 6))
    earlier = [SaveId(step, GenerationId(1, "0" * 8)) for step in (9, 10, 22)]
    saves = [*earlier, first, *again]
    told = {save: Told(1e9 + save.step, {"loss": 1.0 + (save.step != 36)}) for save in saves}
    put = {save: told[save].created for save in saves}
    assert Keep(last=3).choose(saves, told, {}) == [earlier[0], first, *again[:-1]]
    assert Keep(last=1, every=10).choose(saves, told, {}) == [earlier[0], first, *again[:-1]]
    assert Keep(last=1, every=36).choose(saves, told, {}) == [*earlier, first, *again[:-1]]
    assert Keep(last=1, within=timedelta(seconds=14)).choose(saves, told, put) == [*earlier[:2], first, *again[:-1]]
    assert Keep(last=1, best="loss", mode="min", num_best=2).choose(saves, told, {}) == [
        *earlier[:2],
        first,
        *again[:-1],
    ]


def test_a_copy_whose_manifest_is_damaged_or_lacks_the_metric_does_not_stand_for_the_others() -> None:
    first, again, damaged = (SaveId(36, GenerationId(n, "0" * 8)) for n in range(1, 4))
    earlier = [SaveId(step, GenerationId(1, "0" * 8)) for step in (10, 22)]
    told = {save: Told(1e9 + save.step, {}) for save in [*earlier, first, again]}
    assert Keep(last=2).choose([*earlier, first, again, damaged], told, {}) == [earlier[0], first]
    assert Keep(last=2).choose([*earlier, first, again, damaged], {}, {}) == [earlier[0]]
    told[first].metrics["loss"] = 1.0
    assert Keep(last=1, best="loss", mode="min").choose([*earlier, first, again], told, {}) == earlier
