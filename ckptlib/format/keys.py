"""The names of objects under a root, in both directions. Numbers have fixed width, so that names sort by number.

    ckptlib.json
    generations/<gen>-<nonce>.json
    layouts/<digest>.json
    steps/<step>-<gen>-<nonce>.json
    parts/<step>-<gen>-<nonce>/<rank>-<attempt>-ok-<table>-<digest>-<check>.json
    parts/<step>-<gen>-<nonce>/<rank>-<attempt>-failed-<digest>.json
    packs/<step>-<gen>-<nonce>/<rank>-<attempt>-<n>.safetensors
    trash/<step>-<gen>-<nonce>.json

Names from a store are parsed, never trusted: what does not match exactly is not one of ours.
"""

from __future__ import annotations

import operator
import re
import secrets
from dataclasses import dataclass

from typing_extensions import override

from ckptlib.errors import FormatError
from ckptlib.format.check import Check

ROOT = "ckptlib.json"
GENERATIONS = "generations/"
LAYOUTS = "layouts/"
STEPS = "steps/"
PARTS = "parts/"
PACKS = "packs/"
TRASH = "trash/"

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**6 - 1
MAX_RANK = 10**6 - 1

_SAVE = r"([0-9]{12})-([0-9]{6})-([0-9a-f]{8})"
_SAVE_NAME = re.compile(_SAVE)
_GENERATION_KEY = re.compile(r"generations/([0-9]{6})-([0-9a-f]{8})\.json")
_STEP_KEY = re.compile(rf"steps/{_SAVE}\.json")
_TRASH_KEY = re.compile(rf"trash/{_SAVE}\.json")
_PART_KEY = re.compile(
    rf"parts/{_SAVE}/([0-9]{{6}})-([0-9a-f]{{8}})-(?:ok-([0-9a-f]{{32}})|failed)-([0-9a-f]{{32}})"
    rf"(?:-([0-9a-f]{{28}}))?\.json"
)
_PACK_KEY = re.compile(rf"packs/{_SAVE}/([0-9]{{6}})-([0-9a-f]{{8}})-([0-9]{{6}})\.safetensors")


def new_nonce() -> str:
    """Eight random hex digits: tells incarnations and attempts apart that chance upon the same number."""
    return secrets.token_hex(4)


def checked_step(step: object) -> int:
    """A step that a name can have. Raises TypeError for what is no whole number, ValueError for one out of range."""
    try:
        found = operator.index(step)  # type: ignore[arg-type]  # numpy's integers, too
    except TypeError:
        raise TypeError(f"step={repr(step)[:80]}: expected a whole number, not a {type(step).__name__}") from None
    if not 0 <= found <= MAX_STEP:
        raise ValueError(f"a step is between 0 and {MAX_STEP}, got {found}")
    return found


@dataclass(frozen=True, slots=True, order=True)
class GenerationId:
    """One incarnation of the job. Ordered by number, then nonce."""

    number: int
    nonce: str

    @property
    def key(self) -> str:
        return f"{GENERATIONS}{self}.json"

    @override
    def __str__(self) -> str:
        return f"{self.number:06d}-{self.nonce}"


@dataclass(frozen=True, slots=True, order=True)
class SaveId:
    """One save: a step of a generation. Ordered by step."""

    step: int
    generation: GenerationId

    @property
    def manifest_key(self) -> str:
        return f"{STEPS}{self}.json"

    @property
    def trash_key(self) -> str:
        return f"{TRASH}{self}.json"

    @property
    def parts_prefix(self) -> str:
        return f"{PARTS}{self}/"

    @property
    def packs_prefix(self) -> str:
        return f"{PACKS}{self}/"

    def pack_key(self, rank: int, attempt: str, n: int) -> str:
        return f"{self.packs_prefix}{rank:06d}-{attempt}-{n:06d}.safetensors"

    @override
    def __str__(self) -> str:
        return f"{self.step:012d}-{self.generation}"


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """What the name of a part says of it."""

    save: SaveId
    rank: int
    attempt: str
    table: str | None
    """Digest of the part's table (what lies where, without the digests of the data); None: the rank failed."""
    digest: str
    """Digest of the part's bytes."""
    check: Check | None = None
    """What its rank says of what other ranks hold, too; None of a failed one, and from before there were any."""

    @property
    def ok(self) -> bool:
        return self.table is not None

    @property
    def key(self) -> str:
        outcome = "failed" if self.table is None else f"ok-{self.table}"
        check = "" if self.check is None else f"-{self.check}"
        return f"{self.save.parts_prefix}{self.rank:06d}-{self.attempt}-{outcome}-{self.digest}{check}.json"


def _save_id(step: str, number: str, nonce: str) -> SaveId:
    return SaveId(int(step), GenerationId(int(number), nonce))


def parse_save(text: str) -> SaveId:
    """The inverse of `str(SaveId)`. Raises FormatError."""
    match = _SAVE_NAME.fullmatch(text)
    if match is None:
        raise FormatError(f"{text[:80]!r} is not <step>-<generation>-<nonce>")
    return _save_id(*match.groups())


def parse_generation_key(key: str) -> GenerationId | None:
    match = _GENERATION_KEY.fullmatch(key)
    return GenerationId(int(match[1]), match[2]) if match else None


def parse_manifest_key(key: str) -> SaveId | None:
    match = _STEP_KEY.fullmatch(key)
    return _save_id(*match.groups()) if match else None


def parse_trash_key(key: str) -> SaveId | None:
    match = _TRASH_KEY.fullmatch(key)
    return _save_id(*match.groups()) if match else None


def parse_part_key(key: str) -> PartName | None:
    match = _PART_KEY.fullmatch(key)
    if match is None:
        return None
    step, number, nonce, rank, attempt, table, digest, text = match.groups()
    check = None if text is None else Check.parse(text)
    if (text is not None and check is None) or (check is not None and table is None):
        return None
    return PartName(_save_id(step, number, nonce), int(rank), attempt, table, digest, check)


def pack_save(key: str) -> SaveId | None:
    """The save that put the pack of this key, or None when it is not the key of a pack."""
    match = _PACK_KEY.fullmatch(key)
    return _save_id(*match.groups()[:3]) if match else None


def layout_key(digest: str) -> str:
    return f"{LAYOUTS}{digest}.json"
