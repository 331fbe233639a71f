"""How large a snapshot will be, before there is one: so that slots are made while the first iterations run."""

from __future__ import annotations

from ckptlib.state.leaf import Leaf


def estimate(leaves: list[Leaf], num_ranks: int) -> int:
    """Bytes of this rank's snapshot: its tensors, and two fp32 moments for each parameter that has none yet."""
    nbytes = 0
    for leaf in leaves:
        if leaf.tied is not None:
            continue
        local = sum(tensor.nbytes for _, tensor in leaf.pieces)
        moments = sum(tensor.numel() for _, tensor in leaf.pieces) * 8
        is_param = leaf.owner is not None and any(t.requires_grad for _, t in leaf.pieces)
        share = 1 if len(leaf.pieces) == 0 or leaf.pieces[0][0].shape != leaf.shape else num_ranks
        nbytes += (local + (moments if is_param else 0)) // share
    return nbytes + nbytes // 16 + (1 << 20)
