"""Which fault a request meets. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from typing_extensions import NotRequired

ERRORS = ("503", "500", "429", "403")
BODY_UP = ("reset_up", "stall_up", "flip_up")
BODY_DOWN = ("reset_down", "stall_down", "flip_down", "truncate")
_SLOWING = ("latency", "bandwidth")
_OTHERS = ("refuse", "down", "blackhole", "hang_reply", "lost_reply")
_KINDS = (*_SLOWING, *_OTHERS, *ERRORS, *BODY_UP, *BODY_DOWN)
_LASTING = ("latency", "blackhole", "hang_reply", "stall_up", "stall_down")


class Rule(TypedDict):
    """See `ckptlib.stores.fault_proxy`."""

    fault: str
    match: NotRequired[str]
    nth: NotRequired[int]
    count: NotRequired[int]
    after: NotRequired[int]
    seconds: NotRequired[float]
    bandwidth: NotRequired[float]


@dataclass(frozen=True, slots=True)
class Fault:
    """The faults that one request meets."""

    kind: str | None = None
    after: int = 0
    """Bytes of the body that pass before it."""
    seconds: float | None = None
    """None: until the client goes away."""
    latency_s: float = 0.0
    bandwidth: float | None = None
    """Bytes per second."""


class Rules:
    """A list of rules, and how often each was met."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._counted = [_Counted(_checked(rule)) for rule in rules]

    @property
    def is_down(self) -> bool:
        return any(counted.kind == "down" for counted in self._counted)

    def next_fault(self, what: str, nbytes_up: int | None) -> Fault:
        """For a request "OP path", whose body has so many bytes; None when nobody knows yet."""
        due = [counted for counted in self._counted if counted.counts(what, nbytes_up)]
        first = next((counted for counted in due if counted.kind not in _SLOWING), None)
        met = [counted for counted in due if counted.kind in _SLOWING]
        latency_s = sum(counted.rule["seconds"] for counted in met if counted.kind == "latency")
        bandwidth = min((counted.rule["bandwidth"] for counted in met if counted.kind == "bandwidth"), default=None)
        for counted in [*met, *([first] if first else [])]:
            counted.num_met += 1
        rule: Mapping[str, Any] = first.rule if first else {}
        return Fault(rule.get("fault"), rule.get("after", 0), rule.get("seconds"), latency_s, bandwidth)


class _Counted:
    def __init__(self, rule: Rule) -> None:
        self.rule, self.kind = rule, rule["fault"]
        self.num_met = 0
        self._num_seen = 0
        self._match = re.compile(rule.get("match", ""))
        self._first = rule.get("nth", 0)
        self._most = rule.get("count", 1 if "nth" in rule else math.inf)

    def counts(self, what: str, nbytes_up: int | None) -> bool:
        """Counts the request when the rule is about it; whether the rule is due."""
        if self._match.search(what) is None:
            return False
        if self.kind in BODY_UP and nbytes_up is not None and nbytes_up <= self.rule.get("after", 0):
            return False
        self._num_seen += 1
        return self._num_seen > self._first and self.num_met < self._most


def _checked(rule: Rule) -> Rule:
    """Raises ValueError: it may come from a file."""
    if not isinstance(rule, dict) or rule.get("fault") not in _KINDS or rule.keys() - Rule.__annotations__.keys():
        raise ValueError(f"{rule}: not a rule; expected a fault of {_KINDS} and fields of {[*Rule.__annotations__]}")
    kind = rule["fault"]
    for name in ("nth", "count", "after", "seconds", "bandwidth"):
        value: Any = rule.get(name, 0)
        kinds = (int,) if name in ("nth", "count", "after") else (int, float)
        if type(value) not in kinds or not value >= 0:
            raise ValueError(f"{rule}: {name} is {value!r}; expected a number, 0 or above")
    try:
        re.compile(rule.get("match", ""))
    except (re.error, TypeError) as error:
        raise ValueError(f"{rule}: match is no regular expression: {error}") from None
    if kind == "latency" and "seconds" not in rule:
        raise ValueError(f"{rule}: a latency needs seconds")
    if kind == "bandwidth" and not rule.get("bandwidth"):
        raise ValueError(f"{rule}: expected a bandwidth above 0, in bytes per second")
    if "seconds" in rule and kind not in _LASTING:
        raise ValueError(f"{rule}: seconds mean nothing here; they belong to {_LASTING}")
    if "bandwidth" in rule and kind != "bandwidth":
        raise ValueError(f"{rule}: the bandwidth has a rule of its own, with the fault 'bandwidth'")
    if "after" in rule and kind not in (*BODY_UP, *BODY_DOWN):
        raise ValueError(f"{rule}: after means nothing here; it belongs to {(*BODY_UP, *BODY_DOWN)}")
    return rule
