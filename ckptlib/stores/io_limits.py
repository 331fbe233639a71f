"""How a store, a slot on this host, or one on another is read and written best: sizes, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 8
"""Requests under way at once: a local disk is busy with 4, an object store wants more."""

RUN_BYTES = 16 * 1024 * 1024
"""The most that one request asks for; times THREADS, it bounds the memory of a load, and of verify."""

GAP_BYTES = 64 * 1024
"""A hole between two wanted ranges that is cheaper to read than another request."""

DIRECT_FROM_BYTES = 1024 * 1024
"""A chunk of at least this size that fits its target as it is gets read straight into it."""


DOCUMENT_THREADS = 16
"""Requests for documents in flight at once: they are small, so latency counts."""

WRITE_BYTES = 16 * 1024 * 1024
"""Bytes per write: from 4 MiB on, one thread saturates a local NVMe with direct I/O."""

PART_NBYTES = 16 * 1024 * 1024
"""Bytes of a part of a multipart upload; all parts but the last have as many, since some stores refuse others. Smaller
objects are put by one request."""

LARGE_PART_NBYTES = 64 * 1024 * 1024
"""Most bytes of a part of a large object whose pieces lie in memory anyway: a quarter of the requests, which are nearly
all that a save costs, and no more memory. Whether it is faster or slower drowned in the noise of three turns on
SeaweedFS."""

EVEN_PARTS = 128
"""Parts do not grow as long as an object has fewer: PARTS_IN_FLIGHT connections then end at about the same time."""

PARTS_IN_FLIGHT = 8
"""Parts of one object in flight at once: a connection to a bucket gives 5 to 100 MB/s, so that one alone is slow."""

IDLE_S = 10.0
"""Seconds without progress after which a request to a remote store is given up, and sent again."""

PAGE_KEYS = 1000
"""Objects in one request of a listing or a deletion: the most that S3 allows."""

DELETE_S = 0.1
"""Seconds more for each object of a request that deletes many: a server may answer when the last is gone, and goes on
where nobody waits any more, beside the same request sent again. Swift deletes two at a time."""

SLOWEST_BPS = 1e6
"""Bytes per second below which the transfer of one part counts as stalled, if bytes cannot be seen to move."""

RETRY_S = 60.0
"""Seconds from the first failure of a request to the last time that it is sent again."""

NOWHERE_S = 10.0
"""The same if nobody listens, or the server's name is not known, and it never answered: the address is wrong."""


@dataclass(frozen=True, slots=True)
class IoLimits:
    """How large the requests of a read are, and how many there are at once."""

    most: int = RUN_BYTES
    """Most bytes of one request, unless a single chunk has more."""
    direct_from: int = DIRECT_FROM_BYTES
    """Smaller requests go through a buffer, and may be for several tensors."""
    threads: int = THREADS
    """Requests under way at once."""
    piece: int | None = None
    """Bytes that are read and digested before the next, if a read costs next to nothing: they are still in a core's
    caches. None: what one request asks for is read at once."""
    reads: int = 1
    """How often bytes are read before a mismatch counts as damage: a bit may flip on the way."""
