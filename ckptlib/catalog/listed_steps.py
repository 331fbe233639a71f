"""The committed steps from that of a save's oldest pack on: listed whole at times, and the newest each time. No torch.

A tensor that never changes lies in the pack of an early step, so these may be nearly all steps of a root. Each rank
asks for them at each save; where requests are paid for, each thousand of them is one, and on a shared file system each
of them is. What a save must know of this moment is whether the part that it takes chunks over from is committed, which
is one of the newest. Of older steps it is told that they were dropped, or marked by `ckptlib refresh`, a little later.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.format.keys import SaveId

FEW = 1000
"""So many steps cost no more than one: they are listed each time."""

LOOK_AGAIN_S = 600.0
"""When more of them are listed again."""


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """As of a listing."""

    steps: Steps
    oldest: SaveId
    """Those from here on."""
    whole_at: float
    """When all of them were listed; by the monotonic clock."""


def list_steps(catalog: Catalog, oldest: SaveId, recent: SaveId, before: ListedSteps | None) -> ListedSteps:
    """The steps from `oldest` on, those from `recent` on as they are now. `before`: the last result, of any caller.

    Raises StoreError.
    """
    now = time.monotonic()
    few = before is None or len(before.steps.saves) < FEW
    if before is None or few or oldest < before.oldest or now > before.whole_at + LOOK_AGAIN_S:
        return ListedSteps(catalog.steps(oldest), oldest, now)
    return ListedSteps(_joined(before.steps, catalog.steps(recent), recent), before.oldest, before.whole_at)


def _joined(before: Steps, found: Steps, recent: SaveId) -> Steps:
    """What was known of those before `recent`, and what was found from there on; not when manifests were put. Pure."""
    return Steps(
        before.saves[: bisect_left(before.saves, recent)] + found.saves,
        before.refreshes[: bisect_left(before.refreshes, recent)] + found.refreshes,
        {**{save: pins for save, pins in before.pins.items() if save < recent}, **found.pins},
    )
