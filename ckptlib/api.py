"""save, save_async, load, checkpoints: the functions for scripts that hold no Checkpointer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from ckptlib.catalog.catalog import Catalog, CheckpointInfo
from ckptlib.catalog.history import counted
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import TRIES, is_newest_there
from ckptlib.checkpoint import LoadOrder, SaveOrder, load_step, save_step
from ckptlib.errors import CheckpointNotFound, WaitTimeout
from ckptlib.format import values
from ckptlib.format.keys import SaveId, checked_step
from ckptlib.loading.committed import resolve
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename
from ckptlib.policy.best import Best
from ckptlib.policy.codec import AUTO, Asked, CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.ranks.meeting import meet
from ckptlib.ranks.together import together
from ckptlib.saving.pending import Pending
from ckptlib.saving.registry import registry
from ckptlib.saving.settings import TIMEOUT
from ckptlib.saving.standing import await_room
from ckptlib.saving.whole_state import check_dict
from ckptlib.state.rng import LoadedRng
from ckptlib.stores import absolute, open_store, url_text

CALL_TIMEOUT = timedelta(seconds=20)
"""How long `save` waits for all ranks to call it."""


def save(
    url: str | Path,
    state: Mapping[str, object],
    step: int,
    *,
    storage_options: Mapping[str, object] | None = None,
    process_group: dist.ProcessGroup | None = None,
    codec: Asked = AUTO,
    keep: Keep | None = None,
    metrics: Mapping[str, object] | None = None,
    timeout: timedelta = CALL_TIMEOUT,
) -> None:
    """Saves `state` as `step`. When it returns, the step is committed and durable, on every rank.

    Collective over `process_group` (default: the world). A rank that calls it alone gets AgreementFailed after
    `timeout`. `state` is a dict of tensors, plain values, modules, optimizers, generators and objects with
    state_dict() and load_state_dict(), nested in dicts, lists and tuples.

    codec: "auto", "raw" or "planes", or a dict of these and of `Lossy` by pattern of tensor names, as for
           `Checkpointer`.
    keep:  which steps to keep, as for `Checkpointer`; None keeps all of them. `exempt` is asked on rank 0, about this
           step.
    metrics: plain values by name, saved with the step: {"val_loss": loss.item()}. Rank 0's are recorded.

    Raises, on all ranks: UnsupportedState for state that cannot be saved; NoRoom without room for a snapshot;
    SaveFailed if the step will never exist; ValueError if `step` does not come after the last one that this process
    saved to the root, or if `codec` or `keep`, but for `exempt`, are not those of that save.
    """
    pending = save_async(
        url,
        state,
        step,
        storage_options=storage_options,
        process_group=process_group,
        codec=codec,
        keep=keep,
        metrics=metrics,
        timeout=timeout,
    )
    await_committed(pending)


def await_committed(pending: Pending) -> None:
    """Waits until a save is committed. Collective. Raises SaveFailed, on all ranks, if the step will never exist."""
    group = pending.group
    while not group.any(together(group, f"saving step {pending.step}", lambda: _is_committed(pending))):
        pass  # a large state and a slow store may take longer than ranks wait for one another in a collective


def _is_committed(pending: Pending) -> bool:
    """Waits for a while and returns whether the step is committed, which only rank 0 can tell."""
    patience_s = pending.group.patience_s
    try:
        if pending.group.rank == 0:
            pending.wait_committed(patience_s)
        else:
            pending.wait_released(patience_s)  # so that its slot is free for the next one
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
    codec: Asked = AUTO,
    keep: Keep | None = None,
    metrics: Mapping[str, object] | None = None,
    timeout: timedelta = CALL_TIMEOUT,
) -> Pending:
    """Copies `state` and returns; another process writes it.

    Like `save`, but the step does not exist until it is committed: call `pending.wait_committed()`. Blocks while both
    slots are in use by earlier saves.
    """
    order = SaveOrder(state, checked_step(step), metrics)
    pending = begin_save(url, order, storage_options, process_group, codec, keep, timeout)
    pending.staging.go()
    return pending


def begin_save(
    url: str | Path,
    order: SaveOrder,
    storage_options: Mapping[str, object] | None,
    process_group: dist.ProcessGroup | None,
    codec: Asked,
    keep: Keep | None,
    timeout: timedelta = CALL_TIMEOUT,
    tags: Mapping[str, str] | None = None,
) -> Pending:
    """Does what `save_async` does before `staging.go()`: tensors that overlap are not copied yet. `tags`: tags of the
    first save of a run."""
    state, step, rules = cast(Mapping[str, object], order.state), order.step, CodecRules.of(codec)
    rest = replace(keep, exempt=None) if isinstance(keep, Keep) else keep  # functions of two ranks never compare equal
    others = {"codec": None if rules.asked == AUTO else rules.asked, "keep": rest}
    what = " with ".join([f"save of step {step}", *(f"{k}={v!r}" for k, v in others.items() if v is not None)])
    meet(process_group, url_text(url), what, timeout)
    session = registry.session(absolute(url), storage_options, process_group, rules, state, step, rest, tags)
    await_room(session)
    if keep is not None and session.group.rank == 0:  # only rank 0 is asked
        order = replace(order, exempt=keep.is_exempt(step))
    with session.outcomes.turn:  # another thread may wait for an earlier save
        return save_step(session, order)


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
    optional: str | Sequence[str] = (),
    cast: bool = False,
    random: bool = False,
    device: str | torch.device | None = None,
    metric: str | None = None,
    mode: str | None = None,
    timeout: timedelta = TIMEOUT,
) -> LoadReport:
    """Fills `state` in place from a committed step, whatever layout and world size it was saved with.

    Collective over `process_group` (default: the world). The contents of `state` are undefined until it returns, and if
    it raises. If a save still copies tensors, nothing is written before that is done.

    If you load a whole step into the state that you save next, the run goes back to that step: later steps stay in the
    store but are no longer listed. Loading into other objects, or only a part, does not change the history.

    step:   a number, "latest", "best", or a name as `ckptlib ls --json` prints it. A step that a rewind abandoned has
            only its name, which `ckptlib ls --all --json` prints.
    metric: with step="best": the metric that says which step is, as rank 0 told it when it saved; and `mode`: "min" or
            "max". Default: those of `Keep(best=, mode=)` of the newest job that had one. NaN is never best.
    strict: if True, a tensor or object that only one side has is an error; if False, the report lists it, and a warning
            says so if the checkpoint has nothing of a rank's state. A plain value that only one side has is listed with
            a warning.
    map:    from a name in `state` to the checkpoint's name: a function, or a dict of names and path prefixes, such as
            {"model": "ema"}.
    only:   load only these names, path prefixes or patterns (fnmatch), such as "model" or "model/layers.*"; the rest of
            `state` is left alone.
    optional: names, path prefixes or patterns that only one side may have, such as "config/*": left as they are, with a
            warning, and listed in the report. What both sides have is loaded, and must fit.
    cast:   allow a target's dtype to differ from the saved one. It is never converted silently, and complex numbers are
            not converted to real ones. The moments of torch's optimizers take the dtype of their parameters.
    random: restore the RNG state, too, whatever `only` says.
    device: where to allocate parameters and buffers that are on the meta device. Default: the device of the DTensor's
            mesh, else that of torch.set_default_device, else the accelerator, else the host. Use "cpu" for FSDP2 with
            CPU offloading.
    timeout: how long ranks wait for one another.

    Raises CheckpointNotFound; StateMismatch, which names everything that does not fit; and CorruptData, which names the
    damaged tensor. If one rank raises, all ranks do.
    """
    step = step if isinstance(step, str) else checked_step(step)
    best = _best(step, metric, mode)
    check_dict(state)
    meet(process_group, url_text(url), f"load of step {step}", timeout)
    group = registry.group(process_group)
    with open_store(url_text(url), storage_options) as store:
        catalog = Catalog(store)
        source = resolve(group, catalog, step, best)
        generators = LoadedRng(group.rank, source.world_size) if random else None
        together(group, f"loading step {source.save.step}", lambda: _refuse_going_back(url, source.save, state, only))
        order = LoadOrder(state, strict=strict, rename=map, only=only, cast=cast, device=device, optional=optional)
        report, filled, whole, _ = load_step(group, source, order, generators)
    if generators is not None:
        together(group, f"putting back the random generators of step {source.save.step}", generators.restore)
    loads = registry.note_load(absolute(url), process_group)
    loads.add(source.save, state, filled, whole=whole)
    for keeper in registry.keepers:
        keeper.note_load(absolute(url), loads)
    return report


def _best(step: int | str, metric: str | None, mode: str | None) -> Best | None:
    """Returns the rule for the best step; None if neither metric nor mode was given. Raises ValueError unless both
    were, with step="best"."""
    if metric is None and mode is None:
        return None
    if step != "best" or metric is None:
        raise ValueError(
            f"load(step={step!r}, metric={metric!r}, mode={mode!r}): metric and mode say which step is the best; give "
            "both, with step='best'"
        )
    return Best(metric, mode or "")


def _refuse_going_back(url: str | Path, save: SaveId, state: Mapping[str, object], only: Only) -> None:
    """Raises if a Checkpointer refuses a load of an older step into its state; called before anything is filled."""
    for keeper in registry.keepers if only is None else ():
        keeper.refuse_going_back(absolute(url), save, state)


def checkpoints(url: str | Path, *, storage_options: Mapping[str, object] | None = None) -> Iterator[CheckpointInfo]:
    """Yields the committed steps of a root's history in ascending order, each once: of several saves of a step, the
    latest, which a load of the step reads. Any process may call it alone.

    Leaves out those that retention drops meanwhile; if that is the newest one, those that came after it follow.
    """
    with open_store(url_text(url), storage_options) as store:
        catalog = Catalog(store)
        listed = counted(catalog.visible())
        for _ in range(TRIES):
            for info in each(partial(_info, catalog), listed):
                if info is not None:
                    metrics = {name: values.decode(value, name) for name, value in info.metrics.items()}
                    yield replace(info, metrics=metrics)
            if is_newest_there(catalog, listed):
                break
            listed = [save for save in counted(catalog.visible()) if save > listed[-1]]


def _info(catalog: Catalog, save: SaveId) -> CheckpointInfo | None:
    try:
        return catalog.info(save, visible=True)
    except CheckpointNotFound:
        return None  # dropped since it was listed
