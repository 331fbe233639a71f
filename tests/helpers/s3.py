"""The keys of the S3 server that tests start."""

from __future__ import annotations

SECRET = "s3cr3t-of-the-tests"


S3_KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": SECRET}


def s3_options(endpoint: str) -> dict[str, object]:
    return {"key": "testing", "secret": SECRET, "endpoint_url": endpoint}
