"""What becomes of a run that meets a fault and starts again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Found(Enum):
    """What a new job gets, judged by the oracle."""

    NEW = "the new step, whole"
    BEFORE = "the step before, whole, without being told"
    ERROR = "an error; the step before is whole for who asks for it"
    DIED = "the loader dies; the step before is whole for who asks for it"
    LOST = "an error, and no step that loads"
    NOTHING = "no error, nothing loaded"
    WRONG = "no error, wrong tensors"
    HANG = "it hangs"


class Said(Enum):
    """What the save that met the fault told the program."""

    ERROR = "an error"
    DONE = "done"
    WAITING = "nothing, in the time that it had"
    KILLED = "killed"


@dataclass(frozen=True)
class Outcome:
    """Of one trial."""

    found: Found
    detail: str = ""
