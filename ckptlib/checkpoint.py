"""The main path: saves a step, loads a step, each from top to bottom.

The terms are those of docs/how-it-works.md. `saving/session.py` has the state that lives from save to save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from ckptlib.devices import accelerator
from ckptlib.errors import CkptError, NotBrought, SaveFailed, StateChanged, StateMismatch, describe
from ckptlib.format import gc_pause, values
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.format.paths import join
from ckptlib.loading.lacked import lacked_anywhere, tell_excused, tell_nothing_fits
from ckptlib.loading.match import targets
from ckptlib.loading.overlaps import bring_together, set_apart
from ckptlib.loading.own_values import warn_of_own_values
from ckptlib.loading.progress import Laps, progress
from ckptlib.loading.read_once import share_out, spread
from ckptlib.loading.reader import Reader
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename, Selection, check_selection
from ckptlib.loading.targets import Targets
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together, together_at_length
from ckptlib.reading.saved_names import SavedNames
from ckptlib.reading.source import StepSource, own_rank
from ckptlib.saving.agreement import Row
from ckptlib.saving.pending import Pending
from ckptlib.saving.planner import Plan
from ckptlib.saving.session import Session
from ckptlib.saving.sources import Overlap
from ckptlib.saving.unreached import warn_of_unreached
from ckptlib.slots.slot import Slot
from ckptlib.staging.fence import wait_for_copies
from ckptlib.staging.stager import Content, CopyJob
from ckptlib.state.collector import Flat
from ckptlib.state.leaf import Leaf
from ckptlib.state.rng import RNG, LoadedRng, is_random

QUICK_BYTES = 256 * 1024 * 1024
"""No garbage is collected while a load reads no more than this. Such a load takes a second or less, of which a
collection would be a large part; and its garbage is small."""


# Saving


def without_overlap(leaf: Leaf) -> bool:
    """Returns False: no tensor is copied while the training goes on."""
    return False


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """One save: its state and its options. Options are the same on all ranks."""

    state: Mapping[str, object] | Flat
    step: int
    metrics: Mapping[str, object] | None = None
    to_store: bool = True
    """Whether the snapshot is persisted; if not, it is for memory only."""
    compare: bool = True
    """Whether the ranks compare their state before the snapshot; if not, they vote on it afterwards."""
    overlap: Overlap = without_overlap
    """Returns which tensors may be copied after the save returns."""
    owners: Mapping[int, torch.optim.Optimizer] = field(default_factory=dict)
    """Optimizers by id of a tensor that they own; see `flatten`."""
    drains: bool = True
    """With a local tier: whether the save goes to the store, too."""
    exempt: bool = False
    """Whether the step stays for good, whatever this job's `Keep(exempt=)` says."""
    spare: bool = True
    """Whether memory of the device may be taken; not before the training has shown its peak."""
    created: float | None = None
    """When the state was saved first, in seconds since the epoch; None: now."""
    generators: LoadedRng | None = None
    """Random state to save, if it was put back just now; None: the generators' present state."""


def save_step(session: Session, order: SaveOrder) -> Pending:
    """Takes a snapshot, and has it persisted. Collective if `order.compare`.

    Copies that overlap with training begin when the caller calls `pending.staging.go()`. Without a spare core they
    compete with the caller, which may have work to do before training goes on. The caller must know that every rank has
    a free slot: from the beat, or from `await_room`.

    If ranks do not compare before, an error of this rank alone is published as its failure, and raised: as SaveFailed,
    or as it is if a `state_dict()` raised it. The next save compares. An error after the ranks have begun the snapshot,
    such as too little memory for the copies, fails it on all of them, and only a wait raises it.
    """
    with session.stopwatch.stalled(), gc_pause.kept():
        return _save_step(session, order)


def _save_step(session: Session, order: SaveOrder) -> Pending:
    session.owner.check()
    save = session.next_save(order.step)
    compare = order.compare or not session.planner.agreed
    number = session.count_save()  # even if it fails: ranks that count differently would not compare together
    try:
        try:
            flat, metrics, plan, slot = _agree(session, order, compare)
        except StateChanged:
            if compare or session.group.size > 1:
                raise
            compare = True  # one rank has nobody to wait for
            flat, metrics, plan, slot = _agree(session, order, compare)
    except BaseException as error:  # a state_dict() may raise anything, and a caller that catches it trains on
        alone = session.group.size == 1 and not isinstance(error, CkptError)
        if compare or alone:
            raise
        session.give_up(save, number, order.to_store, order.drains, describe(error))
        if not isinstance(error, CkptError) or isinstance(error, StateChanged):
            raise
        text = f"step {save.step} could not be saved on rank {session.group.rank}: {error}"
        raise SaveFailed(text) from error
    content = Content(
        header=session.header_of(save, number, plan),
        layout=plan.layout.encoded,
        table=plan.table,
        values=flat.values,
        metrics=metrics,
        created=time.time() if order.created is None else order.created,
        algorithm=session.root.algorithm,
        exempt=session.is_exempt(order.step) or order.exempt,
        account=session.stopwatch.snapshot(order.step),
    )
    if order.to_store:
        session.expect(save, order.drains, plan.puts_layout)
    staging = session.stager.begin(slot, content)
    replicas, reading = list[CopyJob](), None
    try:
        with staging.failing():
            sources = session.planner.sources(flat.leaves, plan, order.overlap)
            replicas = session.local_replicas(save, number, flat.leaves, plan, order.overlap)
            reading = None if compare else session.read_shared(flat.leaves, plan, order.overlap, number)
            session.stager.copy(staging, sources, replicas, order.spare, reading)
    finally:  # after Ctrl-C, too: the other ranks have begun theirs
        if compare:
            session.verdicts.compared(number)
        else:
            session.verdicts.vote(save, number, order.to_store, staging, reading)
        session.snapshots.begin(save, number, staging, order.to_store, replicas)
    session.planner.let_go(flat)
    deadline_s = session.root.save_deadline_s
    return Pending(session.outcomes, session.group, save, staging, order.to_store, deadline_s, order.drains)


def _agree(session: Session, order: SaveOrder, compare: bool) -> tuple[Flat, dict[str, values.Json], Plan, Slot]:
    """Does everything that can fail before copies are ordered; if ranks compare, it fails on all or on none. Otherwise
    the other ranks are told of a failure, so the generation has begun then. It begins with a save that is not refused
    and does not lack memory: the step that it resumes from depends on its first step."""
    group, planner = session.group, session.planner
    if not compare:
        session.lineage.begin(session.writer, order.step)
        flat, metrics = session.look(order.state, order.metrics, order.owners, order.generators)
        plan = planner.plan(flat)
        return flat, metrics, plan, session.snapshots.take_slot(plan.body_nbytes)

    def look() -> tuple[Flat, dict[str, values.Json], dict[str, Row]]:
        flat, metrics = session.look(order.state, order.metrics, order.owners, order.generators)
        return flat, metrics, planner.rows(flat)

    flat, metrics, rows = together(group, f"saving step {order.step}", look)
    is_first = not planner.agreed
    plan = planner.agree(flat, rows)
    if is_first:
        warn_of_unreached(group, session.settings.codec, plan.layout, order.step)
    what = f"making room for step {order.step}"
    slot = together(group, what, lambda: session.snapshots.take_slot(plan.body_nbytes))
    session.lineage.begin(session.writer, order.step)
    return flat, metrics, plan, slot


# Loading


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One load: the state to fill and its options; see `ckptlib.load`."""

    state: Mapping[str, object]
    strict: bool = True
    rename: Rename = None
    only: Only = None
    cast: bool = False
    device: str | torch.device | None = None
    optional: str | Sequence[str] = ()
    begun: dict[str, SaveId] = field(default_factory=dict)
    """Step that each tensor was read from, by its saved name, for tensors that a load by this order has begun to read.
    If that load fails, the next one by this order may be of another step. Omits random generators, which are read into
    new tensors, and put back when everything has been read."""
    reader: Callable[[StepSource, int], Reader] = Reader
    """Makes a reader from the source, for a rank."""

    def __post_init__(self) -> None:
        check_selection(self.only, self.rename, self.optional)


class Loaded(NamedTuple):
    report: LoadReport
    filled: list[torch.Tensor]
    """Every tensor that was read into."""
    whole: bool
    """Whether all of the state was filled, except plain values that the checkpoint lacks."""
    part: Part
    """Part of the saved rank whose values this rank takes."""


def load_step(group: Group, source: StepSource, order: LoadOrder, generators: LoadedRng | None = None) -> Loaded:
    """Fills the state from one step, and `generators` with the saved random state. Collective.

    Writes nothing before this rank's copies of a save under way are done.
    """
    with gc_pause.kept() as collect_again:  # around a call: its objects are gone when it returns
        return _load_step(group, source, order, generators, collect_again)


def _load_step(
    group: Group,
    source: StepSource,
    order: LoadOrder,
    generators: LoadedRng | None,
    collect_again: Callable[[], None],
) -> Loaded:
    what, laps = f"loading step {source.save.step} from {source.where}", Laps()
    whole: Mapping[str, object] = order.state
    if generators is not None:
        whole = {**order.state, RNG: generators}
        if not isinstance(order.state, MutableMapping):  # so that an entry which would only reach the copy is reported
            whole = MappingProxyType(whole)
    source.bring({own_rank(group.rank, source.world_size)})
    laps.end("bring")
    reader, wanted = _bring_and_match(group, source, whole, order, what)
    unexpected, untouched, lost = lacked_anywhere(group, wanted)
    together(group, what, lambda: _check(source.save, order, wanted, unexpected))
    if order.strict and group.rank == 0:
        tell_excused(source.save.step, untouched, [*wanted.excused([*unexpected, *wanted.foreign]), *lost])
    elif not order.strict:
        tell_nothing_fits(source.save.step, wanted)

    wants, overlapping = set_apart(wanted.wants)
    near = lru_cache(maxsize=None)(source.near)  # scans all ranks; thousands of tensors lie with the same ones
    reads, buckets, by_links = share_out(wants, group, lambda want: near(reader.ranks_for(want)))
    total = sum(tensor.nbytes for want in reads for _, tensor in want.pieces)
    if total > QUICK_BYTES:
        collect_again()
    laps.end("plan")
    source.bring(set().union(*map(reader.ranks_for, reads)))
    laps.end("bring")

    order.begun.update((want.name, source.save) for want in wanted.wants if not is_random(want.name))
    # here: with several ranks, the thread that fills has other current streams than the training
    wait_for_work = accelerator.work_so_far(tensor for want in reads for _, tensor in want.pieces)

    def fill() -> None:
        wait_for_copies()
        for want in wanted.wants:  # torch sees no write by address; autograd and the next save ask for its counts
            for tensor in (want.outer, *(tensor for _, tensor in want.pieces)):
                if tensor is not None:
                    increment_version(tensor)
        wait_for_work()
        with progress(what, total, shown=group.rank == 0) as advance:
            reader.read(reads, advance)

    together_at_length(group, what, fill)
    laps.end("read")
    spread(buckets, group, by_links)
    laps.end("spread")

    def complete() -> None:
        bring_together(overlapping, source.save.step)
        wanted.complete()

    together(group, what, complete)
    warn_of_own_values(group, source, reader, wanted)
    if whole is not order.state and isinstance(order.state, MutableMapping):  # plain values were put into the copy
        order.state.update({key: value for key, value in whole.items() if key != RNG})
    report = LoadReport(
        step=source.save.step,
        source=source.where,
        save=source.save,
        nbytes=reader.nbytes_read,
        seconds=laps.total,
        missing=wanted.missing,
        unexpected=(*unexpected, *wanted.foreign, *lost),
        values=wanted.values,
        rounded=reader.rounded,
        in_memory=source.in_memory,
        phases=laps.seconds,
    )
    filled = [tensor for want in wanted.wants for _, tensor in want.pieces]
    whole_state = order.only is None and wanted.plain.issuperset(wanted.missing)
    return Loaded(report, filled, whole_state, reader.part(reader.own_rank))


def _check(save: SaveId, order: LoadOrder, wanted: Targets, unexpected: Sequence[str]) -> None:
    """Raises StateMismatch, before anything is read, if this step does not fit the state, or would leave values in
    tensors that a failed load has read into them."""
    wanted.check(save.step, unexpected, order.strict)
    names, others = _left_spoiled(order, [name for name in wanted.missing if name not in wanted.apart])
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise StateMismatch(
            f"step {save.step} has no {', '.join(names[:8])}{more}, so a load of it leaves that as it is; but what is "
            f"in it now was read of step {', '.join(sorted(others))}, which failed, and what it was is lost. Start the "
            f"program again with restore(step={save.step}), which goes back to that step at once"
        )


def _left_spoiled(order: LoadOrder, missing: Sequence[str]) -> tuple[list[str], set[str]]:
    """Returns the missing names that a failed load has read into, or into a part of, and that load's steps."""
    if not order.begun:  # `rename` may be the user's function, and is called for these names only if needed
        return [], set()
    read: dict[str, str] = {}
    for name, save in order.begun.items():
        while name and name not in read:
            read[name] = str(save.step)
            name = name.rpartition("/")[0]
    named = Selection(None, _but_generators(order.rename)).named
    found = [(name, read[saved]) for name in missing if (saved := named(name)) in read]
    return [name for name, _ in found], {step for _, step in found}


def _bring_and_match(
    group: Group, source: StepSource, state: Mapping[str, object], order: LoadOrder, what: str
) -> tuple[Reader, Targets]:
    """Matches saved tensors with the state; brings shards that this turns out to need, such as another stage's.

    Collective.
    """
    matched: list[tuple[Reader, Targets]] = []

    def lacks() -> set[int]:
        try:
            if not matched:
                reader = order.reader(source, group.rank)
                names = SavedNames(reader, as_many=source.world_size == group.size)
                found = targets(
                    state,
                    names,
                    rename=_but_generators(order.rename),
                    only=_and_generators(order.only) if RNG in state else order.only,
                    cast=order.cast,
                    device=order.device,
                    optional=order.optional,
                    tops=[join("", key) for key in order.state],
                )
                matched.append((reader, found))
        except NotBrought as error:
            return {error.rank}
        return set()

    while group.any(bool(lacking := together(group, what, lacks))):
        source.bring(lacking)
    return matched[0]


def _but_generators(rename: Rename) -> Rename:
    """Excludes the names that ckptlib adds from `rename`: a function of the user's does not know them."""
    if rename is None or isinstance(rename, Mapping):
        return rename
    return lambda name: name if is_random(name) else rename(name)


def _and_generators(only: Only) -> Only:
    """Adds the random generators to `only`: they were asked for besides a part of the state."""
    return None if only is None else [*([only] if isinstance(only, str) else only), RNG]
