"""The small documents of a root: the root's own, generations, manifests and trash records. Types and JSON; no I/O.

A manifest is derived from parts alone, so whoever commits a step writes the same bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptlib.errors import FormatError
from ckptlib.format.documents import Fields, decode, encode
from ckptlib.format.keys import (
    MAX_GENERATION,
    MAX_RANK,
    STEPS,
    GenerationId,
    PackSet,
    PartName,
    SaveId,
    parse_pack_set,
    parse_part_key,
    parse_save,
)
from ckptlib.format.tagged_values import brief
from ckptlib.format.values import Json
from ckptlib.policy.best import MODES, Best

MAX_USERS = 2**21
"""The most ranks that `uses` names, of all sets together: a few bytes can stand for a million."""

MAX_DEADLINE_S = 1e9
"""30 years. Nobody means a longer time, and sums of longer times overflow."""


@dataclass(frozen=True, slots=True)
class Root:
    """`ckptlib.json`: what all writers of a root agree upon. Written once."""

    id: str
    """32 random hex digits."""
    algorithm: str
    """Digest algorithm of the chunks."""
    save_deadline_s: float
    """A save that is not committed this many seconds after it began never will be."""

    def encode(self) -> bytes:
        return encode("root", {"id": self.id, "algorithm": self.algorithm, "save_deadline_s": self.save_deadline_s})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Root:
        fields = decode("root", data, where)
        deadline_s = fields.number("save_deadline_s")
        if not 0 <= deadline_s <= MAX_DEADLINE_S:
            raise fields.fail(f"a save deadline of {deadline_s:g} s; expected one from 0 to {MAX_DEADLINE_S:g} s")
        return cls(fields.digest("id"), fields.algorithm("algorithm"), deadline_s)


@dataclass(frozen=True, slots=True)
class Generation:
    """One incarnation of the job: where it came from and what ran it."""

    id: GenerationId
    world_size: int
    resumed_from: SaveId | None
    """The step it continues; None if it began anew."""
    created: float
    """Seconds since the epoch, by rank 0's clock."""
    versions: Mapping[str, str]
    """Versions of python, torch, ckptlib."""
    host: str
    """Host of rank 0."""
    tags: Mapping[str, str] = field(default_factory=dict)
    domains: tuple[str, ...] = ()
    """Failure domain of each rank if snapshots are kept in memory; otherwise empty."""
    copies: int = 0
    """Replicas of each rank's snapshots, in other domains than its own."""
    kinds: tuple[int, ...] = ()
    """A number per rank, which ranks with the same state share; empty if no two ranks have the same."""
    rewind: bool = False
    """Whether it was put to go back: it is the head of history though it has no step yet."""
    run: Mapping[str, Json] = field(default_factory=dict)
    """What ran, if the job asked for a record of it; see `saving.run_record`."""
    best: Best | None = None
    """How the job chooses its best step."""

    def encode(self) -> bytes:
        body: dict[str, Json] = {
            "generation": self.id.number,
            "nonce": self.id.nonce,
            "world_size": self.world_size,
            "resumed_from": None if self.resumed_from is None else str(self.resumed_from),
            "created": self.created,
            "host": self.host,
            "versions": dict(self.versions),
            "tags": dict(self.tags),
        }
        if self.domains:
            peers: dict[str, Json] = {"copies": self.copies, "domains": list(self.domains)}
            body["peers"] = {**peers, "kinds": list(self.kinds)} if self.kinds else peers
        if self.rewind:
            body["rewind"] = True
        if self.run:
            body["run"] = dict(self.run)
        if self.best is not None:
            body["best"] = {"metric": self.best.metric, "mode": self.best.mode}
        return encode("generation", body)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Generation:
        fields = decode("generation", data, where)
        resumed = None if fields.raw("resumed_from") is None else parse_save(fields.text("resumed_from"))
        domains, copies, kinds = _decode_peers(fields.inner("peers")) if "peers" in fields else ((), 0, ())
        rewind = fields.flag("rewind")
        if rewind and resumed is None:
            raise fields.fail("goes back, but 'resumed_from' names no step")
        return cls(
            GenerationId(fields.integer("generation", 0, MAX_GENERATION), fields.text("nonce", "[0-9a-f]{8}")),
            fields.integer("world_size", 1, MAX_RANK + 1),
            resumed,
            fields.number("created"),
            fields.strings("versions"),
            fields.text("host"),
            fields.strings("tags"),
            domains,
            copies,
            kinds,
            rewind,
            fields.tree("run") if "run" in fields else {},
            _decode_best(fields.inner("best")) if fields.get("best") is not None else None,
        )


def _decode_best(fields: Fields) -> Best | None:
    """Returns the rule, or None for one that this version does not know: only the word "best" depends on it."""
    metric, mode = fields.text("metric"), fields.text("mode")
    return Best(metric, mode) if metric and mode in MODES else None


def _decode_peers(fields: Fields) -> tuple[tuple[str, ...], int, tuple[int, ...]]:
    domains = tuple(fields.texts("domains"))
    kinds = tuple(fields.integers("kinds")) if "kinds" in fields else ()
    if kinds and len(kinds) != len(domains):
        raise fields.fail(f"kinds of {len(kinds)} ranks, and domains of {len(domains)}")
    return domains, fields.integer("copies"), kinds


@dataclass(frozen=True, slots=True)
class Manifest:
    """The document that commits a step: a step exists exactly when its manifest does."""

    save: SaveId
    world_size: int
    parts: tuple[PartName, ...]
    """The part of each rank."""
    layouts: Mapping[str, tuple[int, ...]]
    """Digest of each layout, and the ranks that have it; each rank occurs once."""
    nbytes: int
    """Bytes of all packs that were put for this save."""
    created: float
    """When rank 0's snapshot was taken; seconds since the epoch."""
    metrics: Mapping[str, Json]
    """Metrics of rank 0."""
    uses: Mapping[PackSet, float] = field(default_factory=dict)
    """The sets of packs of other saves that its parts name, each with the `created` of that save."""
    users: Mapping[PackSet, frozenset[int]] = field(default_factory=dict)
    """The ranks whose packs of a set are named, unless these are the packs of all ranks. A rank names only its own
    packs. The document stores what `told_users` returns."""
    nbytes_state: int | None = None
    """Bytes of all chunks, wherever they lie and however they are stored. None in version 1."""
    exempt: bool = False
    """Whether the step stays for good; from rank 0's part."""
    account: Mapping[str, Json] = field(default_factory=dict)
    """How the start of the job had spent its time by then, from rank 0's part; see `format.account`."""

    @property
    def nbytes_loaded(self) -> int:
        """Bytes that a load gives back. In version 1, bytes of the packs, which then held all of them."""
        return self.nbytes if self.nbytes_state is None else self.nbytes_state

    def check_layout(self, name: PartName, layout: str) -> None:
        """Raises FormatError unless the layout of a part is one that the manifest names."""
        if layout not in self.layouts:
            raise FormatError(
                f"{name.key}: its layout is {layout}, expected one that its manifest names: {', '.join(self.layouts)}"
            )

    def encode(self) -> bytes:
        body: dict[str, Json] = {
            "save": str(self.save),
            "step": self.save.step,
            "world_size": self.world_size,
            "created": self.created,
            "nbytes": self.nbytes,
            "nbytes_state": self.nbytes_state,
            "uses": _encode_uses(self.uses, self.users),
            "metrics": dict(self.metrics),
            "layouts": {digest: _to_runs(ranks) for digest, ranks in self.layouts.items()},
            "parts": [name.key for name in self.parts],
            **({"exempt": True} if self.exempt else {}),
            **({"account": dict(self.account)} if self.account else {}),
        }
        return encode("manifest", body)

    @classmethod
    def decode(cls, save: SaveId, data: bytes, where: str | None = None) -> Manifest:
        where = where or save.manifest_key
        fields = decode("manifest", data, where)
        world_size = fields.integer("world_size", 1, MAX_RANK + 1)
        if parse_save(fields.text("save")) != save or fields.integer("step") != save.step:
            raise fields.fail("content and name tell of different saves")
        parts = tuple(_decode_part_key(key, save, fields) for key in fields.texts("parts"))
        if [part.rank for part in parts] != list(range(world_size)):
            raise fields.fail(f"does not name one part for each of {world_size} ranks")
        layouts = _decode_layouts(fields, world_size)
        uses, users = _decode_uses(fields)
        return cls(
            save,
            world_size,
            parts,
            layouts,
            fields.integer("nbytes"),
            fields.number("created"),
            fields.tree("metrics"),
            uses,
            users,
            fields.integer("nbytes_state") if fields.get("nbytes_state") is not None else None,
            fields.flag("exempt"),
            fields.tree("account") if "account" in fields else {},
        )


def told_users(users: Mapping[PackSet, frozenset[int]]) -> dict[PackSet, frozenset[int]]:
    """Returns the part of `users` that a document stores: no more ranks than a reader accepts. It leaves out the
    largest sets first.

    Readers treat a set that is left out as used by all ranks: more packs are kept, and none is lost.
    """
    told, num_ranks = dict(users), sum(map(len, users.values()))
    for of in sorted(users, key=lambda of: (-len(users[of]), of)):
        if num_ranks <= MAX_USERS:
            break
        num_ranks -= len(told.pop(of))
    return told


def _encode_uses(uses: Mapping[PackSet, float], users: Mapping[PackSet, frozenset[int]]) -> dict[str, Json]:
    """Returns a time for each set, or a time and runs of ranks."""
    told = told_users(users)
    return {
        str(of): [created, _to_runs(tuple(sorted(told[of])))] if of in told else created
        for of, created in sorted(uses.items())
    }


def _decode_uses(fields: Fields) -> tuple[dict[PackSet, float], dict[PackSet, frozenset[int]]]:
    """Returns empty dicts for version 1, in which no save needs bytes of another."""
    uses: dict[PackSet, float] = {}
    users: dict[PackSet, frozenset[int]] = {}
    left = MAX_USERS
    for text, value in fields.mapping("uses").items() if "uses" in fields else ():
        of = parse_pack_set(text)
        match value:
            case [float() | int() as created, list(found)]:
                runs = _decode_runs(found, fields)
                left -= sum(last - first + 1 for first, last in runs)
                if left < 0:
                    raise fields.fail(f"uses name more than {MAX_USERS} ranks in all")
                users[of] = frozenset(rank for first, last in runs for rank in range(first, last + 1))
            case created:
                pass
        if type(created) not in (float, int) or not abs(created) <= 2**62:  # type: ignore[arg-type]
            raise fields.fail(f"not when {of} was taken: {brief(value)}")
        uses[of] = float(created)  # type: ignore[arg-type]
    return uses, users


def ranks_by_layout(found: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that have each layout, in order. `found` gives the layout of each rank."""
    ranks: dict[str, list[int]] = {}
    for layout, rank in found:
        ranks.setdefault(layout, []).append(rank)
    return {layout: tuple(of) for layout, of in ranks.items()}


def _decode_part_key(key: str, save: SaveId, fields: Fields) -> PartName:
    name = parse_part_key(key)
    if name is None or name.save != save or not name.ok:
        raise fields.fail(f"not a part of this save: {key[:120]!r}")
    return name


def _to_runs(ranks: tuple[int, ...]) -> Json:
    """Returns ascending ranks as [first, last] pairs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs  # type: ignore[return-value]


def _decode_layouts(fields: Fields, world_size: int) -> dict[str, tuple[int, ...]]:
    """Counts the runs before it expands them: a few bytes can stand for a million ranks."""
    found = fields.mapping("layouts")
    if not all(re.fullmatch("[0-9a-f]{32}", digest) for digest in found):
        raise fields.fail("layouts are not named by their digests")
    runs = {digest: _decode_runs(value, fields) for digest, value in found.items()}
    wanted = 0
    for first, last in sorted(itertools.chain.from_iterable(runs.values())):
        if first != wanted:
            break
        wanted = last + 1
    if wanted != world_size or sum(last - first + 1 for of in runs.values() for first, last in of) != world_size:
        raise fields.fail(f"does not name one layout for each of {world_size} ranks")
    return {
        digest: tuple(itertools.chain.from_iterable(range(first, last + 1) for first, last in of))
        for digest, of in runs.items()
    }


def _decode_runs(value: Json, fields: Fields) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for run in value if isinstance(value, list) else [value]:
        match run:
            case [int(first), int(last)] if (runs[-1][1] if runs else -1) < first <= last <= MAX_RANK:
                runs.append((first, last))
            case _:
                raise fields.fail(f"not runs of ranks: {brief(value)}")
    return runs


@dataclass(frozen=True, slots=True)
class TrashRecord:
    """A step that retention dropped; its objects are removed when this record is older than the grace period."""

    save: SaveId
    reason: str
    uses: Mapping[PackSet, float] = field(default_factory=dict)
    """The `uses` of its manifest: readers of the step need them while the record is young."""
    users: Mapping[PackSet, frozenset[int]] = field(default_factory=dict)
    """The `users` of its manifest."""
    created: float = 0.0
    """The `created` of its manifest; 0 if that is not known."""
    layouts: tuple[str, ...] | None = None
    """Digests of its manifest's layouts; None if they are not known."""

    def encode(self) -> bytes:
        body: dict[str, Json] = {
            "save": str(self.save),
            "manifest": f"{STEPS}{self.save}.json",
            "reason": self.reason,
            "uses": _encode_uses(self.uses, self.users),
            "created": self.created,
        }
        if self.layouts is not None:
            body["layouts"] = [*self.layouts]
        return encode("trash", body)

    @classmethod
    def decode(cls, save: SaveId, data: bytes, where: str) -> TrashRecord:
        fields = decode("trash", data, where)
        if parse_save(fields.text("save")) != save:
            raise fields.fail("content and name tell of different saves")
        created = fields.number("created") if "created" in fields else 0.0
        layouts = tuple(fields.texts("layouts", "[0-9a-f]{32}")) if "layouts" in fields else None
        return cls(save, fields.text("reason"), *_decode_uses(fields), created, layouts)
