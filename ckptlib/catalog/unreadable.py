"""The errors that concern one document, and say nothing of others. An outage is none of them. No torch."""

from __future__ import annotations

from ckptlib.errors import CheckpointNotFound, CorruptData, FormatError, ObjectNotFound, ObjectUnreadable

UNUSABLE = (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable)
"""Of one that is gone, damaged, or not to be read now."""

UNREADABLE = (CheckpointNotFound, *UNUSABLE)
"""The same, where it may be the manifest of a step."""
