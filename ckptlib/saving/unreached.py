"""Warns of patterns of `codec=` that decide for no tensor of any rank: most likely a name is misspelt."""

from __future__ import annotations

import json
import logging

from ckptlib.format.layout import Layout
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.lossy import Lossy
from ckptlib.ranks.group import Group

log = logging.getLogger(__name__)


def warn_of_unreached(group: Group, rules: CodecRules, layout: Layout, step: int) -> None:
    """Has rank 0 log these patterns. Collective: another rank may have other tensors."""
    mine: set[str] = set()
    for tensor in layout.tensors:
        if len(mine) == len(rules.rules):
            break
        pattern = rules.decides(tensor.name, tensor.dtype)
        if pattern is not None:
            mine.add(pattern)
    most = 4 if group.rank == 0 else 1
    names = [tensor.name for tensor in layout.tensors[:: max(1, len(layout.tensors) // most)][:most]]
    told = [json.loads(data) for data in group.gather(json.dumps([sorted(mine), names]).encode())]
    anywhere = {pattern for patterns, _ in told for pattern in patterns}
    names = next((some for _, some in told if some), [])
    if group.rank != 0 or not names:  # an import of plain values alone: no name is misspelt
        return
    for pattern, value in rules.rules:
        if pattern not in anywhere:
            log.warning(
                "codec={%r: %r} decides for no tensor of step %d: %s. Tensors are called %s; see ckptlib show",
                *(pattern, value, step, _WHY[isinstance(value, Lossy)], ", ".join(names)),
            )


_WHY = {
    False: "it covers none, or an earlier pattern does",
    True: "it covers none that it may round (float32 moments of Adam's kind, which exist from the first step on; for "
    "bfloat16 also a tensor that it names in full), or an earlier pattern does",
}
"""The usual reason, by whether the codec is a lossy one."""
