"""Reads what a report shows from a root: listings and documents, no pack.

A document that cannot be read is reported as a problem, and hides nothing else. `times` works out the times of steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial

from ckptlib.catalog.accounts import read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.codings import Codings
from ckptlib.catalog.failed_parts import failure
from ckptlib.catalog.goodput import Start, goodput
from ckptlib.catalog.history import history, limits_of
from ckptlib.catalog.metrics import best_of, numeric
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import TRIES, is_newest_there
from ckptlib.errors import CheckpointNotFound, CkptError, ObjectNotFound
from ckptlib.format import keys
from ckptlib.format.account import Account, interval_why
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Generation, Manifest, TrashRecord
from ckptlib.format.part import FailedPart, Part
from ckptlib.reporting.contents import Contents
from ckptlib.reporting.records import Begin, Content, Dropped, FailedSave, Records, Step, Times
from ckptlib.reporting.times import Marks, marks_of, times_of
from ckptlib.verify.findings import attempt

INTERVAL = "ckptlib.interval"
"""The metric that holds the interval in force."""

MAX_PARTS = 20_000
"""The most parts that are read, of the newest steps: this takes some minutes with an object store."""

MAX_FAILURES = 200
"""The most uncommitted saves that are reported, the newest ones."""

MAX_WORDS = 8
"""The most ranks of such a save whose published errors are read."""


def gather(catalog: Catalog, max_parts: int = MAX_PARTS) -> Records:
    """Reads the records of a root. Raises CheckpointNotFound if there is no root, and the store's errors."""
    deadline_s, problems = catalog.root().save_deadline_s, Problems()
    for _ in range(TRIES):
        listed = catalog.store.scan(keys.STEPS)
        put_at = {save: e.modified for e in listed if (save := keys.parse_manifest_key(e.key)) is not None}
        pinned = {save for e in listed if (save := keys.parse_pin_key(e.key)) is not None}
        manifests = _manifests(catalog, sorted(put_at), problems)
        if is_newest_there(catalog, put_at):
            break
    generations, lost = catalog.generations.records(put_at, newer=True)
    problems.add(*lost.values())
    accounts = read_accounts(catalog)
    problems.add(*accounts.problems)
    visible = {*history(manifests, generations)}
    newest = max(visible, default=None)
    contents, codings = _contents(catalog, manifests, newest, max_parts, problems)
    dropped = _dropped(catalog, problems)
    failed, nbytes_packs = _failed(catalog, {*put_at}, {drop.save for drop in dropped}, problems)
    marks = marks_of(accounts.told, manifests.values())
    in_memory = {of for of, record in generations.items() if record.domains}
    times = times_of(manifests.values(), put_at, marks, deadline_s, in_memory)
    best = _best(catalog, manifests, visible)
    steps = [
        _step(manifest, save in visible, {"pinned": save in pinned, "best": save == best}, times[save], contents)
        for save, manifest in manifests.items()
    ]
    limits = limits_of({save.generation for save in put_at}, generations)
    known = goodput(accounts.told)
    starts = {start.generation: start for start in known.starts}
    return Records(
        url=catalog.store.url,
        at=time.time(),
        steps=sorted(steps, key=lambda step: (step.save.generation, step.save)),
        begins=[
            _begin(of, generations, of in limits, starts.get(of), marks, accounts.told.get(of))
            for of in sorted({*generations, *lost, *accounts.told})
        ],
        goodput=known,
        failed=failed,
        dropped=dropped,
        nbytes_packs=nbytes_packs,
        newest=codings,
        num_without_content=len(manifests) - len(contents),
        untold=len(accounts.untold),
        problems=problems.found,
    )


class Problems:
    """Messages about what could not be read, each once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def add(self, *problems: object) -> None:
        self._found.update(dict.fromkeys(map(str, problems)))

    @property
    def found(self) -> list[str]:
        return [*self._found]


def _manifests(catalog: Catalog, saves: Sequence[SaveId], problems: Problems) -> dict[SaveId, Manifest]:
    found: dict[SaveId, Manifest] = {}
    reads = each(lambda save: attempt(partial(catalog.manifest, save)), saves)
    for save, manifest in zip(saves, reads, strict=True):
        if isinstance(manifest, Manifest):
            found[save] = manifest
        elif not isinstance(manifest, CheckpointNotFound):  # dropped since it was listed
            problems.add(manifest)
    return found


def _best(catalog: Catalog, manifests: Mapping[SaveId, Manifest], visible: Iterable[SaveId]) -> SaveId | None:
    rule = catalog.best_rule(visible)
    try:
        return best_of({save: numeric(manifests[save].metrics) for save in visible}, rule, catalog.store.url)
    except CheckpointNotFound:
        return None


def _step(
    manifest: Manifest, on_history: bool, marks: Mapping[str, bool], times: Times, contents: Mapping[SaveId, Content]
) -> Step:
    save, interval = manifest.save, manifest.metrics.get(INTERVAL)
    return Step(
        save=save,
        created=manifest.created,
        world_size=manifest.world_size,
        nbytes_state=manifest.nbytes_loaded,
        nbytes=manifest.nbytes,
        num_uses=len({of.save for of in manifest.uses} - {save}),
        on_history=on_history,
        metrics={name: value for name, value in manifest.metrics.items() if name != INTERVAL},
        interval=interval if type(interval) is int and interval > 0 else None,
        why=interval_why(manifest.account),
        kept=tuple(name for name, applies in {**marks, "exempt": manifest.exempt}.items() if applies),
        times=times,
        content=contents.get(save),
    )


def _begin(
    of: GenerationId,
    generations: Mapping[GenerationId, Generation],
    on_history: bool,
    start: Start | None,
    marks: Marks,
    account: Account | None,
) -> Begin:
    saves = None if account is None else account.num_saves
    tier = None if account is None else account.restored_from
    return Begin(of, generations.get(of), on_history, start, marks.of(of), saves, tier)


def _contents(
    catalog: Catalog,
    manifests: Mapping[SaveId, Manifest],
    newest: SaveId | None,
    max_parts: int,
    problems: Problems,
) -> tuple[dict[SaveId, Content], Codings | None]:
    """Reads the contents of the newest steps, up to `max_parts` parts in all; and the codings of the newest step on the
    history, which comes first."""
    chosen: list[Manifest] = []
    left = max_parts
    for manifest in sorted(manifests.values(), key=lambda m: (m.save == newest, m.created), reverse=True):
        left -= len(manifest.parts)
        if left < 0:
            break
        chosen.append(manifest)
    names = [name for manifest in chosen for name in manifest.parts]
    reads = each(lambda name: attempt(partial(catalog.part_alone, name)), names)
    found: dict[SaveId, Content] = {}
    codings: Codings | None = None
    for manifest in chosen:
        contents, whole = Contents(), True
        kinds = Codings() if manifest.save == newest else None
        for name in manifest.parts:
            part = next(reads)
            if isinstance(part, Part):
                contents.add(part)
                if kinds is not None:
                    layout = attempt(partial(_layout_of, catalog, name, part))
                    if isinstance(layout, Layout):
                        kinds.add(part, layout)
                    else:
                        problems.add(layout)
                        kinds = None
            else:
                whole = False
                problems.add(part)
        if whole:
            found[manifest.save] = contents.found
            codings = kinds or codings
    return found, codings


def _layout_of(catalog: Catalog, name: PartName, part: Part) -> Layout:
    """Returns the part's layout, after checking the part against it. Raises FormatError, or as `Catalog.layout`."""
    layout = catalog.layout(part.table.layout)
    part.table.check(layout, name.key)
    return layout


def _dropped(catalog: Catalog, problems: Problems) -> list[Dropped]:
    entries = [(save, e.modified) for e in catalog.store.scan(keys.TRASH) if (save := keys.parse_trash_key(e.key))]
    reads = each(lambda entry: attempt(partial(catalog.trash_record, entry[0])), entries)
    found = []
    for (save, at), record in zip(entries, reads, strict=True):
        if isinstance(record, TrashRecord):
            found.append(Dropped(save, record.reason, at))
        elif not isinstance(record, ObjectNotFound):
            problems.add(record)
    return found


def _failed(
    catalog: Catalog, committed: Set[SaveId], dropped: Set[SaveId], problems: Problems
) -> tuple[list[FailedSave], int]:
    """Returns the saves that have objects but no manifest; and the bytes of all packs."""
    parts: dict[SaveId, list[PartName]] = {}
    nbytes: dict[SaveId, int] = {}
    modified: dict[SaveId, float] = {}
    for entry in (*catalog.store.scan(keys.PARTS), *catalog.store.scan(keys.PACKS)):
        name = keys.parse_part_key(entry.key)
        save = keys.pack_save(entry.key) if name is None else name.save
        if save is None:
            continue
        modified[save] = max(modified.get(save, 0.0), entry.modified)
        if name is None:
            nbytes[save] = nbytes.get(save, 0) + entry.nbytes
        else:
            parts.setdefault(save, []).append(name)
    newest = max([save.generation for save in {*committed, *modified}], default=None)
    last = max([save for save in committed if save.generation == newest], default=None)
    found = []
    for save in sorted(modified.keys() - committed - dropped)[-MAX_FAILURES:]:
        names = parts.get(save, [])
        found.append(
            FailedSave(
                save=save,
                modified=modified[save],
                num_parts=len({name.rank for name in names if name.ok}),
                nbytes=nbytes.get(save, 0),
                errors=_errors(catalog, [name for name in names if not name.ok], problems),
                may_come=save.generation == newest and (last is None or save > last),
            )
        )
    return found, sum(nbytes.values())


def _errors(catalog: Catalog, names: Sequence[PartName], problems: Problems) -> dict[int, str]:
    """Returns the errors that ranks published for one save."""

    def read(name: PartName) -> FailedPart | CkptError:
        return attempt(partial(failure, catalog, name))

    found: dict[int, str] = {}
    for name, failed in zip(names[:MAX_WORDS], each(read, names[:MAX_WORDS]), strict=True):
        if isinstance(failed, FailedPart):
            found[name.rank] = failed.error
        elif not isinstance(failed, ObjectNotFound):
            problems.add(failed)
    return found
