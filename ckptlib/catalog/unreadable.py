"""The errors that concern a single document, unlike an outage of the store. No torch."""

from __future__ import annotations

from ckptlib.errors import CheckpointNotFound, CorruptData, FormatError, ObjectNotFound, ObjectUnreadable

UNUSABLE = (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable)
"""The errors for a document that is gone, damaged, or cannot be read now."""

UNREADABLE = (CheckpointNotFound, *UNUSABLE)
"""The same, for a document that may be the manifest of a step."""
