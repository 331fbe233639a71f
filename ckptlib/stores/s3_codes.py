"""The error codes of Amazon S3 and of servers like it, by what they mean to whoever asked. Knows no client."""

from __future__ import annotations

RENEW = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidTokenId", "TokenRefreshRequired"}
"""The session's token is no longer valid; MinIO says InvalidTokenId."""

FULL = {"InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "DiskQuota"}
"""No room, or no quota; Ceph says so by 403."""

DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "ChecksumMismatch"}
"""What arrived was not what had been sent."""

BUSY = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded"),
    *("TooManyRequestsException", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted"),
    *("ConditionalRequestConflict", "IncompleteBody"),
}
"""The same request may succeed in a while, whatever its status: Amazon's RequestTimeout, for a connection on which
nothing moved, is 400."""

BUSY_STATUS = {408, 429, *range(500, 600)} - {501, 505, 507}
"""As above, whatever the code: 520 to 530 are Cloudflare's, for a server behind it that it does not reach. Not 507,
which says that there is no room, nor 501 and 505, of a request that the server does not know."""
