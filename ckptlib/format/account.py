"""How one start of a job spent its time, by the clocks of its first rank. Types, JSON, and a page of numbers; no I/O.

All times within a start come from one monotonic clock. Only `began` comes from a wall clock.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.errors import FormatError
from ckptlib.format.documents import Fields, decode, encode
from ckptlib.format.keys import GENERATIONS, MAX_STEP, GenerationId, parse_generation_key
from ckptlib.format.values import Json

MAX_MARKS = 8
"""An account keeps marks of at most this many snapshots."""

MAX_SECONDS = 1e10
"""300 years. Nobody spends longer, so a reader refuses longer times."""

MAX_ACCOUNTS = 10_000
"""The most that one document holds, some 5 MB."""

DIED, CLOSED = "died", "closed"
"""How a start ended. DIED: its trainer died or raised an error. CLOSED: it ended by itself, with everything saved."""

TIERS = ("memory", "local", "store")
"""The tiers from which a start may have restored."""

MAX_WHY = 1000
"""The longest reason for the choice of an interval, in characters."""

_NUMBERS = 11
"""Numbers in each half of a page, besides the marks between the first and the last one."""
_HALF = struct.Struct(f"<{_NUMBERS + 3 * MAX_MARKS}d")
_ENDS = (None, CLOSED, DIED)
_TIERS = (None, *TIERS)
_CHOICE = struct.Struct("<B")
_OFFSETS = (8, 8 + _HALF.size)

PAGE_NBYTES = 8 + 2 * _HALF.size


class Mark(NamedTuple):
    """The time that had been spent when this many steps were done."""

    step: int
    trained_s: float
    stalled_s: float


@dataclass(frozen=True, slots=True)
class Account:
    """One start of a job."""

    began: float
    """When the Checkpointer was made; seconds since the epoch."""
    seconds: float
    """Seconds from `began` to the end of the start; if that is not known, to its last sign of life."""
    restoring_s: float
    """Seconds from `began` until `restore` was done."""
    end: str | None
    """DIED or CLOSED; None if the end was not recorded."""
    num_saves: int
    """Number of snapshots taken."""
    marks: tuple[Mark, ...]
    """Ascending: the step where it started, the latest snapshots, and the last step that was done."""
    restored_from: str | None = None
    """One of TIERS; None for a fresh start, and if it was not recorded."""

    def to_json(self) -> dict[str, Json]:
        return {
            "began": self.began,
            "seconds": self.seconds,
            "restoring_s": self.restoring_s,
            "end": self.end,
            "saves": self.num_saves,
            "marks": [[*mark] for mark in self.marks],
            **({"restored_from": self.restored_from} if self.restored_from else {}),
        }

    @classmethod
    def of(cls, fields: Fields) -> Account:
        """Reads an account from a document. Raises FormatError."""
        times = [fields.number(name) for name in ("began", "seconds", "restoring_s")]
        marks = ascending(_mark(row, fields) for row in fields.items("marks")[: MAX_MARKS + 3])
        end = None if fields.raw("end") is None else fields.text("end", f"{DIED}|{CLOSED}")
        began, seconds, restoring_s = times
        tier = fields.get("restored_from")
        tier = tier if isinstance(tier, str) and tier in TIERS else None  # a newer ckptlib may have others
        found = cls(began, seconds, restoring_s, end, fields.integer("saves"), marks, tier)
        if (problem := found._problem()) is not None:
            raise fields.fail(f"not an account of a start: {problem}")
        return found

    def _problem(self) -> str | None:
        if not all(math.isfinite(t) and 0 <= t <= MAX_SECONDS for t in (self.began, self.seconds, self.restoring_s)):
            return "its times are none"
        last = self.marks[-1] if self.marks else Mark(0, 0.0, 0.0)
        if self.restoring_s + last.trained_s + last.stalled_s > self.seconds * (1 + 1e-9) + 1e-3:
            return "its parts are longer than the whole"
        return None


def ascending(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """Returns the marks without any that lies below one before it. Earlier versions noted a last step before the save
    that came behind it; and a wait at the fence may not be counted yet when a save is noted."""
    kept: list[Mark] = []
    for mark in marks:
        step, trained_s, stalled_s = kept[-1] if kept else mark
        if mark.step >= step and mark.trained_s >= trained_s and mark.stalled_s >= stalled_s:
            kept.append(mark)
    return tuple(kept)


def _mark(row: Json, fields: Fields) -> Mark:
    match row:
        case [int(step), float() | int() as trained_s, float() | int() as stalled_s] if (
            type(step) is int
            and 0 <= step <= MAX_STEP
            and all(type(t) is not bool and 0 <= t <= MAX_SECONDS for t in (trained_s, stalled_s))
        ):
            return Mark(step, float(trained_s), float(stalled_s))
    raise fields.fail("a mark is a step and two times")


def write_page(page: memoryview, account: Account, began_at: float) -> None:
    """Writes the account into the half of the page that is not valid, and then makes that half the valid one. A process
    that is killed in between leaves the other half valid.

    `began_at` is `account.began` by the monotonic clock, which the processes of a host share.
    """
    marks = account.marks[-(MAX_MARKS + 2) :]
    inner = itertools.chain.from_iterable(marks[1:-1])
    first, last = (marks[0], marks[-1]) if marks else (Mark(-1, 0.0, 0.0), Mark(-1, 0.0, 0.0))
    numbers = [
        *(account.began, began_at, account.seconds, account.restoring_s, _ENDS.index(account.end), account.num_saves),
        *(_TIERS.index(account.restored_from), first.step, *last),
        *inner,
    ]
    half = 2 if page[0] == 1 else 1
    _HALF.pack_into(page, _OFFSETS[half - 1], *numbers, *[-1.0] * (_NUMBERS + 3 * MAX_MARKS - len(numbers)))
    _CHOICE.pack_into(page, 0, half)


def read_page(page: memoryview, now: float | None) -> Account | None:
    """Returns the account of a trainer that is gone or has said that it ends; None if it wrote nothing.

    `now` is when the trainer ended, by the monotonic clock; None if that is not known.
    """
    if page[0] not in (1, 2):
        return None
    began, began_at, seconds, restoring_s, end, num_saves, tier, first, *more = _HALF.unpack_from(
        page, _OFFSETS[page[0] - 1]
    )
    last, inner = Mark(int(more[0]), more[1], more[2]), more[3:]
    rows = zip(*[iter(inner)] * 3, strict=False)
    marks = [Mark(int(step), trained_s, stalled_s) for step, trained_s, stalled_s in rows if step >= 0]
    whole = () if first < 0 else (Mark(int(first), 0.0, 0.0), *marks, last)
    seconds = seconds if now is None else max(now - began_at, seconds)
    return Account(began, seconds, restoring_s, _ENDS[int(end)] or DIED, int(num_saves), whole, _TIERS[int(tier)])


def encode_accounts(accounts: Mapping[GenerationId, Account]) -> bytes:
    """Returns the document of these accounts: of the newest MAX_ACCOUNTS if there are more."""
    kept = sorted(accounts.items())[-MAX_ACCOUNTS:]
    return encode("accounts", {"starts": {str(generation): account.to_json() for generation, account in kept}})


def decode_accounts(data: bytes, where: str) -> dict[GenerationId, Account]:
    """Returns the accounts in a document. Raises CorruptData, FormatError, NewerFormat."""
    fields = decode("accounts", data, where)
    starts = fields.mapping("starts")
    if len(starts) > MAX_ACCOUNTS:
        raise fields.fail(f"{len(starts)} accounts; there are at most {MAX_ACCOUNTS}")
    return {_generation(name, fields): Account.of(Fields(row, f"{where}: {name[:40]}")) for name, row in starts.items()}


def _generation(name: str, fields: Fields) -> GenerationId:
    found = parse_generation_key(f"{GENERATIONS}{name}.json")
    if found is None:
        raise fields.fail(f"{name[:40]!r} is no generation")
    return found


def decode_account(value: Mapping[str, Json], where: str) -> Account | None:
    """Returns the account in a manifest, or None if there is none or it cannot be read: only the sums depend on it."""
    try:
        return Account.of(Fields(dict(value), where)) if value else None
    except FormatError:
        return None


def interval_why(value: Mapping[str, Json]) -> str | None:
    """Returns why the interval in force was chosen, from the account of a manifest; None if that was not recorded."""
    why = value.get("interval_why")
    return why[:MAX_WHY] if isinstance(why, str) else None


def measured_in(value: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the measured costs of saves from the account of a manifest; empty if none were recorded."""
    found = value.get("measured")
    return found if isinstance(found, dict) else {}


def fullest(accounts: Iterable[Account]) -> Account:
    """Returns the fullest account of one start: one that tells its end, else the one with the most seconds."""
    return max(accounts, key=lambda account: (account.end is not None, account.seconds))


def spent_at(marks: Sequence[Mark], step: float) -> tuple[float, float]:
    """Returns the seconds trained and stalled when `step` steps were done, interpolated between marks."""
    for before, after in itertools.pairwise(marks):
        if step < after.step:
            share = max(0.0, (step - before.step) / (after.step - before.step))
            return (
                before.trained_s + share * (after.trained_s - before.trained_s),
                before.stalled_s + share * (after.stalled_s - before.stalled_s),
            )
    return (marks[-1].trained_s, marks[-1].stalled_s) if marks else (0.0, 0.0)
