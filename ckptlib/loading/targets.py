"""The targets of a load: the tensors to be filled, the calls that come after, and all mismatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ckptlib.errors import StateMismatch
from ckptlib.reading.reader import Want


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a load."""

    wants: tuple[Want[torch.Tensor], ...]
    missing: tuple[str, ...]
    """Names that the state has and the checkpoint has not."""
    unexpected: tuple[str, ...]
    """Names that the checkpoint has and the state has not, or that were asked for and the state has not."""
    mismatched: tuple[str, ...]
    """Messages for names whose shape or dtype differ, with both."""
    foreign: Mapping[str, str]
    """Messages for names of the checkpoint that an optimizer of this rank would not understand, by name: these are
    unexpected, whatever other ranks say."""
    values: dict[str, object]
    """Plain values by path, as saved."""
    finish: tuple[Callable[[], object], ...]
    """Calls to make in order when every want is filled."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Message with more detail, by missing or unexpected name."""
    optional: frozenset[str] = frozenset()
    """Names that either side may lack, since the user said so."""
    plain: frozenset[str] = frozenset()
    """Names of plain values that one side lacks: no reason to refuse the rest."""
    taken: Set[str] = frozenset()
    """Names of the checkpoint that are loaded, or are known not to be."""
    tops: tuple[str, ...] = ()
    """The first level of the state's names, if all of the step was asked for."""
    apart: Set[str] = frozenset()
    """Names of the state that are read into memory of their own, and stay as they were until everything is filled."""
    alone: tuple[str, ...] = ()
    """Names of data loaders that count the batches of one rank alone."""

    def check(self, step: int, unexpected: Sequence[str], strict: bool) -> None:
        """Raises StateMismatch with everything that does not fit. `unexpected`: names that no rank's state has."""
        problems, alone = [f"  {text}" for text in self.mismatched], ""
        if strict:
            lacking = [self.notes.get(name, f"{name}: not in the checkpoint") for name in self.left(self.missing)]
            over = self.left(unexpected)
            foreign = [self.foreign[name] for name in self.left(self.foreign)]
            alone = "" if problems or lacking or foreign else self._alone(over)
            lacking += [self.notes.get(name, f"{name}: not in the state") for name in over]
            problems += [f"  {text}" for text in [*lacking, *foreign]]
        if problems:
            more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
            raise StateMismatch(
                f"step {step} does not fit the state:\n" + "\n".join(problems[:40]) + more + f"\n{alone}"
                "map= renames, only= takes a part, optional= names what either side may lack, strict=False leaves out "
                "all that one side lacks, cast=True converts dtypes"
            )

    def left(self, names: Iterable[str]) -> list[str]:
        """Returns the names that a strict load refuses."""
        return [name for name in names if name not in self.optional and name not in self.plain]

    def excused(self, names: Iterable[str]) -> list[str]:
        """Returns the names that a strict load does not refuse."""
        return [name for name in names if name in self.optional or name in self.plain]

    def _alone(self, unexpected: Sequence[str]) -> str:
        """Returns advice if the state has a part of the step, and there is no other problem."""
        beside = not any(name == top or name.startswith(f"{top}/") for name in unexpected for top in self.tops)
        if not unexpected or not beside or not 0 < len(self.tops) <= MAX_TOPS:
            return ""
        return f"All that the state has is there: to load that alone, only={_brief(self.tops)}. "

    def complete(self) -> None:
        """Makes the calls of `finish`. Call it when every want is filled."""
        with outside_inference():
            for action in self.finish:
                action()


MAX_TOPS = 8
"""With more names than these, the example would not be short."""


def _brief(tops: Sequence[str]) -> str:
    return repr(tops[0]) if len(tops) == 1 else repr([*tops])


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leaves inference mode: tensors that are made in it could never be updated outside of it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
