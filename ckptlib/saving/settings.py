"""The settings of a job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ckptlib.errors import SaveFailed
from ckptlib.format.digests import ALGORITHMS, XXH3
from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import MAX_DEADLINE_S, Root
from ckptlib.format.values import Json
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.policy.peers import Peers
from ckptlib.policy.tier import LocalTier
from ckptlib.writer.channel import PROTOCOL

_log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for one another inside a collective; torch's default for gloo is 30 minutes."""

SAVE_DEADLINE = timedelta(hours=1)

MAX_OUTAGE = timedelta(minutes=30)
"""How long saves may fail: longer than a store is away for a restart or a change of credentials."""

REFRESH = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Resumable:
    """Settings of a save that a later process may go on with, should this one be killed."""

    pack_nbytes: int
    """The most bytes of a pack: at most this much of an unfinished one is lost."""
    generation: GenerationId | None
    """The generation in which an earlier process began the save and did not commit it, which this one continues; None
    for a new one."""


@dataclass(frozen=True)
class Settings:
    """The settings of a session."""

    url: str
    options: Mapping[str, object] = field(default_factory=dict)
    """Options for fsspec's filesystem."""
    timeout: timedelta = TIMEOUT
    """How long ranks wait for one another."""
    save_deadline: timedelta = SAVE_DEADLINE
    """How long after its start a save may still be committed; an existing root's own value counts instead."""
    max_outage: timedelta = MAX_OUTAGE
    """How long saves may fail, one after the other, before the training ends."""
    algorithm: str = XXH3
    arena: Path | None = None
    keep: Keep | None = None
    codec: CodecRules = field(default_factory=CodecRules)
    """The codec of each tensor's chunks."""
    refresh: timedelta = REFRESH
    """How old an unchanged chunk may become before it is written again."""
    tags: Mapping[str, str] = field(default_factory=dict)
    config: Json = None
    """The user's config, encoded; None to record none."""
    record_code: bool = False
    peers: Peers | None = None
    """Whether other ranks keep replicas of snapshots, and how; None if snapshots serve storage only."""
    local: LocalTier | None = None
    """The local tier; None if saves go to the store at once."""
    must_resume: bool = False
    """The run must have steps: if none is found, it does not begin anew."""
    resumable: Resumable | None = None
    """The one save of an import."""

    def __post_init__(self) -> None:
        """Checks the settings before anything is made: a root keeps its algorithm for ever."""
        if self.url.startswith("memory://"):
            raise SaveFailed(
                f"{self.url} is memory of this process, and another process writes what is saved, so nothing can be "
                "saved there. Give a path, such as /dev/shm/run7 for memory that all processes of this host see"
            )
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        for name, kind, example in (
            ("timeout", timedelta, "timedelta(minutes=10)"),
            ("save_deadline", timedelta, "timedelta(hours=1)"),
            ("max_outage", timedelta, "timedelta(minutes=30)"),
            ("refresh", timedelta, "timedelta(days=7)"),
            ("keep", Keep, "Keep(last=3)"),
            ("peers", Peers, "Peers(copies=1)"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}={value!r}: expected {kind.__name__}, such as {example}")
        for name, example in (("timeout", "minutes=10"), ("save_deadline", "hours=1"), ("refresh", "days=7")):
            if getattr(self, name) <= timedelta():
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected a time above 0, such as timedelta({example})"
                )
        longest = timedelta(seconds=MAX_DEADLINE_S)
        of_peers = timedelta() if self.peers is None else self.peers.timeout
        times = {"timeout": self.timeout, "save_deadline": self.save_deadline, "Peers.timeout": of_peers}
        for name, time in times.items():
            if time > longest:
                raise ValueError(f"{name}={time!r}: expected at most timedelta(days={longest.days})")
        if not _are_texts(self.tags):
            raise TypeError(
                f"tags={self.tags!r}: expected a dict of texts by name, such as {{'name': 'a'}}; write other values as "
                "texts, such as str(seed)"
            )
        if self.max_outage < timedelta():
            raise ValueError(f"max_outage={self.max_outage!r}: expected a time, such as timedelta(minutes=30), or none")

    def warn_of_kept(self, root: Root, url: str) -> None:
        """Warns of what the user asked for, and the root keeps as it was made. A default is nothing that was asked."""
        kept = timedelta(seconds=root.save_deadline_s)
        for name, asked, default, own in (
            ("algorithm", self.algorithm, XXH3, root.algorithm),
            ("save_deadline", self.save_deadline, SAVE_DEADLINE, kept),
        ):
            if asked not in (default, own):
                _log.warning(
                    "%s=%s has no effect: %s was made with %s and keeps it; for another one, begin a new root",
                    name,
                    asked,
                    url,
                    own,
                )

    def for_writer(self, rank: int, world_size: int, root: Root) -> dict[str, object]:
        """Returns the order that a rank's writer begins with. `root`: as the job has opened it."""
        return {
            "op": "setup",
            "protocol": PROTOCOL,
            "url": self.url,
            "options": dict(self.options),
            "root": root.id,
            "rank": rank,
            "world_size": world_size,
            "deadline_s": root.save_deadline_s,
            "codec": self.codec.to_json(),
            "refresh_s": self.refresh.total_seconds(),
            "keep": None if self.keep is None else self.keep.to_json(),
            "local": None if self.local is None else self.local.to_json(),
            "pack_nbytes": None if self.resumable is None else self.resumable.pack_nbytes,
            "keep_slots_s": 0.0 if self.peers is None else self.peers.keep_for.total_seconds(),
        }


def _are_texts(tags: object) -> bool:
    return isinstance(tags, Mapping) and all(isinstance(text, str) for pair in tags.items() for text in pair)
