"""What an error of one of fsspec's backends means, whatever tree of classes it belongs to.

botocore, google and azure each have their own, and none of them need be installed.
"""

from __future__ import annotations

import errno
import json

_NO_OBJECT = ("Size mismatch", "'size'", "'NoneType' object is not subscriptable")
"""What gcsfs says of an answer by success to an upload that tells of no object, or of one of another size."""


ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""The errors for an object or a directory that is not there; of a proxy's page, too: see `is_page`."""


class NoBucket(Exception):
    """The bucket or directory of the URL does not exist."""


class Page(Exception):
    """What answered by success is a proxy's own page, and no store."""


def is_forbidden(error: Exception) -> bool:
    """Returns whether the object may not be touched; time-outs, throttling and all else are the store's own trouble."""
    if _is_throttled(error):
        return False
    if isinstance(error, PermissionError) or not {401, 403}.isdisjoint(_statuses(error)):
        return True
    return _is_gcs_403(error)


def _is_gcs_403(error: Exception) -> bool:
    """Whether it is gcsfs's 403, a text alone: "Forbidden: ", the path, and on lines of their own what Google says."""
    return isinstance(error, OSError) and str(error).startswith("Forbidden: ")


def concerns_all(error: Exception) -> bool:
    """Returns whether a refusal can only concern the whole store: the caller is not known, or its clock is wrong."""
    return 401 in _statuses(error) or getattr(error, "error_code", None) == "AuthenticationFailed"


def may_pass(error: Exception) -> bool:
    """Returns whether the same request may succeed in a while, though the backend takes the answer for a refusal."""
    return _is_throttled(error) or is_page(error)


def is_page(error: Exception) -> bool:
    """Returns whether a proxy answers, and not a store, by success, or by 403 or 404: Google's has a message, Azure's a
    code. adlfs makes FileNotFoundError of 404; gcsfs does, too, and keeps nothing that tells who said it."""
    if isinstance(error, (AssertionError, KeyError, TypeError)) and str(error) in _NO_OBJECT:
        return True
    if isinstance(error, (Page, json.JSONDecodeError)):
        return True
    if _is_gcs_403(error):
        return str(error).partition("\n")[2].lstrip()[:1] in ("", "<")
    said = error.__cause__ if isinstance(error, FileNotFoundError) else error
    return not {403, 404}.isdisjoint(_statuses(said)) and getattr(said, "error_code", "") is None


def _is_throttled(error: Exception) -> bool:
    """Whether it is Google's 403 for rateLimitExceeded or userRateLimitExceeded, which gcsfs does not send again.

    https://cloud.google.com/storage/docs/json_api/v1/status-codes
    """
    return _is_gcs_403(error) and "rate limit" in str(error).partition("\n")[2].lower()


def is_behind_the_end(error: Exception) -> bool:
    """Whether it may be status 416: a range that begins at or after the object's end. s3fs makes EINVAL of it."""
    return getattr(error, "errno", None) == errno.EINVAL or 416 in _statuses(error)


def _statuses(error: object) -> list[object]:
    """Returns the attributes in which the clients of the backends may keep the status of HTTP."""
    return [getattr(error, name, None) for name in ("status_code", "status", "code")]
