"""Estimates how large a snapshot will be before there is one, so that slots are made while the first iterations run."""

from __future__ import annotations

from ckptlib.state.leaf import Leaf


def estimate(leaves: list[Leaf], num_ranks: int) -> int:
    """Returns the bytes of this rank's snapshot: its tensors, and two fp32 moments for each parameter that has none
    yet."""
    nbytes = 0
    for leaf in leaves:
        if leaf.tied is not None:
            continue
        local = 0
        for _, tensor in leaf.pieces:
            local += tensor.nbytes
            if leaf.owner is not None and tensor.requires_grad:
                local += 8 * tensor.numel()
        share = 1 if len(leaf.pieces) == 0 or leaf.pieces[0][0].shape != leaf.shape else num_ranks
        nbytes += local // share
    return nbytes + nbytes // 16 + (1 << 20)
