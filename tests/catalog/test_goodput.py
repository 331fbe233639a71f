"""Accounts of starts, and the sums over them."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from ckptlib.catalog.accounts import MAX_OBJECTS, keep_account_of, put_account, read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.goodput import goodput
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.account import (
    CLOSED,
    DIED,
    MAX_MARKS,
    PAGE_NBYTES,
    TIERS,
    Account,
    Mark,
    decode_account,
    decode_accounts,
    encode_accounts,
    read_page,
    spent_at,
    write_page,
)
from ckptlib.format.documents import encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.saving.stopwatch import Stopwatch
from ckptlib.stores.local import LocalStore


def of(number: int, nonce: str = "0") -> GenerationId:
    return GenerationId(number, nonce * 8)


def start(
    began: float, first: int, last: int, end: str | None = DIED, step_s: float = 1.0, rest: float = 0.0
) -> Account:
    """10 s of restoring, then steps, the last one cut short after `rest`; a save each ten steps that takes 0.5 s."""
    steps = last - first
    saves = range(first + 10, last + 1, 10)
    marks = [Mark(first, 0.0, 0.0)]
    marks += [Mark(step, (step - first) * step_s, 0.5 * n) for n, step in enumerate(saves, 1)][-MAX_MARKS:]
    marks += [Mark(last, steps * step_s, 0.5 * len(saves))]
    return Account(began, 10 + marks[-1].trained_s + marks[-1].stalled_s + rest, 10.0, end, len(saves), tuple(marks))


def test_lost_and_redone_down_and_restoring() -> None:
    """By hand: 35 steps, killed 0.25 s into the next; down for 5 s; from 30 on to 60, and an end that takes 2 s."""
    one = start(1000.0, 0, 35, rest=0.25)
    two = start(1000.0 + one.seconds + 5, 30, 60, CLOSED, rest=2.0)
    found = goodput({of(1): one, of(2): two})
    spent = found.spent
    assert spent.trained == pytest.approx(30 + 30)
    assert spent.lost == pytest.approx(5 + 0.25)
    assert spent.stalled == pytest.approx(1.5 + 1.5)
    assert (spent.restoring, spent.closing, spent.down) == pytest.approx((20, 2, 5))
    assert spent.total == pytest.approx(one.seconds + 5 + two.seconds)
    assert [s.steps_lost for s in found.starts] == [5, 0]
    assert (found.failures, found.num_saves) == (1, 6)
    assert found.ettr == pytest.approx(60 / spent.total)
    interval, cost, restart = 65 / 6, 3 / 6, 5 + 20
    expected = (1 - (restart + interval / 2) / spent.total) / (1 + cost / interval)
    assert found.predicted == pytest.approx(expected)


def test_a_rewind_loses_what_several_starts_did() -> None:
    accounts = {of(1): start(0, 0, 100, CLOSED), of(2): start(500, 100, 200, CLOSED), of(3): start(900, 50, 60, None)}
    found = goodput(accounts)
    assert [s.steps_lost for s in found.starts] == [50, 100, 0]
    assert found.spent.trained == pytest.approx(50 + 10)
    assert found.failures == 0  # the newest one runs, for all that is known


def test_starts_of_one_number_are_in_the_order_of_their_clocks() -> None:
    """A start that never saved takes no number from the next one."""
    never = Account(100.0, 20.0, 15.0, DIED, 0, ())
    found = goodput({of(1, "a"): start(200, 0, 10, None), of(1, "b"): never})
    assert [s.began for s in found.starts] == [100, 200]
    assert found.spent.down == 80
    assert found.failures == 1


def test_clocks_that_differ() -> None:
    one = start(1000.0, 0, 20)
    found = goodput({of(1): one, of(2): start(1000.0 + one.seconds - 7, 20, 40)})
    assert found.spent.down == 0
    assert found.starts[1].skew == pytest.approx(7)


def test_no_time_after_the_next_one_began_is_lost_by_the_one_before() -> None:
    """Its writer was late to see it die."""
    one = start(1000.0, 0, 20, rest=5.0)
    other = start(1000.0 + one.seconds - 3, 20, 40, CLOSED)
    found = goodput({of(1): one, of(2): other})
    assert found.spent.lost == pytest.approx(2)
    assert found.spent.total == pytest.approx(other.began + other.seconds - one.began)


def test_nothing() -> None:
    found = goodput({})
    assert (found.ettr, found.mtbf, found.predicted, found.interval) == (None, None, None, None)


def test_between_marks_in_proportion() -> None:
    marks = [Mark(0, 0.0, 0.0), Mark(10, 20.0, 1.0), Mark(20, 30.0, 1.0), Mark(20, 30.0, 2.0)]
    assert spent_at(marks, 5) == (10.0, 0.5)
    assert spent_at(marks, 10) == (20.0, 1.0)
    assert spent_at(marks, 20) == (30.0, 2.0)
    assert spent_at((), 3) == (0.0, 0.0)


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_page(tier: str | None) -> None:
    page = memoryview(bytearray(PAGE_NBYTES))
    assert read_page(page, 0.0) is None
    account = replace(start(1000.0, 5, 205), restored_from=tier)
    for n in range(3):
        write_page(page, account, began_at=50.0 - n)
    found = read_page(page, 48.0 + account.seconds + 3)
    assert found is not None
    assert found.seconds == pytest.approx(account.seconds + 3)
    assert (found.marks, found.num_saves, found.end) == (account.marks, account.num_saves, DIED)
    assert found.restored_from == tier
    assert decode_account(account.to_json(), "here") == account
    last = read_page(page, None)
    assert last is not None
    assert last.seconds == account.seconds
    page[8 if page[0] == 2 else 8 + (PAGE_NBYTES - 8) // 2] ^= 0xFF  # killed while the other half was written
    assert read_page(page, None) == last


def test_document() -> None:
    accounts = {of(1): start(1000.0, 5, 205), of(2, "f"): Account(1.0, 2.0, 1.0, None, 0, ())}
    assert decode_accounts(encode_accounts(accounts), "x") == accounts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": 1.0}, "longer than the whole"),
        ({"seconds": 1e300}, "times are none"),
        ({"began": -5}, "times are none"),
        ({"marks": [[5, 1.0]]}, "a mark is"),
        ({"marks": [[True, 1.0, 0.0]]}, "a mark is"),
        ({"marks": [[1, "1", 0.0]]}, "a mark is"),
        ({"marks": 7}, "a list"),
        ({"end": "else"}, "a string like"),
        ({"saves": -1}, "an integer"),
    ],
)
def test_hostile_accounts(change: dict[str, object], says: str) -> None:
    row = {**start(1000.0, 0, 20).to_json(), **change}
    with pytest.raises(FormatError, match=says):
        decode_accounts(encode("accounts", {"starts": {str(of(1)): row}}), "x")  # type: ignore[dict-item]
    with pytest.raises(FormatError, match="is no generation"):
        decode_accounts(encode("accounts", {"starts": {"../1": row}}), "x")  # type: ignore[dict-item]
    with pytest.raises(CorruptData):
        decode_accounts(encode_accounts({of(1): start(0, 0, 1)}).replace(b"saves", b"sAves"), "x")


def test_a_mark_below_the_one_before_it_is_passed_over(tmp_path: Path) -> None:
    """Earlier versions noted the last step as it was before a save that came behind it, and no reader took that."""
    catalog = Catalog(LocalStore(tmp_path))
    first, saved, last = Mark(0, 0.0, 0.0), Mark(6, 7.0, 0.5), Mark(5, 5.0, 0.5)
    for number, marks in enumerate(([first, saved, last], [first, Mark(5, 7.0, 0.5), last], [first, saved]), 1):
        put_account(catalog, of(number), Account(1000.0 * number, 20.0, 10.0, CLOSED, 1, tuple(marks)))
    accounts = read_accounts(catalog)
    assert accounts.problems == []
    assert [account.marks for account in accounts.told.values()] == [
        (first, saved),
        (first, Mark(5, 7.0, 0.5)),
        (first, saved),
    ]


def test_a_wait_at_the_fence_that_is_counted_after_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save comes within the body of step 6, whose optimizer has waited 3 s; `after_step` counts them."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = Stopwatch()
    fd = watch.share()
    assert fd is not None
    page = memoryview(mmap.mmap(fd, PAGE_NBYTES))
    watch.restored()
    for step, fence_s in ((5, 0.0), (6, 3.0)):
        now += 4.0
        if step == 6:
            watch.snapshot(step)
        watch.begin_step(step, fence_s)
        watch.end_step(step, failed=False)
    told = read_page(page, now)
    watch.let_go()
    assert told is not None
    assert decode_account(told.to_json(), "here") == told
    assert told.marks[-1].step == 6


def test_damage_hides_nothing_else(tmp_path: Path) -> None:
    catalog = Catalog(LocalStore(tmp_path))
    put_account(catalog, of(1), start(1000.0, 0, 20))
    put_account(catalog, of(2), start(2000.0, 20, 40))
    damaged = next((tmp_path / "generations").glob("000001-*.account"))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    (tmp_path / "generations" / "garbage.account").write_bytes(b"x")
    accounts = read_accounts(catalog)
    assert [*accounts.told] == [of(2)]
    assert len(accounts.problems) == 1
    assert damaged.name in accounts.problems[0]


def test_their_number_is_bounded(tmp_path: Path) -> None:
    catalog = Catalog(LocalStore(tmp_path))
    expected = {}
    for n in range(1, 3 * MAX_OBJECTS):
        expected[of(n)] = start(1000.0 * n, 0, 20)
        put_account(catalog, of(n), expected[of(n)])
        assert len([*(tmp_path / "generations").iterdir()]) <= MAX_OBJECTS
    assert read_accounts(catalog).told == expected


def test_of_a_start_the_fullest_account_counts(tmp_path: Path) -> None:
    """The next start put what the last manifest told, and then came the word of the first one's own writer."""
    catalog = Catalog(LocalStore(tmp_path))
    whole = start(1000.0, 0, 25, DIED)
    put_account(catalog, of(1), start(1000.0, 0, 20, None))
    put_account(catalog, of(1), whole)
    put_account(catalog, of(1), start(1000.0, 0, 21, None))
    assert read_accounts(catalog).told == {of(1): whole}


def test_nothing_is_kept_of_a_save_that_is_not_there(tmp_path: Path) -> None:
    keep_account_of(Catalog(LocalStore(tmp_path)), SaveId(5, of(1)))
    assert [*tmp_path.iterdir()] == []
