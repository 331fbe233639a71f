"""Thousands of ranks that all say the same: what one of them is given, in one process."""

from __future__ import annotations

from typing_extensions import override

from ckptlib.ranks.group import SoloGroup


class AlikeRanks(SoloGroup):
    size = 2000

    @override
    def any(self, value: bool) -> bool:
        return value

    @override
    def same(self, data: bytes) -> bool:
        return True

    @override
    def gather(self, data: bytes) -> list[bytes]:
        return [bytes(bytearray(data)) for _ in range(self.size)]

    @override
    def global_rank(self, rank: int) -> int:
        return rank
