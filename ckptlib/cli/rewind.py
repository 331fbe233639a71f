"""`ckptlib rewind`: goes back to a step, so that the next job resumes there."""

from __future__ import annotations

import platform
import socket
import time

import click
from rich.text import Text

from ckptlib._version import __version__
from ckptlib.catalog import clock
from ckptlib.catalog.accounts import is_rewind
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.spared import enter_to_go_back
from ckptlib.catalog.step_objects import step_objects
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output, somebody_answers
from ckptlib.errors import CheckpointNotFound, CkptError, ObjectUnreadable
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.stores import Store
from ckptlib.words import count, duration, last, plain

RECENT_S = 600.0
"""A job that put a step or its record less than this long ago may still run."""

LEAP = 10
"""How far the number of a rewind is above the next one. A job that is just starting has the next number, and has
restored what was there; the record of a job that was killed may still be on its way to the store. With a number below
theirs, the rewind would be hidden."""

SHOWN = 8
"""How many steps a message names."""


@click.command("rewind", short_help="Go back to a step: the next job resumes there.")
@click.option("--yes", is_flag=True, help="Do not ask, also where a job may be running.")
@with_store
@click.argument("step")
@with_output
def command(store: Store, output: Output, step: str, yes: bool) -> bool:
    """Goes back to a step: the next job restores it, and later steps are no longer listed.

    Nothing is deleted: later steps stay in the store until `gc --abandoned`, and a rewind to the full name of one of
    them undoes this one. Snapshots in memory and on local disks that were taken after STEP are not restored either. A
    job that still runs is superseded: it stops with an error at its next save, so stop it first. Refuses a step that is
    not whole. STEP: a number, or a name as `ls --json` prints it.
    """
    catalog = Catalog(store)
    catalog.root()
    finish_saves(catalog, catalog.next_generation())  # so saves that are whole are not lost with the job
    save = catalog.resolve(step)
    before = catalog.visible()
    _check_whole(catalog, save, before)
    _ask(catalog, save, before, yes)
    record = _put(catalog, save)
    after = catalog.visible()
    hidden = sorted({*before} - {*after})
    output.document(
        {
            "url": store.url,
            "step": save.step,
            "name": str(save),
            "generation": record.id.number,
            "abandoned": [*map(str, hidden)],
        }
    )
    output.line(f"generation {record.id.number} goes back to step {save.step}: the next job resumes there")
    if hidden:
        numbers = last([other.step for other in hidden], SHOWN)
        text = f"abandoned: {numbers}. To undo: ckptlib rewind {store.url} {hidden[-1]}"
        output.line(Text(plain(text), style="dim"))
    return True


def _check_whole(catalog: Catalog, save: SaveId, visible: list[SaveId]) -> None:
    """Checks a step by its documents and the listing. Raises an error that says what is wrong and names other steps."""
    try:
        step_objects(catalog, save)
    except CheckpointNotFound:  # dropped since it was listed
        raise
    except UNREADABLE as error:
        others = last([other.step for other in visible if other != save], SHOWN) or "none"
        what = "cannot be read" if isinstance(error, ObjectUnreadable) else "is damaged"
        raise type(error)(f"step {save.step} {what}: {error}. Nothing was changed. Other steps: {others}") from error


def _ask(catalog: Catalog, save: SaveId, visible: list[SaveId], yes: bool) -> None:
    """Asks whether to go back. Raises Abort if the answer is no, CkptError if a job may run and nobody can be asked."""
    if yes:
        return
    later = [other for other in visible if other.step > save.step]
    what = f"Go back to step {save.step}" + (f" and abandon {count(len(later), 'step')}" if later else "")
    idle_s = _idle_s(catalog)
    since = f"a job put a step or its record {duration(idle_s)} ago"
    if somebody_answers():
        warning = f"{since}: if it still runs, it stops at its next save. " if idle_s < RECENT_S else ""
        click.confirm(f"{warning}{what}?", abort=True, err=True)
    elif idle_s < RECENT_S:
        raise CkptError(
            f"{catalog.store.url}: {since}, so it may still run. If it does, it stops with Superseded at its "
            "next save, and what it trained until then is lost. Stop it, and say --yes. Nothing was changed"
        )


def _idle_s(catalog: Catalog) -> float:
    """Returns the seconds since a job put a step or its record, by the store's clock."""
    listed = [entry for prefix in (keys.STEPS, keys.GENERATIONS) for entry in catalog.store.scan(prefix)]
    newest = max((entry.modified for entry in listed if _is_of_a_job(catalog, entry.key)), default=0.0)
    return max(clock.now(catalog.store) - newest, 0.0)


def _is_of_a_job(catalog: Catalog, key: str) -> bool:
    """Whether a job put this object, and may still run. People put pins, marks of `refresh`, and records of rewinds; an
    account shows that a job has ended."""
    generation = keys.parse_generation_key(key)
    if generation is not None:
        return not is_rewind(catalog, generation)
    return keys.parse_manifest_key(key) is not None


def _put(catalog: Catalog, save: SaveId) -> Generation:
    """Puts the record of a generation that has no job: its one process is this command. Returns the record."""
    following = catalog.next_generation()
    record = Generation(
        id=GenerationId(following.number + LEAP, following.nonce),
        world_size=1,
        resumed_from=save,
        created=time.time(),
        versions={"ckptlib": __version__, "python": platform.python_version()},
        host=socket.gethostname(),
        rewind=True,
    )
    enter_to_go_back(catalog, save, lambda: catalog.generations.put(record))
    catalog.generations.check_head(record.id)
    return record
