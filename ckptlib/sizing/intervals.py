"""How often to save: by failures, by a budget, and by how long a save takes. Pure; seconds."""

from __future__ import annotations

import math


def young(stall_s: float, mtbf_s: float) -> float:
    """Returns the interval that loses least, for saves that stall training for `stall_s` and are durable at once.

    Young, A first order approximation to the optimum checkpoint interval (CACM 1974).
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def by_budget(stall_s: float, at_most: float) -> float:
    """Returns the shortest interval at which saves stall training for no more than this share of the time."""
    return stall_s / at_most


def ettr(interval_s: float, stall_s: float, persist_s: float, restart_s: float, mtbf_s: float) -> float:
    """Returns the share of time spent training steps that count, of a job that saves every `interval_s`.

    (1 - (u0 + T_f + dt/2) / MTBF) / (1 + w/dt): a failure costs the restart, half an interval on average, and the time
    in which the newest save was still being written. Kokolis et al. (HPCA 2025).
    """
    failing = (restart_s + persist_s + interval_s / 2) / mtbf_s
    return max(0.0, 1 - failing) / (1 + stall_s / interval_s)
