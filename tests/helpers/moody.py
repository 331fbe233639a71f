"""An object whose state cannot be had at times."""

from __future__ import annotations


class Moody:
    """As where a thread of its own changes it meanwhile."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None

    def state_dict(self) -> dict[str, int]:
        if self.raises is not None:
            raise self.raises
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...
