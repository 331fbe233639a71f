"""What a load will do to a state: the tensors to be filled, what comes after, and all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ckptlib.errors import StateMismatch
from ckptlib.reading.reader import Want


@dataclass(frozen=True, slots=True)
class Targets:
    """What a load will do to a state."""

    wants: tuple[Want[torch.Tensor], ...]
    missing: tuple[str, ...]
    """Names that the state has and the checkpoint has not."""
    unexpected: tuple[str, ...]
    """Names that the checkpoint has and the state has not, or that were asked for and the state has not."""
    mismatched: tuple[str, ...]
    """Names whose shape or dtype differ, with both."""
    foreign: Mapping[str, str]
    """Names of the checkpoint that an optimizer of this rank would not understand: unexpected, whatever other ranks
    say. Each with what is to be told of it."""
    values: dict[str, object]
    """Plain values by path, as saved."""
    finish: tuple[Callable[[], None], ...]
    """To be called in order, when every want is filled."""

    def check(self, step: int, unexpected: Sequence[str], strict: bool) -> None:
        """Raises StateMismatch with all that does not fit. `unexpected`: names that no rank's state has."""
        problems = [f"  {text}" for text in self.mismatched]
        if strict:
            problems += [f"  {name}: not in the checkpoint" for name in self.missing]
            problems += [f"  {name}: not in the state" for name in unexpected]
            problems += [f"  {text}" for text in self.foreign.values()]
        if problems:
            more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
            raise StateMismatch(
                f"step {step} does not fit the state:\n" + "\n".join(problems[:40]) + more + "\n"
                "map= renames, only= takes a part, strict=False leaves out what one side lacks, cast=True converts "
                "dtypes"
            )

    def complete(self) -> None:
        """To be called when every want is filled."""
        with outside_inference():
            for action in self.finish:
                action()


@contextmanager
def outside_inference() -> Iterator[None]:
    """Whatever the caller's mode: what is made in inference mode can never be updated outside of it, by no step."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
