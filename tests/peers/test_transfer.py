"""Snapshots that go from one rank's slot to another's: the same bytes, or no replica and an error on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import transfers
from helpers.verdicts import LIMIT_S, assert_passed, run_ranks

from ckptlib.errors import FormatError
from ckptlib.peers.transfer import MAX_RANGES, ByteRange, _asked, _joined


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
        *("", "null", "7", "[7]", "[[1]]", '[["a", "b"]]', "[[0, 4096, 8192]]", "[" * 100_000),
        *("[[-4096, 4096]]", "[[0, 12289]]", "[[4096, 4096]]", "[[8192, 4096]]", "[[0, 8192], [4096, 12288]]"),
    ],
)
def test_ranges_that_nobody_can_lack(text: str) -> None:
    with pytest.raises(FormatError, match="rank 3 asks for"):
        _asked(text, 12288, "rank 3")


def test_ranges_are_told_on_one_page() -> None:
    random = Random(0)
    for num in (0, 1, MAX_RANGES, MAX_RANGES + 1, 1000, 5000):
        edges = sorted(random.sample(range(2**40), 2 * num))
        lacking = list(map(ByteRange, edges[::2], edges[1::2]))
        joined = _joined(lacking)
        assert len(joined) == min(num, MAX_RANGES)
        assert _asked(json.dumps(joined), 2**40, "") == joined
        assert len(json.dumps(joined)) <= 4096 - 8
        assert all(any(a <= start and end <= b for a, b in joined) for start, end in lacking)
        assert {a for a, _ in joined} <= {a for a, _ in lacking}
    assert _joined([ByteRange(10 * i, 10 * i + 1) for i in range(500)]) == [(0, 4991)], "gaps that are equal"
