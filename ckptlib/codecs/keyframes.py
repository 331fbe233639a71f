"""Decides when to store a chunk whole again, so that later patches are small. Pure numbers: no bytes, no I/O.

Patches against one keyframe are cumulative, so they grow from save to save until the next keyframe. In a cycle of a
keyframe of K bytes and patches of p[1] <= p[2] <= ..., the mean of n saves is (K + p[1] + ... + p[n-1]) / n. A patch
smaller than the mean so far lowers it, and a larger one raises it. So the cycle ends before the first patch that is
larger. If saves touch 1 % of the rows by Zipf's law, that is after about 20 saves; a chunk of which few rows ever
change has no second keyframe. A patch is never larger than the mean, which bounds what a load reads twice.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 6
"""The number of keyframes without a summary doubles at most this often: a table whose updates become sparse later is
found after 63 at most."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """The bytes that one chunk has taken since its last keyframe."""

    stored_nbytes: int
    """Bytes of the keyframe and of the patches since."""
    num_saves: int = 1
    """Number of saves: the keyframe's, and all since."""

    def ends_before(self, patch_nbytes: int | None) -> bool:
        """Returns whether the next save should store the chunk whole, not as this patch. None: there is no patch."""
        return patch_nbytes is None or patch_nbytes * self.num_saves > self.stored_nbytes

    def then(self, patch_nbytes: int) -> Cycle:
        """Returns the cycle after a save that stored a patch; 0 bytes if it took over the chunk from before."""
        return Cycle(self.stored_nbytes + patch_nbytes, self.num_saves + 1)


@dataclass(frozen=True, slots=True)
class Trials:
    """Decides when to summarize a keyframe, so that the next save may try a patch against it.

    Most tensors change as a whole at every step, so that a summary of them is wasted. After each patch in a row that
    did not pay, twice as many keyframes go without a summary.
    """

    num_failed: int = 0
    """Number of patches in a row that did not pay."""
    num_skipped: int = 0
    """Number of keyframes without a summary since the last such patch."""

    @property
    def due(self) -> bool:
        """Whether the next keyframe should have a summary."""
        return self.num_skipped >= (1 << min(self.num_failed, MAX_DOUBLINGS)) - 1

    def skipped(self) -> Trials:
        """Returns the trials after a keyframe without a summary."""
        return Trials(self.num_failed, self.num_skipped + 1)

    def failed(self) -> Trials:
        """Returns the trials after a patch that did not pay."""
        return Trials(self.num_failed + 1)
