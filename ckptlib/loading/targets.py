"""What a load will do to a state: the tensors to be filled, what comes after, and all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ckptlib.loading.reader import Want


@dataclass(frozen=True, slots=True)
class Targets:
    """What a load will do to a state."""

    wants: tuple[Want, ...]
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
