"""Watches loads into the state that a Checkpointer saves: the Checkpointer goes on from there, or refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from typing_extensions import override

from ckptlib.errors import StateError
from ckptlib.format.keys import SaveId
from ckptlib.loading.loaded import Filled, Loads, Parts
from ckptlib.saving.registry import Keeper, registry
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)


def _batches_given(part: object, is_fresh: bool) -> object:
    """Returns how many batches a loader has given. Ours counts from where it was made or loaded; torchdata's
    StatefulDataLoader and nodes.Loader from the start of the epoch, which is meaningful on a fresh run only."""
    iterator = getattr(part, "_iterator", getattr(part, "_it", None)) if is_fresh else None
    return getattr(part, "batches_given", getattr(iterator, "_num_yielded", 0))


class StateKeeper(Keeper):
    """Keeps the state of one Checkpointer; it hears of loads in this process from `begin` to `end`."""

    def __init__(self, session: Session, state: Mapping[str, object]) -> None:
        self._session = session
        self._state = state

    def begin(self) -> None:
        """Starts to hear of loads. An earlier load counts, too."""
        url = self._session.settings.url
        self.note_load(url, registry.take_loads(url, self._session.over))
        registry.keepers.add(self)

    def warn_of_early_batches(self) -> None:
        """Warns, before the first step, of a batch that a loader of the state has given: it counts as trained on, and
        is not."""
        is_fresh = self._session.lineage.resumed_from is None
        given = (_batches_given(part, is_fresh) for part in Parts(self._state, ask=False).objects)
        if self._session.group.rank == 0 and any(isinstance(count, int) and count > 0 for count in given):
            log.warning(
                "a batch was asked for before the first body of loop, and each restart will skip one. Write "
                "zip(ckpt.loop(start, total), batches), not zip(batches, ckpt.loop(start, total)), which asks for the "
                "next batch before the step is saved; and take none beforehand"
            )

    def end(self) -> None:
        """Stops hearing of loads: later ones belong to another Checkpointer."""
        registry.keepers.discard(self)
        session = self._session
        if not session.owner.here:
            return
        registry.take_loads(session.settings.url, session.over)
        if session.store_state.superseded is None:
            registry.go_on_behind(session)

    @override
    def refuse_going_back(self, url: str, save: SaveId, state: Mapping[str, object]) -> None:
        session = self._session
        if url != session.settings.url or not session.lineage.began:
            return
        if not Filled(Parts(state, ask=False)).all_of(Parts(self._state, ask=False)):
            return
        if save != SaveId(session.newest_step, session.generation):
            raise StateError(
                f"cannot load step {save.step} into the state of a Checkpointer that has saved or gone back since: its "
                "next save would continue an older history. To go back, close it, load, and create another "
                "Checkpointer; to inspect the step, load it into other objects"
            )

    @override
    def note_load(self, url: str, loads: Loads) -> None:
        into = loads.into(Parts(self._state, ask=False)) if url == self._session.settings.url else None
        if into is not None and not self._session.lineage.began:
            self._session.lineage.resumed_from = into
