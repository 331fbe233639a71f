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

BUSY_STATUS = {408, 429, 500, 502, 503, 504}
