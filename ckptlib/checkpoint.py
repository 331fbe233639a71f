"""save, save_async, load: the main path, top to bottom."""

from __future__ import annotations

import atexit
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog, CheckpointInfo, Committed
from ckptlib.errors import (
    CkptError,
    CorruptData,
    FormatError,
    NotBrought,
    ObjectNotFound,
    ObjectUnreadable,
    StateMismatch,
    WaitTimeout,
)
from ckptlib.format import gc_pause, values
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import SaveId, checked_step, parse_save
from ckptlib.format.manifest import Manifest
from ckptlib.loading import progress
from ckptlib.loading.loaded import Loads, Parts, tells
from ckptlib.loading.match import Targets, targets
from ckptlib.loading.read_once import share_out, spread
from ckptlib.loading.reader import Reader, Source, own_rank
from ckptlib.loading.saved_names import Saved
from ckptlib.loading.selection import Only, Rename
from ckptlib.ranks.group import Group, group_of, group_or_world, meet, together, together_at_length
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import RNG, Session
from ckptlib.saving.settings import Settings
from ckptlib.state.rng import LoadedRng
from ckptlib.stores import absolute, open_store

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for one another inside a collective; torch's own default for gloo is 30 minutes."""

CALL_TIMEOUT = timedelta(seconds=20)
"""How long `save` waits for all ranks to call it."""

SAVE_DEADLINE = timedelta(hours=1)

QUICK_BYTES = 256 * 1024 * 1024
"""Garbage is not collected while a load reads no more than this. It takes a second or less, of which a collection would
be a large part; and what requests leave behind is in proportion to it."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did."""

    step: int
    """0 where nothing was there to be restored."""
    source: str
    """Where it came from, for people."""
    save: SaveId | None
    nbytes: int
    """Bytes that this rank read from the store."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint has not; left as they were."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the state has not."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Plain values by path."""
    skipped: tuple[str, ...] = ()
    """Newer steps, or nearer copies, that were found damaged, and why."""
    in_memory: bool = False
    """Whether it came from the memory of the job's hosts."""
    committed: bool = True
    """Whether the store has it."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: look (for snapshots in memory), wait (for writers of the job before), list (the steps), bring
    (from peers), plan, read, spread (over ranks)."""

    @override
    def __str__(self) -> str:
        if self.save is None:
            return f"nothing to restore in {self.source}: a fresh run"
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        text = f"step {self.step} from {self.source}: {self.nbytes:,} bytes in {self.seconds:.2f} s ({rate:.2f} GB/s)"
        return text + "".join(f"; skipped {reason}" for reason in self.skipped)


def save(
    url: str | Path,
    state: Mapping[str, object],
    step: int,
    *,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    metrics: Mapping[str, object] | None = None,
    timeout: timedelta = CALL_TIMEOUT,
) -> None:
    """Saves `state` as `step`; the step is committed and durable on return, on every rank.

    Collective over `process_group` (default: the world); a rank that calls it alone gets AgreementFailed after
    `timeout`. `state`: any nesting of dict, list and tuple of tensors, plain values, modules, optimizers, generators
    and objects with state_dict() and load_state_dict().

    Raises UnsupportedState for what cannot be saved, SaveFailed when the step will never exist, on all ranks.
    """
    pending = save_async(
        url,
        state,
        step,
        storage_options=storage_options,
        process_group=process_group,
        metrics=metrics,
        timeout=timeout,
    )
    group = pending.group
    while not group.any(together(group, f"saving step {step}", lambda: _is_committed(pending))):
        pass  # a large state and a slow store may take longer than ranks wait for one another in a collective


def _is_committed(pending: Pending) -> bool:
    """Waits for a while; only rank 0 can tell."""
    patience_s = pending.group.patience_s
    try:
        if pending.group.rank == 0:
            pending.wait_committed(patience_s)
        else:
            pending.wait_released(patience_s)  # so that its slot is there for the next one
    except WaitTimeout:
        return False
    return pending.committed


def save_async(
    url: str | Path,
    state: Mapping[str, object],
    step: int,
    *,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    metrics: Mapping[str, object] | None = None,
    timeout: timedelta = CALL_TIMEOUT,
) -> Pending:
    """Copies `state` and returns; the rest happens in another process.

    As `save`, but the step exists only when the pending save says so: `pending.wait_committed()`. Waits for an
    earlier save when both slots are taken.
    """
    step = checked_step(step)
    meet(process_group, str(url), f"save of step {step}", timeout)
    session = _session(absolute(url), storage_options, process_group, state, step)
    session.await_room()
    return session.save(state, step, metrics=metrics)


def load(
    url: str | Path,
    state: Mapping[str, object],
    step: int | str = "latest",
    *,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    map: Rename = None,
    only: Only = None,
    cast: bool = False,
    random: bool = False,
    device: str | torch.device | None = None,
    timeout: timedelta = TIMEOUT,
) -> LoadReport:
    """Fills `state` in place from a committed step, whatever layout and world size it was saved with.

    Collective over `process_group` (default: the world). Until it returns, and when it raises, targets are undefined.

    Who loads a whole step into the very state that is saved next goes back to it: later steps leave the history. A load
    into other objects, or of a part, is a look and changes no history.

    step:   a number, or "latest".
    strict: names that only one side has are an error; else they are in the report.
    map:    from a name of `state` to the checkpoint's: a function, or a dict of names and of paths above them, such as
            {"model": "ema"}.
    only:   names, paths above them, or patterns (fnmatch) of what is to be loaded: "model", "model/layers.*"; the rest
            is left alone.
    cast:   allows a target's dtype to differ from the saved one; never done silently.
    random: puts the random generators back as they were, too.
    device: where parameters and buffers on the meta device are given memory; default: the device of the DTensor's mesh,
            the one that torch.set_default_device chose, an accelerator, the host; the first of these that there is.
            "cpu" for FSDP2 with CPU offloading.

    Raises CheckpointNotFound, StateMismatch with every name that does not fit, CorruptData that names the damaged
    tensor; on all ranks, if on one.
    """
    step = step if isinstance(step, str) else checked_step(step)
    meet(process_group, str(url), f"load of step {step}", timeout)
    group = _group(process_group)
    with open_store(str(url), storage_options) as store:
        catalog = Catalog(store)
        source = resolve(group, catalog, step)
        generators = LoadedRng(group.rank, source.world_size) if random else None
        filled: list[torch.Tensor] = []
        together(group, f"loading step {source.save.step}", lambda: _refuse_going_back(url, source.save, state, only))
        report = load_save(
            group,
            source,
            state,
            generators,
            strict=strict,
            rename=map,
            only=only,
            cast=cast,
            device=device,
            filled=filled,
        )
    if generators is not None:
        together(group, f"putting back the random generators of step {source.save.step}", generators.restore)
    loads = _loads.setdefault(_key(absolute(url), process_group), Loads())
    loads.add(source.save, state, filled, whole=only is None and not report.missing)
    for keeper in keepers:
        keeper.note_load(absolute(url), loads)
    return report


def _refuse_going_back(url: str | Path, save: SaveId, state: Mapping[str, object], only: Only) -> None:
    """Before anything is filled."""
    for keeper in keepers if only is None else ():
        keeper.refuse_going_back(absolute(url), save, state)


def checkpoints(url: str | Path, *, storage_options: Mapping[str, object] | None = None) -> Iterator[CheckpointInfo]:
    """The committed steps on the history of a root, ascending. Any process may ask, alone."""
    with open_store(str(url), storage_options) as store:
        catalog = Catalog(store)
        for save_id in catalog.visible():
            info = catalog.info(save_id, visible=True)
            metrics = {name: values.decode(value, name) for name, value in info.metrics.items()}
            yield replace(info, metrics=metrics)


# What the Checkpointer shares


def resolve(group: Group, catalog: Catalog, step: int | str) -> Committed:
    """One step for all ranks, read once. Collective."""

    def find() -> bytes | None:
        if group.rank != 0:
            return None
        found = catalog.resolve(step)
        catalog.manifest(found)
        return str(found).encode() + b"\n" + catalog.store.get(found.manifest_key)

    data = group.broadcast(together(group, f"resolving step {step}", find))
    name, _, document = data.partition(b"\n")
    found = parse_save(name.decode())
    manifest = Manifest.decode(found, document, f"{catalog.store.url}/{found.manifest_key}")
    return Committed(catalog, manifest)


def load_save(
    group: Group,
    source: Source,
    state: Mapping[str, object],
    generators: LoadedRng | None,
    *,
    strict: bool = True,
    rename: Rename = None,
    only: Only = None,
    cast: bool = False,
    device: str | torch.device | None = None,
    filled: list[torch.Tensor] | None = None,
) -> LoadReport:
    """Fills `state` from one step, and `generators` with the saved random state. Collective.

    `filled`: is given every tensor that was read into.
    """
    with gc_pause.kept() as collect_again:  # around a call: what it made is gone when it returns
        return _load_save(group, source, state, generators, strict, rename, only, cast, device, filled, collect_again)


def _load_save(
    group: Group,
    source: Source,
    state: Mapping[str, object],
    generators: LoadedRng | None,
    strict: bool,
    rename: Rename,
    only: Only,
    cast: bool,
    device: str | torch.device | None,
    filled: list[torch.Tensor] | None,
    collect_again: Callable[[], None],
) -> LoadReport:
    laps = progress.Laps()
    whole = state if generators is None else {**state, RNG: generators}

    def plan() -> tuple[Reader, Targets]:
        reader = Reader(source, group.rank)
        return reader, targets(whole, Saved(reader), rename=rename, only=only, cast=cast, device=device)

    what = f"loading step {source.save.step}"
    source.bring({own_rank(group.rank, source.world_size)})
    laps.end("bring")
    reader, wanted = _bring_and_plan(group, source, what, plan)
    unexpected = _unexpected_everywhere(group, wanted.unexpected)
    together(group, what, lambda: _check(source.save, wanted, unexpected, strict))

    reads, buckets = share_out(wanted.wants, group, lambda want: source.near(reader.ranks_for(want)))
    total = sum(tensor.nbytes for want in reads for _, tensor in want.pieces)
    if total > QUICK_BYTES:
        collect_again()
    laps.end("plan")
    source.bring(set().union(*map(reader.ranks_for, reads)))
    laps.end("bring")

    def fill() -> None:
        with progress.progress(f"{what} from {source.where}", total, shown=group.rank == 0) as advance:
            reader.read(reads, advance)

    together_at_length(group, what, fill)
    laps.end("read")
    spread(buckets, group)
    laps.end("spread")
    wanted.complete()
    if whole is not state and isinstance(state, MutableMapping):  # plain values were put into the copy
        state.update({key: value for key, value in whole.items() if key != RNG})
    if filled is not None:
        filled += [tensor for want in wanted.wants for _, tensor in want.pieces]
    return LoadReport(
        step=source.save.step,
        source=source.where,
        save=source.save,
        nbytes=reader.nbytes_read,
        seconds=laps.total,
        missing=tuple(wanted.missing),
        unexpected=(*unexpected, *wanted.foreign),
        values=wanted.values,
        in_memory=not isinstance(source, Committed),
        phases=laps.seconds,
    )


def _bring_and_plan(
    group: Group, source: Source, what: str, plan: Callable[[], tuple[Reader, Targets]]
) -> tuple[Reader, Targets]:
    """What `plan` gives on this rank; shares that it turns out to need, such as another stage's, are brought.

    Collective.
    """
    planned: list[tuple[Reader, Targets]] = []

    def lacks() -> set[int]:
        if not planned:
            try:
                planned.append(plan())
            except NotBrought as error:
                return {error.rank}
        return set()

    while group.any(bool(lacking := together(group, what, lacks))):
        source.bring(lacking)
    return planned[0]


def _unexpected_everywhere(group: Group, unexpected: list[str]) -> list[str]:
    """Names that no rank took: what one rank of a pipeline does not know, another does."""
    mine = {name for name in unexpected if not name.startswith(RNG)}
    if not group.any(bool(mine)):
        return []
    by_rank = [set(json.loads(data)) for data in group.gather(json.dumps(sorted(mine)).encode())]
    return sorted(set.intersection(*by_rank))


def _check(save: SaveId, wanted: Targets, unexpected: list[str], strict: bool) -> None:
    problems = [f"  {text}" for text in wanted.mismatched]
    if strict:
        problems += [f"  {name}: not in the checkpoint" for name in wanted.missing]
        problems += [f"  {name}: not in the state" for name in unexpected]
        problems += [f"  {text}" for text in wanted.foreign.values()]
    if problems:
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise StateMismatch(
            f"step {save.step} does not fit the state:\n" + "\n".join(problems[:40]) + more + "\n"
            "map= renames, only= takes a part, strict=False leaves out what one side lacks, cast=True converts dtypes"
        )


DAMAGE = (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable)
"""What makes a committed step unusable, where the store can be reached."""


# What the functional API keeps for the life of the process: a group per process group, a session per root saved to

Key = tuple[str, dist.ProcessGroup | None]

_groups: dict[dist.ProcessGroup | None, Group] = {}
_sessions: dict[Key, Session] = {}
_loads: dict[Key, Loads] = {}
"""Since the last save."""


class Keeper(Protocol):
    """Of a state that it saves itself: a Checkpointer."""

    def refuse_going_back(self, url: str, save: SaveId, state: Mapping[str, object]) -> None:
        """Before a whole step is loaded into `state`. Raises StateError where that is the keeper's own, which has
        saved later steps: their history cannot be left by it."""

    def note_load(self, url: str, loads: Loads) -> None:
        """After a load: the keeper may go on from there."""


keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
"""The open ones of this process."""

_left_alone: list[object] = []
"""What is the parent's. Kept: to destroy it would close the parent's connections."""


def _key(url: str, over: dist.ProcessGroup | None) -> Key:
    return url, group_or_world(over)  # another world, another session


def _group(over: dist.ProcessGroup | None) -> Group:
    """For loads, which write nothing and need no session. Collective."""
    world = group_or_world(over)
    if world not in _groups:
        _close_at_exit()
        _groups[world] = group_of(over, TIMEOUT)
    return _groups[world]


def loads_of(url: str, over: dist.ProcessGroup | None) -> Loads:
    """What was loaded from a root since the last save to it; forgotten here."""
    return _loads.pop(_key(url, over), Loads())


def _session(
    url: str,
    options: Mapping[str, object] | None,
    over: dist.ProcessGroup | None,
    state: Mapping[str, object],
    step: int,
) -> Session:
    """To save `step` with. Where an older step was loaded to go on from, that is a new generation's. Collective."""
    key = _key(url, over)
    session, loads, origin = _sessions.get(key), _loads.get(key), None
    if session is not None and session.closed:
        session = None
    if loads is not None:
        origin = _gone_back_to(_group(over), loads, session, state, step)
        if session is not None and origin is not None:
            session.close(SAVE_DEADLINE, clean=True)
            session = None
    if session is None:
        settings = Settings(
            url=url,
            options=options or {},
            timeout=TIMEOUT,
            save_deadline=SAVE_DEADLINE,
            algorithm=XXH3,
            arena=None,
            keep=None,
            tags={},
            peers=None,
        )
        _close_at_exit()
        session = _sessions[key] = Session(settings, over)
        session.lineage.resumed_from = origin
    _loads.pop(key, None)
    return session


def _gone_back_to(
    group: Group, loads: Loads, session: Session | None, state: Mapping[str, object], step: int
) -> SaveId | None:
    """The earlier save from which this one goes on; None where it follows the last one. Collective.

    That is the step that was loaded into what is saved now. Where nothing was, what a process loaded before its first
    save, or before it saves an older step, is what it goes on from: it may have been copied since.
    """

    def found() -> tuple[str, SaveId | None]:
        parts = Parts(state, ask=True)
        into = loads.into(parts)
        some = None if into is not None else loads.into_some_of(parts)
        return str(into or "") if tells(parts) else "any", some

    own, some = together(group, f"saving step {step}", found)
    told = {data.decode() for data in group.gather(own.encode())} - {"any"}
    newest = None if session is None else SaveId(session.newest_step, session.generation)
    if told and told != {""} and len(told) == 1:
        origin = parse_save(told.pop())
        return origin if origin.step < step and origin != newest else None
    if newest is None or step <= newest.step:
        return loads.before(step)
    if some is not None and some != newest and group.rank == 0:
        log.warning(
            "step %d was loaded into a part of what is saved as step %d: the steps in between stay on the history; to "
            "leave them, load the whole state",
            some.step,
            step,
        )
    return None


def _close_at_exit() -> None:
    if not _groups and not _sessions:
        atexit.register(_close_all)


def _in_child() -> None:
    """A forked process begins without any: those of its parent are neither its own to use nor to close."""
    _left_alone.append((*_groups.values(), *_sessions.values(), *keepers))
    for kept in (_groups, _sessions, _loads, keepers):
        kept.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


def _close_all() -> None:
    for session in _sessions.values():
        try:
            session.close(SAVE_DEADLINE, clean=True)
        except CkptError as error:
            log.error("%s", error)
    _sessions.clear()
    for group in _groups.values():
        group.close()
    _groups.clear()
