"""`ckptlib plan`: plans checkpoints, from a number of parameters or from a root that has some."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import click
import numpy as np
from click.core import ParameterSource

from ckptlib.catalog.accounts import read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.goodput import goodput
from ckptlib.cli.ls import committed
from ckptlib.cli.options import open_url, storage_options, with_output, with_storage_options
from ckptlib.cli.output import Output
from ckptlib.cli.quantities import COUNT, SIZE, SPAN, Share
from ckptlib.errors import CheckpointNotFound
from ckptlib.format import keys
from ckptlib.reporting.times import persisted
from ckptlib.sizing.activations import Transformer
from ckptlib.sizing.parameters import MOMENTS, NO_OPTIMIZER, PRECISIONS, per_parameter
from ckptlib.sizing.plan import Plan, Question, Subject
from ckptlib.stores import Store
from ckptlib.stores.measure import measure
from ckptlib.words import count, duration, percent, size

MEASURED_LEAST, MEASURED_MOST, MEASURED_MOST_LOCAL = (n * 1024 * 1024 for n in (16, 128, 512))
"""The limits of the bytes that a store is measured with, which are else a rank's. A local store is fast, and slower for
few bytes, whose memory the system puts together from scattered pages."""
COPY_NBYTES = 64 * 1024 * 1024
SHAPE = ("layers", "hidden", "heads", "sequence")
OF_SHAPE = ("batch", "tensor_parallel")
OF_PARAMS = ("optimizer", "precision", "ranks", "device_memory")
"""Options that a plan from a root does without."""


@click.command("plan", short_help="Plan checkpoints: bytes, memory, time, cost.")
@click.argument("url", required=False)
@click.option("--params", type=COUNT, help="Number of parameters, such as 7B. Without it, URL is a root with steps.")
@click.option("--optimizer", type=click.Choice([*MOMENTS, NO_OPTIMIZER]), default="adamw", show_default=True)
@click.option("--precision", type=click.Choice([*PRECISIONS]), default="mixed", show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True, help="That share the state, sharded.")
@click.option("--ranks-per-host", type=click.IntRange(1), default=8, show_default=True)
@click.option("--every", type=SPAN, help="Time between saves, such as 2h; else as --mtbf and the budget advise.")
@click.option("--for", "period", type=SPAN, default=7 * 86400.0, help="How long the run is.  [default: 7d]")
@click.option("--keep", type=click.IntRange(1), default=3, show_default=True, help="Steps that stay: Keep(last=).")
@click.option("--stall", type=SPAN, help="Training waits so long for a save; else as memory is copied on this host.")
@click.option("--at-most", type=Share(), default=0.035, show_default=True, help="Budget.")
@click.option("--mtbf", type=SPAN, help="Mean time between failures of the whole job, such as 8h.")
@click.option("--restart", type=SPAN, default=120.0, help="From a failure until training goes on.  [default: 120s]")
@click.option("--bandwidth", type=SIZE, help="Bytes per second that the store takes from all ranks together.")
@click.option("--host-memory", type=SIZE, help="Of one host, for snapshots: the size of /dev/shm.")
@click.option("--device-memory", type=SIZE, help="Of one rank's accelerator.")
@click.option("--copies", type=click.IntRange(0), default=0, show_default=True, help="Peers(copies=); 0: no peers.")
@click.option("--layers", type=click.IntRange(1), help="Of a transformer; with the next three: its activations.")
@click.option("--hidden", type=click.IntRange(1))
@click.option("--heads", type=click.IntRange(1))
@click.option("--sequence", type=click.IntRange(1))
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Micro-batch of one rank.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True)
@with_storage_options
@with_output
def command(
    output: Output,
    option: tuple[str, ...],
    url: str | None,
    params: float | None,
    optimizer: str,
    precision: str,
    ranks: int,
    stall: float | None,
    batch: int,
    tensor_parallel: int,
    **asked: float | None,
) -> bool:
    """Plans checkpoints, from a number of parameters or from a root that has some.

    With --params, URL is a store: it is measured, and left as it was. Without, URL is a root, whose newest step, and
    what its saves took, are the basis.

    \b
    ckptlib plan --params 7B --ranks 64 --mtbf 12h
    ckptlib plan s3://bucket/probe --params 7B --ranks 64
    ckptlib plan s3://bucket/run7
    """
    if params is None and url is None:
        raise click.UsageError("give --params, such as --params 7B, or the URL of a root with steps")
    if params is None:
        _refuse_given(OF_PARAMS, "go with --params; a root tells them of itself")
    shape = {name: asked.pop(name) for name in SHAPE}
    if None in shape.values():
        _refuse_given(OF_SHAPE, "go with --layers, --hidden, --heads and --sequence")
    model = _transformer(shape, batch, tensor_parallel)
    question = Question(model=model, **asked)  # type: ignore[arg-type]
    measured_s = took_s = None
    if params is not None:
        each = per_parameter(precision, optimizer)
        subject = Subject(params * each.in_checkpoint, ranks, params, each)
    if url is not None:
        with open_url(url, storage_options(option)) as store:
            if params is None:
                subject, measured_s, took_s = of_root(store)
            if took_s is None:
                most = MEASURED_MOST_LOCAL if store.is_local else MEASURED_MOST
                nbytes = int(min(max(subject.rank_nbytes, MEASURED_LEAST), most))
                took_s = subject.rank_nbytes / measure(store, nbytes).whole_up
    stall_s = stall or measured_s or subject.rank_nbytes / copy_speed()
    plan = Plan(subject, question, stall_s, persist_s(subject, took_s, question.bandwidth))
    output.document(plan.document())
    _tell_state(output, plan, f"{precision}, {optimizer}")
    _tell_memory(output, plan)
    _tell_time(output, plan, "given" if stall else "measured" if measured_s else "at most: as this host copies memory")
    _tell_storage(output, plan)
    return True


def _refuse_given(names: Sequence[str], why: str) -> None:
    source_of = click.get_current_context().get_parameter_source
    given = [name for name in names if source_of(name) is not ParameterSource.DEFAULT]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"{options}: these {why}")


def _transformer(shape: dict[str, float | None], batch: int, tensor_parallel: int) -> Transformer | None:
    given = {name: int(value) for name, value in shape.items() if value is not None}
    if given and len(given) < len(SHAPE):
        raise click.UsageError("activations need all of --layers, --hidden, --heads and --sequence")
    return Transformer(**given, batch=batch, tensor_parallel=tensor_parallel) if given else None


def of_root(store: Store) -> tuple[Subject, float | None, float | None]:
    """Returns the newest step of a root, the mean stall of its saves, and the median time until saves after the first
    were committed; in seconds, None if not known. Raises CheckpointNotFound."""
    catalog = Catalog(store)
    infos = [(row, row.info) for row in committed(catalog, everything=False) if row.info is not None]
    root = catalog.root()  # raises where there is none
    if not infos:
        raise CheckpointNotFound(f"{store.url} holds no committed step; give --params to plan without one")
    newest = infos[-1][1]
    later = [row.nbytes for row, _ in infos[1:] if row.nbytes is not None]
    changed = sum(later) / len(later) if later else None
    stall_s = goodput(read_accounts(catalog).told).save_cost
    put_at = {keys.parse_manifest_key(entry.key): entry.modified for entry in store.scan(keys.STEPS)}
    told = (put_at[row.save] - info.created for row, info in infos[1:] if row.save in put_at)
    took = [seconds for seconds in (persisted(each, root.save_deadline_s) for each in told) if seconds]
    subject = Subject(newest.nbytes_state, newest.world_size, nbytes_changed=changed)
    return subject, stall_s, statistics.median(took) if took else None


def copy_speed() -> float:
    """Measures how many bytes per second one thread of this host copies in memory."""
    source = np.ones(COPY_NBYTES, np.uint8)
    target = source.copy()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return COPY_NBYTES / min(seconds)


def persist_s(subject: Subject, took_s: float | None, bandwidth: float | None) -> float | None:
    """Returns the seconds until a save is in the store; None if not known. `took_s`: the time of one rank, as saves
    took, or as this process put as many bytes; ranks put in parallel. Together they are no faster than `bandwidth`."""
    times = [took_s] if took_s else []
    times += [subject.nbytes / bandwidth] if bandwidth else []
    return max(times) if times else None


def _line(output: Output, name: str, text: str) -> None:
    output.line(f"{name:<13}", text)


def _tell_state(output: Output, plan: Plan, kind: str) -> None:
    subject, model = plan.subject, plan.question.model
    if subject.each is not None and subject.params is not None:
        each = subject.each
        parts = f"weights {each.weights}, master {each.master}, moments {each.moments}"
        text = f"{subject.params:,.0f} ({kind}): {each.in_checkpoint} bytes of each are saved ({parts})"
        _line(output, "parameters", f"{text}; training takes {each.in_training}")
    ranks = f"{size(subject.rank_nbytes)} for each of {count(subject.num_ranks, 'rank')}"
    _line(output, "checkpoint", f"{size(subject.nbytes)}, {ranks}")
    if subject.nbytes_changed is not None:
        _line(output, "changes", f"{size(subject.nbytes_changed)} is written by a save after the first, in the mean")
    if subject.training_nbytes is not None:
        _line(output, "training", f"{size(subject.training_nbytes)} for each rank, without activations")
    if model is not None:
        less = f"{size(model.activations_without_scores)} where attention scores are recomputed"
        _line(output, "activations", f"{size(model.activations)} for each rank, {less}; never saved")


def _tell_memory(output: Output, plan: Plan) -> None:
    asked = plan.question
    fits = {True: ": fits", False: ": DOES NOT FIT", None: ""}
    room = "" if asked.host_memory is None else f", of {size(asked.host_memory)}"
    what = f"{size(plan.host_nbytes)} on each host for {count(plan.num_slots, 'snapshot')} of each rank"
    _line(output, "host memory", f"{what}{room}{fits[plan.fits_host]}")
    spare = plan.device_spare_nbytes
    if spare is not None:
        left = f"{size(max(spare, 0.0))} of {size(asked.device_memory or 0.0)} is left beside the training"
        _line(output, "device", f"{left}; a snapshot of {size(plan.subject.rank_nbytes)}{fits[plan.fits_device]}")


def _tell_time(output: Output, plan: Plan, how: str) -> None:
    asked, intervals = plan.question, plan.intervals
    words = {
        "budget": f"stalls take {100 * asked.at_most:g} % of the time",
        "persist": "each save is written before the next begins",
        "young": "failures and saves together cost least",
    }
    _line(output, "stall", f"{duration(plan.stall_s)} for each save ({how})")
    if plan.persist_s is not None:
        _line(output, "persist", f"{duration(plan.persist_s)} until a save is in the store, in the background")
    _line(output, "interval", f"{duration(plan.interval)}{' (given)' if asked.every else ''}")
    for name, seconds in intervals.items():
        when = f"at {duration(seconds)}" if name == "young" else f"from {duration(seconds)} on"
        _line(output, "", f"{when}, {words[name]}")
    if plan.ettr is not None:
        _line(output, "ETTR", f"{percent(plan.ettr)} of the time trains steps that count")


def _tell_storage(output: Output, plan: Plan) -> None:
    found = plan.storage
    written = f"{size(found.nbytes_written)} written, {size(found.nbytes_kept)} kept"
    saves = f"{count(found.num_saves, 'save')} in {duration(plan.question.period)}"
    _line(output, "storage", f"{saves}: {written} in {count(found.num_kept, 'step')}")
    dollars = f"${plan.dollars:.4f}, ${plan.dollars * found.num_saves:,.2f} in all"
    _line(output, "requests", f"at most {plan.num_requests:,} to S3 for each checkpoint: {dollars}")
