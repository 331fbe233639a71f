"""Records of requests. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Request:
    """One request, as the proxy saw it."""

    op: str
    """In the words of S3: PutObject, UploadPart, CreateMultipartUpload, ..., or Other."""
    method: str
    path: str
    """With the query."""
    started: float
    """Seconds since the epoch."""
    range: str | None = None
    """The header of that name."""
    status: int | None = None
    """None when no answer came from the server."""
    nbytes_up: int = 0
    """Of the body, as they are passed on; without the framing of chunks."""
    nbytes_down: int = 0
    seconds: float | None = None
    """None while it is under way."""
    fault: str | None = None
    """Its fault; None when there was none, or only latency and bandwidth.

    No rule's fault: `server down` (it could not be reached), `server gone` and `client gone` (one of them closed the
    connection too early, or sent what is no HTTP).
    """
