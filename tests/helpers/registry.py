"""The sessions that `save` and `load` keep for a whole process, and how many loads they remember."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from ckptlib.policy.codec import AUTO, CodecRules
from ckptlib.saving.registry import registry
from ckptlib.saving.session import Session
from ckptlib.stores import absolute


def session_at(url: object) -> Session:
    """The only one of a root."""
    (session,) = (session for key, session in registry.sessions.items() if key[0] == absolute(str(url)))
    return session


def forget_session(url: object) -> Session | None:
    """The one of a root and of all ranks; the next save begins another."""
    return registry.sessions.pop(registry.key(absolute(str(url)), None), None)


def session_for(url: str, group: dist.ProcessGroup | None, state: Mapping[str, object], step: int) -> Session:
    """The one that a save of this step would go through; it is begun if there is none."""
    return registry.session(url, None, group, CodecRules.of(AUTO), state, step)


def close_sessions() -> None:
    """As the end of a process does."""
    registry.close()


def num_loads(url: object) -> int:
    """Of a root that this process remembers, so as to know what a save of the same tensors goes on from."""
    return len(registry.loads[registry.key(absolute(str(url)), None)]._loads)


def writers() -> set[str]:
    """Processes that the main thread has started, and that were not waited for."""
    return set(Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split())
