"""What a request asks of an object store, in the words of S3, and how that store says no. No I/O."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl

_GCS = ("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/", "/resumable/upload/storage/v1/", "/batch/")
_CODES = {  # status: reason, S3's code, Azure's, GCS's
    403: ("Forbidden", "AccessDenied", "AuthorizationFailure", "forbidden"),
    429: ("Too Many Requests", "TooManyRequests", "TooManyRequests", "rateLimitExceeded"),
    500: ("Internal Server Error", "InternalError", "InternalError", "internalError"),
    503: ("Service Unavailable", "SlowDown", "ServerBusy", "backendError"),
}


def op_of(method: str, target: str, fields: Mapping[bytes, bytes]) -> str:
    """The operation of S3 that is this request, or that does the same: `PutObject`, `UploadPart`, ..., or `Other`."""
    path, _, query = target.partition("?")
    names = dict(parse_qsl(query, keep_blank_values=True))
    kind = _kind(path, fields)
    if kind == "gcs":
        return _op_of_gcs(method, path, names)
    num_segments = len(path.strip("/").split("/"))
    if kind == "azure":
        return _op_of_azure(method, num_segments > 2, names)
    return _op_of_s3(method, path.strip("/") != "", num_segments > 1, names.keys())


def error_answer(status: int, method: str, target: str, fields: Mapping[bytes, bytes]) -> bytes:
    """A whole answer, as that store would send it."""
    reason, s3_code, azure_code, gcs_code = _CODES[status]
    message, more = "injected by a test", ""
    kind = _kind(target.partition("?")[0], fields)
    if kind == "gcs":
        content_type = "application/json; charset=UTF-8"
        errors = [{"domain": "global", "reason": gcs_code, "message": message}]
        body = json.dumps({"error": {"code": status, "message": message, "errors": errors}}).encode()
    else:
        content_type = "application/xml"
        code = azure_code if kind == "azure" else s3_code
        more = f"x-ms-error-code: {code}\r\n" if kind == "azure" else ""
        declaration = '<?xml version="1.0" encoding="UTF-8"?>'
        body = f"{declaration}\n<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\n{more}Content-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (b"" if method == "HEAD" else body)


def _kind(path: str, fields: Mapping[bytes, bytes]) -> str:
    if path.startswith(_GCS):
        return "gcs"
    return "azure" if b"x-ms-version" in fields else "s3"


def _op_of_s3(method: str, has_bucket: bool, has_key: bool, names: Collection[str]) -> str:
    if not has_bucket:
        return "ListBuckets" if method == "GET" else "Other"
    if "uploadId" in names:
        ops = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
        return {**ops, "GET": "ListParts"}.get(method, "Other")
    if "uploads" in names:
        return {"POST": "CreateMultipartUpload", "GET": "ListMultipartUploads"}.get(method, "Other")
    if has_key:
        ops = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        return ops.get(method, "Other")
    if method == "POST" and "delete" in names:
        return "DeleteObjects"
    if method == "GET":
        return "Other" if {"location", "versioning", "acl", "policy", "lifecycle"} & set(names) else "ListObjects"
    return {"HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}.get(method, "Other")


def _op_of_gcs(method: str, path: str, names: Mapping[str, str]) -> str:
    if path.startswith("/batch/"):
        return "DeleteObjects"
    if "upload/" in path:
        if "upload_id" in names:
            return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}.get(method, "Other")
        return "CreateMultipartUpload" if names.get("uploadType") == "resumable" else "PutObject"
    _, _, rest = path.partition("/b/")
    bucket, _, rest = rest.partition("/")
    name = rest.removeprefix("o").removeprefix("/")
    if name:
        ops = {"GET": "GetObject" if names.get("alt") == "media" else "HeadObject", "DELETE": "DeleteObject"}
        return ops.get(method, "Other")
    if rest:
        return "ListObjects" if method == "GET" else "Other"
    if bucket:
        return {"GET": "HeadBucket", "DELETE": "DeleteBucket"}.get(method, "Other")
    return {"GET": "ListBuckets", "POST": "CreateBucket"}.get(method, "Other")


def _op_of_azure(method: str, has_key: bool, names: Mapping[str, str]) -> str:
    part = names.get("comp")
    if part == "batch":
        return "DeleteObjects"
    if part == "list":
        return "ListObjects" if names.get("restype") == "container" else "ListBuckets"
    if names.get("restype") == "container" and part is None:
        ops = {"GET": "HeadBucket", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
        return ops.get(method, "Other")
    if not has_key:
        return "Other"
    if part is not None:
        parts = {"PUT block": "UploadPart", "PUT blocklist": "CompleteMultipartUpload", "GET blocklist": "ListParts"}
        return parts.get(f"{method} {part}", "Other")
    ops = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
    return ops.get(method, "Other")
