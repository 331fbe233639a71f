"""Decides which steps are on the job's history, and which generation is its head, from a root's listing.

History is linear with rewinds. The head is the newest generation that has committed a step, or that is a rewind. Its
own steps are visible, and those of the generation it resumed from, up to the step it resumed from, and so on. Any other
generation that never committed is no part of history. No torch; no I/O except by the `read` that callers pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    Superseded,
)
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation

MAX_DIGITS = 40
"""The most digits of a string that is taken for the number of a step, which has 12 at most."""


def history(saves: Iterable[SaveId], generations: Mapping[GenerationId, Generation]) -> list[SaveId]:
    """Returns the visible ones of these committed saves, ascending by step. Pure."""
    by_generation: dict[GenerationId, list[SaveId]] = {}
    for save in saves:
        by_generation.setdefault(save.generation, []).append(save)
    limits = limits_of(by_generation, generations)
    return sorted(save for of, limit in limits.items() for save in by_generation.get(of, []) if save.step <= limit)


def counted(visible: Iterable[SaveId]) -> list[SaveId]:
    """Returns those of these visible saves that count, ascending by step: of each step, the latest one. Pure.

    A job saves again what it restored from memory alone, and a writer of the job before may commit it after all.
    """
    return [*{save.step: save for save in sorted(visible)}.values()]


def limits_of(
    committed: Iterable[GenerationId], generations: Mapping[GenerationId, Generation]
) -> dict[GenerationId, int]:
    """Returns the generations on the job's history, newest first, each with its last step that may be visible. Pure.

    `committed`: the generations that have a step.
    """
    limits: dict[GenerationId, int] = {}
    at, limit = head_of(committed, generations), keys.MAX_STEP
    while at is not None and at not in limits:
        limits[at] = limit
        record = generations.get(at)
        origin = None if record is None else record.resumed_from
        if origin is not None:
            limit = min(limit, origin.step)
        at = None if origin is None else origin.generation
    return limits


def head_of(committed: Iterable[GenerationId], generations: Mapping[GenerationId, Generation]) -> GenerationId | None:
    """Returns the newest generation on the history. `committed`: the generations that have a step."""
    rewinds = (generation for generation, record in generations.items() if record.rewind)
    return max([*committed, *rewinds], default=None)


def newest_first(ids: Iterable[GenerationId], saves: Iterable[SaveId]) -> list[GenerationId]:
    """Returns the generations whose records `newest` needs, newest first: the last that has committed, and all after
    it."""
    committed = max((save.generation for save in saves), default=None)
    return [] if committed is None else sorted((one for one in ids if one >= committed), reverse=True)


def newest(
    saves: Collection[SaveId], ids: Iterable[GenerationId], read: Callable[[GenerationId], Generation]
) -> SaveId | None:
    """Returns the last visible one of these committed saves if few records tell it; None if all are needed.

    A job begins only if it can read every record and the root's document, so its own record has the highest version of
    them: a reader that can read the newest records may load this step. `read` may raise NewerFormat.
    """
    asked = newest_first(ids, saves)
    try:
        records = [read(generation) for generation in asked]
    except UNUSABLE as error:
        if isinstance(error, NewerFormat):
            raise
        return None
    if not records or any(record.rewind for record in records[:-1]):
        return None
    head = records[-1]
    own = max((save for save in saves if save.generation == head.id), default=None)
    origin = head.resumed_from
    return None if own is None or (origin is not None and origin.step >= own.step) else own


def unfinished_from(
    saves: Collection[SaveId], ids: Iterable[GenerationId], read: Callable[[GenerationId], Generation]
) -> int:
    """Returns the first step at which an uncommitted save may be the one to go on from; 0 if that is not known.

    That is the newest step, or the step from which a later generation that has committed nothing went on, if that is
    lower. `read` may raise NewerFormat.
    """
    ids = [*ids]
    found = newest(saves, ids, read)
    if found is None:
        return 0
    origins = [read(one).resumed_from for one in ids if one > found.generation]
    return min([found.step, *(0 if origin is None else origin.step for origin in origins)])


def check_known(
    committed: Iterable[GenerationId],
    generations: Mapping[GenerationId, Generation],
    lost: Mapping[GenerationId, CkptError],
    url: str,
) -> None:
    """Raises CorruptData if a record that is newer than the head cannot be read: it may be a rewind's, and the job must
    not go on from steps that a rewind left behind. `lost`: why each lost record cannot be read."""
    head = head_of(committed, generations)
    for generation, error in sorted(lost.items(), reverse=True):
        if head is not None and generation > head:
            raise CorruptData(
                f"{url}: the record of generation {generation}, which is newer than all steps, cannot be read, so it "
                f"cannot be told whether the job went back to an earlier step: {error}. Make it readable, or put it "
                f"back from a copy of the root; or, if nobody went back, delete {generation.key}"
            )


def read_records(
    ids: Iterable[GenerationId],
    saves: Iterable[SaveId],
    read: Callable[[GenerationId], Generation],
    newer: bool,
) -> tuple[dict[GenerationId, Generation], dict[GenerationId, CkptError]]:
    """Returns the record of each generation, and for those without one why it cannot be read.

    `ids`: generations that have put their record; others are known by their committed `saves`, or because a later one
    resumed from them. With `newer`, a record of a newer ckptlib counts as damaged; else it raises NewerFormat.
    """
    found: dict[GenerationId, Generation] = {}
    lost: dict[GenerationId, CkptError] = {}
    wanted = [*ids, *(save.generation for save in saves)]
    while wanted:
        generation = wanted.pop()
        if generation in found or generation in lost:
            continue
        try:
            record = found[generation] = read(generation)
        except UNUSABLE as error:
            if isinstance(error, NewerFormat) and not newer:
                raise
            lost[generation] = error
        else:
            if record.resumed_from is not None:
                wanted.append(record.resumed_from.generation)
    return found, lost


def is_number(step: str) -> bool:
    """Whether this is a decimal number, whichever steps there are.

    `int` refuses 4,301 digits, and some characters that `str.isdigit` accepts.
    """
    return len(step) <= MAX_DIGITS and step.isascii() and step.isdigit()


def numbered(step: int | str, visible: Sequence[SaveId], url: str) -> SaveId:
    """Returns the visible save of a step; "latest": the last one. `visible`: ascending. Raises CheckpointNotFound."""
    if step == "latest":
        if not visible:
            raise CheckpointNotFound(f"{url} holds no committed step")
        return visible[-1]
    matching = [save for save in visible if save.step == int(step)]
    if not matching:
        steps = ", ".join(str(save.step) for save in visible[-8:])
        raise CheckpointNotFound(f"{url} holds no step {step}; the last ones are: {steps or 'none'}")
    return matching[-1]


def named(name: str, saves: Callable[[], Sequence[SaveId]], url: str) -> SaveId:
    """Returns the committed save of this full name. `saves`: called only if the name is well-formed.

    Raises CheckpointNotFound.
    """
    try:
        save = keys.parse_save(name)
    except FormatError as error:
        raise CheckpointNotFound(
            f"{url}: {name[:80]!r} is neither a step's number, nor its full name, nor 'latest' or 'best'"
        ) from error
    if save in saves():
        return save
    raise CheckpointNotFound(f"{url} holds no save {name}")


def successor(ids: Iterable[GenerationId], saves: Iterable[SaveId]) -> GenerationId:
    """Returns a new generation with a number above all others, including those of which only steps are left."""
    last = max([*ids, *(save.generation for save in saves)], default=None)
    return GenerationId(1 if last is None else last.number + 1, keys.new_nonce())


def check_head(generation: GenerationId, ids: Iterable[GenerationId], url: str) -> None:
    """Raises Superseded if one of `ids` is newer."""
    newest = max(ids, default=generation)
    if newest > generation:
        raise Superseded(
            f"{url}: generation {generation} may no longer save: {newest} has begun. Two jobs use one root, or this "
            "job was told to go back while it ran, as by ckptlib rewind. Stop one of two jobs, or give each a root of "
            "its own; after a rewind, start this job again: it goes on from the step that was named"
        )


def last_step(generation: GenerationId, ids: Iterable[GenerationId], read: Callable[[GenerationId], Generation]) -> int:
    """Returns the generation's last step on the history of the newest of `ids`, whether that one has committed or not.

    Returns -1 if there is none, or if a record on the way cannot be read; MAX_STEP for the newest itself.
    """
    at, limit = max([generation, *ids]), keys.MAX_STEP
    while at > generation:
        try:
            origin = read(at).resumed_from
        except UNUSABLE:
            return -1
        if origin is None or origin.generation >= at:
            return -1
        at, limit = origin.generation, min(limit, origin.step)
    return limit if at == generation else -1


def is_outrun(generation: GenerationId, saves: Iterable[SaveId]) -> bool:
    """Returns whether another generation of the same number has committed a step, and this one has none. `saves`: the
    committed ones.

    Neither of the two knew of the other as it began. The record of one was on its way to the store for so long, as from
    a host without its network, that the other went on meanwhile. Whichever has the higher nonce, it must not hide steps
    on which somebody relies.
    """
    found = {save.generation for save in saves if save.generation.number == generation.number}
    return bool(found) and generation not in found


def check_goes_on(
    save: SaveId, ids: Collection[GenerationId], read: Callable[[GenerationId], Generation], url: str
) -> None:
    """Raises Superseded if one of `ids` is newer, and this save is not on the history of the newest."""
    if save.step > last_step(save.generation, ids, read):
        check_head(save.generation, ids, url)
