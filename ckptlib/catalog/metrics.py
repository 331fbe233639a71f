"""Metrics of committed steps as numbers, and the best step by one of them. No I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from ckptlib.errors import CheckpointNotFound, FormatError
from ckptlib.format import values
from ckptlib.format.keys import SaveId
from ckptlib.format.values import Json
from ckptlib.policy.best import Best
from ckptlib.words import listed


def numeric(metrics: Mapping[str, Json]) -> dict[str, float]:
    """Returns the metrics that are numbers, as floats; NaN and numpy's numbers included."""
    found = {}
    for name, value in metrics.items():
        number = _number(value)
        if number is not None:
            found[name] = number
    return found


def _number(value: Json) -> float | None:
    try:
        found = values.decode(value)
        return float(found) if isinstance(found, Real) and not isinstance(found, bool) else None
    except (FormatError, ImportError, OverflowError):  # damaged, a torch value, or an int beyond the range of floats
        return None


def best_of(metrics: Mapping[SaveId, Mapping[str, float]], rule: Best | None, url: str) -> SaveId:
    """Returns the best step by `rule`. Raises CheckpointNotFound if there is none, or no rule."""
    if rule is None:
        raise CheckpointNotFound(
            f"{url}: no job has recorded by which metric a step is the best; say it: metric='val_loss', mode='min' "
            "(ckptlib show: --metric val_loss --mode min), or run jobs with Keep(best='val_loss', mode='min')"
        )
    found = {save: of[rule.metric] for save, of in metrics.items() if rule.metric in of}
    if best := rule.choose(found):
        return best[0]
    there = listed([repr(name) for name in sorted({name for of in metrics.values() for name in of})], 8) or "none"
    nans = sum(map(math.isnan, found.values()))
    what = f"{nans} of {len(metrics)} steps have it, as NaN" if nans else f"its steps have these: {there}"
    raise CheckpointNotFound(
        f"{url} holds no step with a number as metric {rule.metric!r}; {what}. Tell metrics by after_step(step, "
        "metrics={...}) or log({...}); NaN is never best"
    )
