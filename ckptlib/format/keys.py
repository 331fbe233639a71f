"""Makes and parses the names of objects under a root. Numbers have fixed width, so that names sort by number.

    ckptlib.json
    generations/<gen>-<nonce>.json
    generations/<gen>-<nonce>-<random>.account
    layouts/<digest>.json
    steps/<step>-<gen>-<nonce>.json
    parts/<step>-<gen>-<nonce>/<rank>-<attempt>-ok-<table>-<digest>-<check>-<uses>-<nbytes>.json
    parts/<step>-<gen>-<nonce>/<rank>-<attempt>-failed-<digest>.json
    packs/<step>-<gen>-<nonce>/<rank>-<attempt>-<n>.safetensors
    packs/<step>-<gen>-<nonce>/<rank>-<attempt>-carried-<n>.safetensors
    steps/<step>-<gen>-<nonce>.refresh
    steps/<step>-<gen>-<nonce>-<random>.pin
    trash/<step>-<gen>-<nonce>.json
    copies/<key>
    begun/<gen>-<nonce>.json

Names from a store are parsed, never trusted: a name that does not match exactly is not ckptlib's.
"""

from __future__ import annotations

import operator
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache

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
COPIES = "copies/"
BEGUN = "begun/"

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**6 - 1
MAX_RANK = 10**6 - 1

_SAVE = r"([0-9]{12})-([0-9]{6})-([0-9a-f]{8})"
_SAVE_NAME = re.compile(_SAVE)
_GENERATION = re.compile(r"([0-9]{6})-([0-9a-f]{8})")
_GENERATION_KEY = re.compile(r"generations/([0-9]{6})-([0-9a-f]{8})\.json")
_BEGUN_KEY = re.compile(r"begun/([0-9]{6})-([0-9a-f]{8})\.json")
_ACCOUNT_KEY = re.compile(r"generations/([0-9]{6})-([0-9a-f]{8})-[0-9a-f]{8}\.account")
_STEP_KEY = re.compile(rf"steps/{_SAVE}\.json")
_TRASH_KEY = re.compile(rf"trash/{_SAVE}\.json")
_PART_KEY = re.compile(
    rf"parts/{_SAVE}/([0-9]{{6}})-([0-9a-f]{{8}})-(?:ok-([0-9a-f]{{32}})|failed)-([0-9a-f]{{32}})"
    rf"(?:-([0-9a-f]{{28}}))?(?:-([0-9a-f]{{16}})-([0-9a-f]{{16}}))?\.json"
)
_PACK_KEY = re.compile(rf"packs/{_SAVE}/([0-9]{{6}})-([0-9a-f]{{8}})(-carried)?-([0-9]{{6}})\.safetensors")
_PACK_SET = re.compile(rf"{_SAVE}(-carried)?")
_LAYOUT_KEY = re.compile(r"(?:copies/)?layouts/[0-9a-f]{32}\.json")
_REFRESH_KEY = re.compile(rf"steps/{_SAVE}\.refresh")
_PIN_KEY = re.compile(rf"steps/{_SAVE}-[0-9a-f]{{8}}\.pin")
_COPIED_KEYS = (_GENERATION_KEY, _LAYOUT_KEY)
_KEYS = (
    *(*_COPIED_KEYS, _ACCOUNT_KEY, _STEP_KEY, _REFRESH_KEY, _PIN_KEY),
    *(_PART_KEY, _PACK_KEY, _TRASH_KEY, _BEGUN_KEY),
)


def new_nonce() -> str:
    """Returns eight random hex digits, which distinguish incarnations and attempts that chance upon the same number."""
    return secrets.token_hex(4)


def checked_step(step: object) -> int:
    """Returns a step that a name can contain. Raises TypeError for a bool or anything else that is not a whole number,
    ValueError for one out of range."""
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError  # numpy's before 2.3 and torch's are indices, too
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

    @property
    def begun_key(self) -> str:
        """Key of the record of a generation on a local disk, which has no generation documents."""
        return f"{BEGUN}{self}.json"

    def account_key(self, nonce: str) -> str:
        """Returns a key next to the generation's record. `nonce`: new for each, so that no key is put twice."""
        return f"{GENERATIONS}{self}-{nonce}.account"

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

    @property
    def refresh_key(self) -> str:
        """Key of the refresh mark; it lies under `steps/`, so that a writer's one listing of steps finds it."""
        return f"{STEPS}{self}.refresh"

    def refresh_covers(self, other: SaveId) -> bool:
        """Returns whether a refresh mark of this save covers `other`: whether saves must not refer to packs of `other`.
        It covers saves of this step or an earlier one.

        It covers none of a later generation: a job that went back behind this step writes lower steps anew.
        """
        return other.step <= self.step and other.generation <= self.generation

    def pin_key(self, nonce: str) -> str:
        """Returns a key of a pin, under `steps/` like the refresh mark. `nonce` must be new for each pin, so that
        removing one never removes a later one."""
        return f"{STEPS}{self}-{nonce}.pin"

    def pack_key(self, rank: int, attempt: str, n: int, carried: bool = False) -> str:
        return f"{self.packs_prefix}{rank:06d}-{attempt}{'-carried' * carried}-{n:06d}.safetensors"

    @override
    def __str__(self) -> str:
        return f"{self.step:012d}-{self.generation}"


@dataclass(frozen=True, slots=True, order=True)
class PackSet:
    """A set of packs of one save that live and are removed together. Later saves refer to such sets."""

    save: SaveId
    carried: bool = False
    """Whether these packs hold unchanged chunks, which were written again to release an old pack; otherwise they hold
    chunks that had changed. Only carried packs are likely to be needed for long."""

    @override
    def __str__(self) -> str:
        return f"{self.save}{'-carried' * self.carried}"


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """A part's name, parsed."""

    save: SaveId
    rank: int
    attempt: str
    table: str | None
    """Digest of the part's table (what lies where, without the digests of the data); None if the rank failed."""
    digest: str
    """Digest of the part's bytes."""
    check: Check | None = None
    """Check of what its rank holds in common with others; None if the rank failed, and in parts older than checks."""
    uses: str | None = None
    """Digest of the sets of packs of other saves in which its chunks lie, 16 hex digits. A committer reads only one of
    the parts that use the same sets. None if the rank failed, and in parts older than references to other saves."""
    nbytes: int | None = None
    """Bytes of the packs that were put for it; None when `uses` is."""

    @property
    def ok(self) -> bool:
        return self.table is not None

    @property
    def key(self) -> str:
        outcome = "failed" if self.table is None else f"ok-{self.table}"
        check = "" if self.check is None else f"-{self.check}"
        uses = "" if self.uses is None else f"-{self.uses}-{self.nbytes:016x}"
        return f"{self.save.parts_prefix}{self.rank:06d}-{self.attempt}-{outcome}-{self.digest}{check}{uses}.json"


@lru_cache(maxsize=64)  # so the names of all ranks share one object
def _save_id(step: str, number: str, nonce: str) -> SaveId:
    return SaveId(int(step), GenerationId(int(number), nonce))


def parse_save(text: str) -> SaveId:
    """Parses what `str(SaveId)` returns. Raises FormatError."""
    match = _SAVE_NAME.fullmatch(text)
    if match is None:
        raise FormatError(f"{text[:80]!r} is not <step>-<generation>-<nonce>")
    return _save_id(*match.groups())


def parse_generation(text: str) -> GenerationId:
    """Parses what `str(GenerationId)` returns. Raises FormatError."""
    match = _GENERATION.fullmatch(text)
    if match is None:
        raise FormatError(f"{text[:80]!r} is not <generation>-<nonce>")
    return GenerationId(int(match[1]), match[2])


def parse_generation_key(key: str) -> GenerationId | None:
    match = _GENERATION_KEY.fullmatch(key)
    return GenerationId(int(match[1]), match[2]) if match else None


def parse_begun_key(key: str) -> GenerationId | None:
    match = _BEGUN_KEY.fullmatch(key)
    return GenerationId(int(match[1]), match[2]) if match else None


def parse_account_key(key: str) -> GenerationId | None:
    """Returns the generation whose writer put the account; the account may tell of other generations, too."""
    match = _ACCOUNT_KEY.fullmatch(key)
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
    step, number, nonce, rank, attempt, table, digest, text, uses, nbytes = match.groups()
    check = None if text is None else Check.parse(text)
    if (text is not None and check is None) or (table is None and (check, uses) != (None, None)):
        return None
    size = None if nbytes is None else int(nbytes, 16)
    return PartName(_save_id(step, number, nonce), int(rank), attempt, table, digest, check, uses, size)


def part_rank(key: str) -> int | None:
    """Returns the rank whose share the part of this key describes; None if that rank failed or this is not the key of
    a part."""
    match = _PART_KEY.fullmatch(key)
    return None if match is None or match[6] is None else int(match[4])


def pack_set(key: str) -> PackSet | None:
    """Returns the set to which the pack of this key belongs, or None if this is not the key of a pack."""
    match = _PACK_KEY.fullmatch(key)
    return PackSet(_save_id(*match.groups()[:3]), match[6] is not None) if match else None


def pack_rank(key: str) -> int | None:
    """Returns the rank that put the pack of this key, or None if this is not the key of a pack."""
    match = _PACK_KEY.fullmatch(key)
    return int(match[4]) if match else None


def pack_save(key: str) -> SaveId | None:
    """Returns the save that put the pack of this key, or None if this is not the key of a pack."""
    found = pack_set(key)
    return None if found is None else found.save


def object_save(key: str) -> SaveId | None:
    """Returns the save to which the part or pack of this key belongs, or None if this is the key of neither."""
    part = parse_part_key(key)
    return pack_save(key) if part is None else part.save


def parse_pack_set(text: str) -> PackSet:
    """Parses what `str(PackSet)` returns. Raises FormatError."""
    match = _PACK_SET.fullmatch(text)
    if match is None:
        raise FormatError(f"{text[:80]!r} is not <step>-<generation>-<nonce> or that and -carried")
    return PackSet(_save_id(*match.groups()[:3]), match[4] is not None)


def parse_refresh_key(key: str) -> SaveId | None:
    match = _REFRESH_KEY.fullmatch(key)
    return _save_id(*match.groups()) if match else None


def parse_pin_key(key: str) -> SaveId | None:
    match = _PIN_KEY.fullmatch(key)
    return _save_id(*match.groups()) if match else None


def layout_key(digest: str) -> str:
    return f"{LAYOUTS}{digest}.json"


def is_layout_key(key: str) -> bool:
    """Returns whether this is the key of a layout, or of its copy."""
    return _LAYOUT_KEY.fullmatch(key) is not None


def is_known(key: str) -> bool:
    """Returns whether the format has such a name. Others, wherever they lie, are somebody else's."""
    name = key.removeprefix(COPIES)
    kinds = _KEYS if name == key else _COPIED_KEYS
    return name == ROOT or any(kind.fullmatch(name) for kind in kinds)


def copy_key(key: str) -> str:
    """Returns the key of the second copy of a document that all steps need: the root's own, or a layout."""
    return f"{COPIES}{key}"
