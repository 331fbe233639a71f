"""A store that overwrites what is put twice, unless it is asked not to, as S3 does."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import Buffer, override

from ckptlib.stores import LateHead
from ckptlib.stores.memory import MemoryStore


class OverwritingStore(MemoryStore):
    """Tells that a key is taken only where `create` asks."""

    @override
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        if not create:
            self.delete(key)
        super().put(key, head, pieces)
