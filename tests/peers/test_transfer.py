"""Snapshots that go from one rank's slot to another's: the same bytes, or no replica and an error on both sides."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import transfers
from helpers.verdicts import LIMIT_S, assert_passed, run_ranks

from ckptlib.errors import FormatError
from ckptlib.peers.increments import Base
from ckptlib.peers.ranges import MAX_RANGES, ByteRange, joined, without
from ckptlib.peers.transfer import _asked


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("transfers")
    run_ranks("transfers.py", directory)
    return directory


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("case", [case.__name__ for case in transfers.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "null",
            "7",
            "[7]",
            "[7, null]",
            "[[], null, 7]",
            "[[[1]], null]",
            "[[[0, 1e400]], null]",
            '[[["a", "b"]], null]',
        ),
        *("[[[0, 4096, 8192]], null]", "[" * 100_000, "[[[-4096, 4096]], null]", "[[[0, 12289]], null]"),
        *("[[[4096, 4096]], null]", "[[[8192, 4096]], null]", "[[[0, 8192], [4096, 12288]], null]"),
    ],
)
def test_ranges_that_nobody_can_lack(text: str) -> None:
    with pytest.raises(FormatError, match="rank 3 asks for"):
        _asked(text, 12288, "rank 3")


@pytest.mark.parametrize("base", ["7", "[]", '["a"]', '["a", 1]', "[1, true]", '["a", true, 1]', '{"a": true}'])
def test_bases_that_are_none(base: str) -> None:
    with pytest.raises(FormatError, match="rank 3 names no base"):
        _asked(f"[[], {base}]", 12288, "rank 3")


def test_ranges_are_told_on_one_page() -> None:
    random, base = Random(0), Base("f" * 32, True)
    for num in (0, 1, MAX_RANGES, MAX_RANGES + 1, 1000, 5000):
        edges = sorted(random.sample(range(2**40), 2 * num))
        lacking = list(map(ByteRange, edges[::2], edges[1::2]))
        fewer = joined(lacking)
        assert len(fewer) == min(num, MAX_RANGES)
        assert _asked(json.dumps([fewer, base]), 2**40, "") == (fewer, base)
        assert len(json.dumps([fewer, base])) <= 4096 - 8
        assert all(any(a <= start and end <= b for a, b in fewer) for start, end in lacking)
        assert {a for a, _ in fewer} <= {a for a, _ in lacking}
    assert joined([ByteRange(10 * i, 10 * i + 1) for i in range(500)]) == [(0, 4991)], "gaps that are equal"


def test_ranges_without_holes() -> None:
    random = Random(0)
    for _ in range(500):
        edges, cuts = (sorted(random.sample(range(60), 2 * random.randint(0, 6))) for _ in range(2))
        ranges, holes = ([*map(ByteRange, e[::2], e[1::2])] for e in (edges, cuts))
        random.shuffle(holes)
        left = without(ranges, holes)
        members = [{n for a, b in some for n in range(a, b)} for some in (ranges, holes, left)]
        assert members[2] == members[0] - members[1]
        assert all(a < b for a, b in left)
        assert all(before.end <= after.start for before, after in pairwise(left))
