"""When to store a chunk whole again, so that the patches after it are small. Pure numbers: no bytes, no I/O.

Patches against one keyframe are cumulative, so they grow from save to save until the next keyframe. In a cycle of a
keyframe of K bytes and patches of p[1] <= p[2] <= ..., the mean of n saves is (K + p[1] + ... + p[n-1]) / n. A patch
smaller than the mean so far lowers it, and a larger one raises it: so the cycle ends before the first patch that is
larger. For 1 % of the rows touched per save by Zipf's law, that is after about 20 saves; a chunk of which few rows ever
change has no second keyframe. A patch never has more bytes than the mean, which bounds what a load reads twice.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 6
"""Of the number of keyframes without a summary: a table whose updates become sparse later is found after 63 at most."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one chunk has taken since its last keyframe."""

    stored_nbytes: int
    """By the keyframe, and by the patches since."""
    num_saves: int = 1
    """The keyframe's, and all since."""

    def ends_before(self, patch_nbytes: int | None) -> bool:
        """Whether the next save should store the chunk whole rather than as this patch. None: there is no patch."""
        return patch_nbytes is None or patch_nbytes * self.num_saves > self.stored_nbytes

    def then(self, patch_nbytes: int) -> Cycle:
        """After a save that stored a patch; 0 bytes where it took the chunk over from the save before."""
        return Cycle(self.stored_nbytes + patch_nbytes, self.num_saves + 1)


@dataclass(frozen=True, slots=True)
class Trials:
    """When it is worth summarizing a keyframe, so that the next save may try a patch against it.

    Most tensors change as a whole at every step, and a summary of them is made for nothing. So after each patch in a
    row that did not pay, twice as many keyframes go without one.
    """

    num_failed: int = 0
    """Patches in a row that did not pay."""
    num_skipped: int = 0
    """Keyframes without a summary since the last of them."""

    @property
    def due(self) -> bool:
        """Whether the next keyframe should have a summary."""
        return self.num_skipped >= (1 << min(self.num_failed, MAX_DOUBLINGS)) - 1

    def skipped(self) -> Trials:
        """After a keyframe without a summary."""
        return Trials(self.num_failed, self.num_skipped + 1)

    def failed(self) -> Trials:
        """After a patch that did not pay."""
        return Trials(self.num_failed + 1)
