"""Collects the metrics of the current step, and tells whether the metric that retention needs ever comes. No ranks, no
I/O."""

from __future__ import annotations

from collections.abc import Mapping

from ckptlib.catalog.metrics import numeric
from ckptlib.errors import UnsupportedState
from ckptlib.format import values
from ckptlib.format.values import Json
from ckptlib.policy.best import Best


def check_metrics(metrics: object) -> None:
    """Raises TypeError if `metrics` are not a dict by name."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics={repr(metrics)[:80]}: expected a dict by name, such as {{'val_loss': loss.item()}}")


def encode_metrics(metrics: Mapping[str, object]) -> dict[str, Json]:
    """Encodes metrics. Raises UnsupportedState for one that cannot be saved."""
    try:
        return {name: values.encode(value, f"metrics[{name}]") for name, value in metrics.items()}
    except UnsupportedState as error:
        raise UnsupportedState(f"{error}. A metric is a number: of a tensor, tensor.item()") from error


class StepMetrics:
    """Collects the metrics of each step of one Checkpointer."""

    def __init__(self, best: Best | None, keep_last: int) -> None:
        """`best`: retention's rule for the best step, beside which it keeps the `keep_last` newest."""
        self._best = best
        self._left = keep_last + 1
        """How many saves may still come without the metric before the first of them is dropped."""
        self._noted: dict[str, object] = {}

    def note(self, metrics: Mapping[str, object]) -> None:
        """Adds metrics of the current step. Raises UnsupportedState for one that cannot be saved, TypeError if they are
        no metrics."""
        check_metrics(metrics)
        encode_metrics(metrics)
        self._noted.update(metrics)

    def of(self, given: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Returns all metrics of the step; None if there are none. `given` come with its save, and take precedence."""
        return {**self._noted, **(given or {})} or None

    def clear(self) -> None:
        """Forgets the metrics: another step begins."""
        self._noted.clear()

    def lacking(self, step: int, metrics: Mapping[str, object] | None) -> str | None:
        """Returns a warning, once, if no saved step so far, this one included, has had a number as the metric."""
        if self._best is None or self._left <= 0:
            return None
        name = self._best.metric
        found = numeric({name: values.encode((metrics or {}).get(name), name)}).get(name)
        if found is not None and found == found:
            self._left = 0
            return None
        self._left -= 1
        if self._left:
            return None
        return (
            f"Keep(best={name!r}): no step up to {step} was saved with a number as that metric, so none of them is "
            f"kept as the best one. Tell it at the steps that are saved: after_step(step, metrics={{{name!r}: ...}}), "
            f"or log({{{name!r}: ...}}) in the body of loop"
        )
