"""Keeps, for a process, a group for each process group, and a session for each root that it saves to."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ckptlib.errors import CkptError
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.loading.loaded import Loads, Parts, tells
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.ranks.group import Group
from ckptlib.ranks.meeting import group_of, group_or_world, is_gone
from ckptlib.ranks.together import together
from ckptlib.saving.session import Session
from ckptlib.saving.settings import SAVE_DEADLINE, TIMEOUT, Settings
from ckptlib.stores.secrets import without_userinfo

log = logging.getLogger(__name__)

Key = tuple[str, dist.ProcessGroup | None]

MAX_OPEN = 4
"""How many roots over one process group keep their sessions open. Each has a writer process, and slots as large as the
state."""

LEFT_TIMEOUT = TIMEOUT / 2
"""How long to wait for saves of a process group that is gone: ranks that have none wait for the others meanwhile."""


class Keeper(Protocol):
    """Saves a state by itself, and must hear of loads into it: a Checkpointer."""

    def refuse_going_back(self, url: str, save: SaveId, state: Mapping[str, object]) -> None:
        """Called before a whole step is loaded into `state`. Raises StateError if that is the keeper's own state and it
        has saved later steps: their history cannot be left by a load."""

    def note_load(self, url: str, loads: Loads) -> None:
        """Called after a load: the keeper may go on from there."""


class Registry:
    """The groups, sessions and loads of one process."""

    def __init__(self) -> None:
        self.groups: dict[dist.ProcessGroup | None, Group] = {}
        self.sessions: OrderedDict[Key, Session] = OrderedDict()
        """Open sessions, the most recently used one last."""
        self._places: dict[Key, SaveId] = {}
        """`Session.place` of sessions that were closed because others are used, and of Checkpointers that have saved
        behind a session that is open here."""
        self.loads: dict[Key, Loads] = {}
        """Loads since the last save."""
        self.keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
        """The keepers that are open."""
        self._left_alone: list[object] = []
        """The parent's groups and sessions. Kept: destroying them would close the parent's connections."""

    @staticmethod
    def key(url: str, over: dist.ProcessGroup | None) -> Key:
        return url, group_or_world(over)  # another world, another session

    def group(self, over: dist.ProcessGroup | None) -> Group:
        """Returns a group for loads, which write nothing and need no session. Collective."""
        world = group_or_world(over)
        self._close_groups(filter(is_gone, [*self.groups]))
        if world not in self.groups:
            self._close_at_exit()
            self.groups[world] = group_of(over, TIMEOUT)
        return self.groups[world]

    def session(
        self,
        url: str,
        options: Mapping[str, object] | None,
        over: dist.ProcessGroup | None,
        codec: CodecRules,
        state: Mapping[str, object],
        step: int,
        keep: Keep | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Session:
        """Returns the session to save `step` with. If an older step was loaded to go on from, the session is of a new
        generation; so it is if the options differ: they may be those of another store. Collective. Waits for saves of
        process groups that are gone.

        `codec` and `keep`: the same on all ranks. Raises ValueError, on all of them, if an open session has others.
        """
        key = self.key(url, over)
        for other in [other for other in self.loads if is_gone(other[1])]:
            del self.loads[other]
        gone = [other for other in self.sessions if is_gone(other[1])]
        self._close_sessions(gone, LEFT_TIMEOUT)  # else their saves in flight would be superseded
        before, loads, origin = self.sessions.get(key), self.loads.get(key), None
        session = None if before is None or before.closed else before
        place = self._places.get(key) or (None if before is None else before.place)
        if session is not None and session.group.any(
            key in self._places or {**session.settings.options} != {**(options or {})}
        ):
            session.close(SAVE_DEADLINE, clean=True)
            session = None
        if session is not None and session.settings.codec != codec:
            raise ValueError(
                f"step {step}: codec={codec.asked!r}, but this process saves to {without_userinfo(url)} with "
                f"codec={session.settings.codec.asked!r}; give the same codec to every save of a run"
            )
        if session is not None and session.settings.keep != keep:
            raise ValueError(
                f"step {step}: keep={keep!r}, but this process saves to {without_userinfo(url)} with "
                f"keep={session.settings.keep!r}; give the same keep to every save of a run"
            )
        if loads is not None:
            origin = gone_back_to(self.group(over), loads, place, state, step)
            if session is not None and origin is not None:
                session.close(SAVE_DEADLINE, clean=True)
                session = None
        if session is None:
            self._close_at_exit()
            self._close_unused(key)
            own = copy.deepcopy({**(options or {})})  # the caller may change theirs before the next save
            settings = Settings(url=url, options=own, codec=codec, keep=keep, tags=tags or {})
            session = self.sessions[key] = Session(settings, over)
            session.lineage.resumed_from = origin
            session.follows = origin or place
            if origin is None and key in self._places:
                session.passed_step = self._places[key].step
        self._places.pop(key, None)
        self.sessions.move_to_end(key)
        self.loads.pop(key, None)
        return session

    def _close_unused(self, key: Key) -> None:
        """Closes unused sessions before another is opened: of the others over its ranks, all but the most recently
        used. A session stays open while somebody may still ask what became of a save: a rank that does not commit would
        no longer hear of it. Collective."""
        others = [other for other in self.sessions if other[1] == key[1] and other != key]
        for other in others[: max(len(others) + 1 - MAX_OPEN, 0)]:
            session = self.sessions[other]
            if session.closed or not session.group.any(session.outcomes.may_be_asked()):
                if session.place is not None:
                    self._places[other] = session.place
                session.writer.hurries = True  # training stands still; the writer finishes its sweep alone
                self._close_sessions([other], SAVE_DEADLINE)

    def newest_step(self, url: str, over: dist.ProcessGroup | None) -> int | None:
        """Returns the last step that this process saved to a root; None if it has saved none."""
        key = self.key(url, over)
        if key in self._places:
            return self._places[key].step
        session = self.sessions.get(key)
        return None if session is None or session.closed or session.newest_step < 0 else session.newest_step

    def go_on_behind(self, session: Session) -> None:
        """A Checkpointer of this process has saved by this session, and ends: the next save goes on from there. The
        session that `save` had before could save no more."""
        key = self.key(session.settings.url, session.over)
        before = self.sessions.get(key)
        if before is not None and before.generation < session.generation and session.place is not None:
            self._places[key] = session.place

    def begin_again(self, url: str, over: dist.ProcessGroup | None) -> None:
        """Makes the next save to a root begin a new generation. Collective; waits for saves in flight."""
        session = self.sessions.pop(self.key(url, over), None)
        self._places.pop(self.key(url, over), None)
        if session is not None and not session.closed:
            session.close(SAVE_DEADLINE, clean=True)

    def note_load(self, url: str, over: dist.ProcessGroup | None) -> Loads:
        """Returns the loads from a root since the last save to it; the caller adds to them."""
        return self.loads.setdefault(self.key(url, over), Loads())

    def take_loads(self, url: str, over: dist.ProcessGroup | None) -> Loads:
        """Returns the loads from a root since the last save to it, and forgets them."""
        return self.loads.pop(self.key(url, over), Loads())

    def close(self) -> None:
        """Waits until all saves in flight are committed, and closes everything."""
        self._close_sessions([*self.sessions], SAVE_DEADLINE)
        self._close_groups([*self.groups])

    def _close_sessions(self, keys: Iterable[Key], timeout: timedelta) -> None:
        for key in keys:
            try:
                self.sessions.pop(key).close(timeout, clean=True)
            except CkptError as error:
                log.error("%s", error)

    def _close_groups(self, keys: Iterable[dist.ProcessGroup | None]) -> None:
        for key in keys:
            self.groups.pop(key).close()

    def begin_in_child(self) -> None:
        """Forgets everything in a forked process: its parent's groups and sessions are neither its own to use nor to
        close."""
        self._left_alone.append((*self.groups.values(), *self.sessions.values(), *self.keepers))
        for kept in (self.groups, self.sessions, self._places, self.loads, self.keepers):
            kept.clear()

    def _close_at_exit(self) -> None:
        if not self.groups and not self.sessions:
            atexit.unregister(self.close)
            atexit.register(self.close)


registry = Registry()

if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=registry.begin_in_child)


def gone_back_to(
    group: Group, loads: Loads, place: SaveId | None, state: Mapping[str, object], step: int
) -> SaveId | None:
    """Returns the earlier save from which this one goes on; None if it comes after `place`. Collective. `place`: see
    `Session.place`, of the last session, which may be closed by now.

    That save is the step that was loaded into the state that is saved now. A state that was not loaded into goes on
    from the process's last load before its first save, or before it saves an older step: the state may be a copy of
    what was loaded.
    """

    def found() -> tuple[str, SaveId | None]:
        parts = Parts(state, ask=True)
        into = loads.into(parts)
        some = None if into is not None else loads.into_some_of(parts)
        return str(into or "") if tells(parts) else "any", some

    own, some = together(group, f"saving step {step}", found)
    told = {data.decode() for data in group.gather(own.encode())} - {"any"}
    if told and told != {""} and len(told) == 1:
        origin = parse_save(told.pop())
        return origin if origin.step < step and origin != place else None
    if place is None or step <= place.step:
        return loads.before(step)
    if some is not None and some != place and group.rank == 0:
        log.warning(
            "step %d was loaded into only a part of the state that is saved as step %d, so the steps in between stay "
            "listed; to abandon them, load the whole state",
            some.step,
            step,
        )
    return None
