"""Lists the committed steps from that of a save's oldest pack on: all of them at times, the newest each time. No torch.

A tensor that never changes lies in the pack of an early step, so these may be nearly all steps of a root. Each rank
asks for them at each save; an object store charges a request for each thousand of them, and a shared file system needs
one for each. The only step whose present state a save must know is the one it takes chunks over from, which is one of
the newest. That older steps were dropped, or marked by `ckptlib refresh`, it may learn a little later.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.format.keys import SaveId

FEW = 1000
"""Up to this many steps cost no more to list than one; they are listed each time."""

LOOK_AGAIN_S = 600.0
"""Seconds until more than that are listed again."""


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """The steps from some save on, as they were last listed."""

    steps: Steps
    oldest: SaveId
    """The save from which on steps are listed."""
    whole_at: float
    """When all of them were last listed; by the monotonic clock."""


def list_steps(catalog: Catalog, oldest: SaveId, recent: SaveId, before: ListedSteps | None) -> ListedSteps:
    """Lists the steps from `oldest` on; those from `recent` on as they are now. `before`: the last result of any call.

    Raises StoreError.
    """
    now = time.monotonic()
    few = before is None or len(before.steps.saves) < FEW
    if before is None or few or oldest < before.oldest or now > before.whole_at + LOOK_AGAIN_S:
        return ListedSteps(catalog.steps(oldest), oldest, now)
    return ListedSteps(_joined(before.steps, catalog.steps(recent), recent), before.oldest, before.whole_at)


def _joined(before: Steps, found: Steps, recent: SaveId) -> Steps:
    """Joins the known steps before `recent` with those found from there on; leaves out `put` times. Pure."""
    return Steps(
        before.saves[: bisect_left(before.saves, recent)] + found.saves,
        before.refreshes[: bisect_left(before.refreshes, recent)] + found.refreshes,
        {**{save: pins for save, pins in before.pins.items() if save < recent}, **found.pins},
    )
