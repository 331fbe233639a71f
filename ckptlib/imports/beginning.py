"""The source of a run whose own root has no step: a step of another root, or another library's checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ckptlib.catalog.catalog import Catalog
from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.errors import CheckpointNotFound, FormatError, StateError, StateMismatch
from ckptlib.events import Initialized
from ckptlib.format import keys
from ckptlib.format.values import Json
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.foreign_step import ForeignStep
from ckptlib.imports.formats import Format, format_of
from ckptlib.loading.committed import resolve
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename, Selection
from ckptlib.policy.patterns import patterns_of
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
from ckptlib.saving.session import Session
from ckptlib.saving.whole_state import first_look
from ckptlib.state.collector import Flat
from ckptlib.stores import absolute, open_store

log = logging.getLogger(__name__)

LOCAL = "file://"


@dataclass(frozen=True, slots=True)
class Init:
    """What `Checkpointer(init_from=)` begins from, if a path or URL alone does not say enough.

    source:   the URL or path of a root, or the path of another library's checkpoint, which every rank can see.
    step:     of a root: a number, "latest", "best" or a name. Another library's checkpoint has one step only.
    map:      from a name in the state to the source's name, as for `ckptlib.load`: a function, or a dict of names and
              path prefixes, such as {"model": "ema"}.
    cast:     allow a target's dtype to differ from the source's.
    optional: names, path prefixes or patterns that only one side may have, as for `ckptlib.load`.
    storage_options: of a root in another store; default: the Checkpointer's own.
    """

    source: str | Path
    step: int | str = "latest"
    map: Rename = None
    cast: bool = False
    optional: str | Sequence[str] = ()
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)


class Beginning:
    """Reads the source of a Checkpointer with `init_from=`. The same on all ranks."""

    def __init__(self, init: Init, only: Only, session: Session) -> None:
        """Collective. Looks at the source if the job is the first of its root, which then can have no step.

        Raises ValueError if the arguments can be no source, then CheckpointNotFound or FormatError, on all ranks.
        """
        self._init, self._only, self._session = init, only, session
        self._url = absolute(init.source)
        if self._url == session.settings.url:
            raise ValueError(f"init_from={str(init.source)!r} is the root of this run, which restores from it anyway")
        names = None if only is None else sorted(patterns_of("init_only", only))  # a set has an order on each rank
        if not session.group.same(f"{self._url} {init.step} {names}".encode()):
            raise ValueError("init_from= and init_only= must be the same on all ranks")
        if session.generation.number == 1:
            self._look()

    @property
    def _options(self) -> Mapping[str, object]:
        """Storage options for the store of a root."""
        own = self._init.storage_options
        if own is not None or self._url.partition("://")[0] != self._session.settings.url.partition("://")[0]:
            return own or {}
        return self._session.settings.options

    def _look(self) -> Format | None:
        """Returns the format of another library's checkpoint; None for a root. Collective."""

        def look() -> Format | None:
            path = Path(self._url.removeprefix(LOCAL))
            root = (path / keys.ROOT, path / keys.copy_key(keys.ROOT))
            if self._url.startswith(LOCAL) and not any(document.is_file() for document in root):
                return _foreign_format(path)
            if self._session.group.rank == 0:
                with open_store(self._url, self._options) as store:
                    catalog = Catalog(store)
                    catalog.root()
                    catalog.resolve(self._init.step)
            return None

        return together(self._session.group, f"looking at init_from={str(self._init.source)!r}", look)

    def load(self, state: Mapping[str, object], strict: bool, device: str | torch.device | None) -> LoadReport:
        """Fills `state`; collective. The run still begins at step 0, and its record says what it began from.

        Raises what `ckptlib.load` and `ckptlib.convert` raise.
        """
        session, init = self._session, self._init
        known = self._look()
        order = LoadOrder(
            state,
            strict=strict,
            rename=init.map,
            only=self._only,
            cast=init.cast,
            device=device,
            optional=init.optional,
        )
        try:
            if known is None:
                kind = "ckptlib"
                with open_store(self._url, self._options) as store:
                    source = resolve(session.group, Catalog(store), init.step)
                    report = load_step(session.group, source, order).report
            else:
                path = Path(self._url.removeprefix(LOCAL))
                step = opened(session.group, known, path, state, self._only, init.map)
                kind = known.name
                report = load_step(session.group, step, replace(order, reader=lambda _, rank: step.reader(rank))).report
        except StateMismatch as error:
            raise StateMismatch(f"{error}; here, only= is init_only=, and the rest goes into Init") from error
        assert report.save is not None
        record: dict[str, Json] = {"url": report.source, "kind": kind}
        if known is None:
            record["step"] = str(report.save)
        session.lineage.note_init(record)
        began = f"{kind} in {report.source}" if known is not None else f"step {report.save} of {report.source}"
        session.listener.tell(Initialized(0, began, report.nbytes, report.seconds))
        return replace(report, step=0, save=None, initialized_from=began)


def begins_from(given: str | Path | Init | None, only: Only, session: Session) -> Beginning | None:
    """Returns the beginning that a Checkpointer was given, or None. Collective."""
    if given is None:
        if only is not None:
            raise ValueError(f"init_only={only!r} says what of init_from= is taken, and there is no init_from=")
        return None
    return Beginning(given if isinstance(given, Init) else Init(given), only, session)


def _foreign_format(path: Path) -> Format:
    """Raises CheckpointNotFound or FormatError if the path is of neither kind."""
    if not path.exists():
        raise CheckpointNotFound(f"{path}: does not exist, or this host does not see it")
    try:
        return format_of(path)
    except FormatError as error:
        raise FormatError(f"{path}: is no root of ckptlib; nor another library's: {error}") from error


class _Needs:
    """The names that a state needs of a source. Keeps no tensors: they may have been made for the look."""

    def __init__(self, state: Mapping[str, object], only: Only, rename: Rename) -> None:
        flat, asked = first_look(state), Selection(only, None)
        named = Selection(None, rename).named
        names = (*(leaf.name for leaf in flat.leaves), *flat.values, *flat.objects)
        self._named, self._names = named, [name for name in names if asked.wanted(name, whole=True)]
        self._ties: dict[str, list[str]] = {}
        """The source's names of what the state has tied, by the first of the state's names."""
        for name, first in flat.aliases.items():
            self._ties.setdefault(first, [named(first)]).append(named(name))

    @property
    def names(self) -> Iterator[str]:
        """The source's names of everything to be filled. Computed only if needed: `rename` may be the user's."""
        return map(self._named, self._names)

    def tie(self, foreign: Foreign) -> None:
        """Ties names of the state to a tensor that the source has under only one of its names, as safetensors does."""
        for names in self._ties.values():
            there = [name for name in names if name in foreign.leaves]
            for name in names if there else ():
                if name not in there:
                    foreign.add_alias(name, there[0])


def opened(
    group: Group, known: Format, path: Path, state: Mapping[str, object], only: Only, rename: Rename
) -> ForeignStep:
    """Returns another library's checkpoint as a step that fits the state. Every rank maps the files itself. Collective.

    The ranks look at the state first: a `state_dict()` may be collective, and a rank that cannot read its files would
    never call it.
    """
    needs = together(group, "looking at the state", lambda: _Needs(state, only, rename))

    def read() -> tuple[bytes, ForeignStep]:
        foreign = Foreign(known.name)
        known.read(path, foreign)
        foreign.leave_out_strange(needs.names)
        seen = _described(foreign.flat)  # without ties, which may differ between ranks, as between stages of a pipeline
        needs.tie(foreign)
        for note in foreign.notes if group.rank == 0 else ():
            log.warning("%s", note)
        return seen, ForeignStep(foreign.flat, str(path), foreign.step or 0)

    seen, step = together(group, f"opening {path}", read)
    if not group.same(seen):
        raise StateError(f"{path}: the ranks do not see the same checkpoint there; is the path on storage they share?")
    return step


def _described(flat: Flat) -> bytes:
    tensors = sorted([leaf.name, leaf.dtype, leaf.shape, leaf.tied] for leaf in flat.leaves)
    return json.dumps([tensors, flat.objects], sort_keys=True).encode()
