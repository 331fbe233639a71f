"""What an error of S3 means: whether it may pass, which class it is to a caller, and what to do about it.

botocore, aiobotocore and aiohttp have a tree of errors each; codes are those of Amazon and of servers like it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import botocore.exceptions as boto
from botocore.parsers import ResponseParserError

from ckptlib.errors import StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.stores import certificates, s3_codes

_RIGHTS = (
    "the credentials may not do this; to load, they need s3:GetObject and s3:ListBucket on the bucket, and to save, "
    "s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucketMultipartUploads, too; and the rights to "
    "its KMS key"
)
_RENEW = "the session's token is no longer valid: renew the credentials"
_BUCKET = "no such bucket: correct the URL, or make the bucket"
_PAGE = "answered by {} without a code, as no S3 server does; is there a proxy in the way?"
_UPLOAD = "the server no longer has this upload: did a lifecycle rule, or somebody, abort what was under way?"
_NO_FILE = (
    "a program for credentials, a file of their token or one of certificates is not there: correct what names it, in "
    "~/.aws, in a variable such as AWS_CA_BUNDLE, or in client_kwargs"
)
_REGION = "the bucket is in another region: name it in storage_options={'client_kwargs': {'region_name': ...}}"
_ELSEWHERE = "the server sends this request elsewhere: correct the endpoint_url or the region; is a proxy in the way?"

_DENIED = {
    "InvalidAccessKeyId": "the server does not know this access key: correct it, or the endpoint_url",
    "SignatureDoesNotMatch": "the secret does not belong to the access key, or a proxy changes requests on their way",
    **dict.fromkeys(s3_codes.RENEW, _RENEW),
    "RequestTimeTooSkewed": "the clock of this host is wrong: set it by NTP",
    "NoSuchBucket": _BUCKET,
    "InvalidBucketName": _BUCKET,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
}
"""Errors that come again until somebody changes something, and do not concern one object."""

STALE = {"InvalidAccessKeyId", *s3_codes.RENEW}
"""Codes that may be for want of newer credentials; what was asked for was not done."""

_OF_PAGES = {403: {"", "403"}, 404: {"", "404"}}
"""The codes of an answer whose body is not one of S3's, by status. What a proxy says of a server that is away, or
refuses for a while, must not be taken for the word that there is no such object, or that nobody may read it."""

_TAKEN_AT_ITS_WORD = ("HeadObject", "ListMultipartUploads")
"""Operations for which such an answer is not taken for a page: one to HEAD has no body, and some servers do not know
the listing of uploads. A sweep does without it."""

_PUTS = ("PutObject", "UploadPart", "CompleteMultipartUpload")
"""Operations to which JuiceFS answers that there is no such key if another client deletes the last object beside the
new one."""

_CERTIFICATE = {
    9: certificates.EXPIRED,
    10: certificates.EXPIRED,
    62: certificates.OTHER_NAME,
    64: certificates.OTHER_NAME,
}
"""Reasons, by X509_V_ERR_CERT_NOT_YET_VALID, CERT_HAS_EXPIRED, HOSTNAME_MISMATCH and IP_ADDRESS_MISMATCH of OpenSSL."""

_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.UnauthorizedSSOTokenError,
    boto.TokenRetrievalError,
)


_OPTIONS = (
    "correct storage_options: s3fs takes endpoint_url (with http:// or https://), key, secret, token, profile and "
    "anon; client_kwargs={'region_name': ...} and config_kwargs={...} are botocore's. Or correct "
    "~/.aws, if a credential_process there does not print what it should"
)


class Stalled(Exception):
    """A request made no progress for as long as is allowed."""


class WrongOption(Exception):
    """A client cannot be made of the storage options: a name that s3fs and botocore do not know, or a wrong value; or
    what a program for credentials prints is wrong."""


class Torn(Exception):
    """An answer broke off before its end."""


class Foreign(Exception):
    """What answered by success is no server of S3, but a proxy's own page, or a server that was cut off at once."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one error means for whoever made the request."""

    kind: type[StoreError]
    """The error for a caller."""
    passes: bool
    """Whether the same request may succeed in a while."""
    advice: str = ""
    is_nowhere: bool = False
    """Whether it may be that there is no server at this address."""


def code_of(error: BaseException) -> str:
    """Returns the server's error code; '' if it did not answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def status_of(error: BaseException) -> int:
    """Returns the status of the server's answer; 0 if it did not answer."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_unfollowed(error: BaseException) -> bool:
    """Returns whether the server sent a request elsewhere, as for a bucket in another region, whose body was gone."""
    return any(isinstance(cause, aiohttp.ClientPayloadError) and "redirect" in str(cause) for cause in _causes(error))


def meaning_of(error: BaseException) -> Meaning:
    """Returns the meaning of whatever a request raises."""
    if isinstance(error, boto.ClientError):
        if code_of(error) == "NoSuchKey" and error.operation_name in _PUTS:
            return Meaning(StoreTimeout, passes=True)
        may_be_page = error.operation_name not in _TAKEN_AT_ITS_WORD
        if may_be_page and code_of(error) in _OF_PAGES.get(status_of(error), ()):
            return Meaning(StoreTimeout, passes=True, advice=_PAGE.format(status_of(error)))
        return _of_answer(code_of(error), status_of(error))
    if isinstance(error, _NO_CREDENTIALS):
        return Meaning(
            StoreDenied,
            passes=False,
            advice="give key and secret, or a profile, in storage_options, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; a bucket that anybody may use needs anon=True",
        )
    if isinstance(error, WrongOption):
        return Meaning(StoreDenied, passes=False, advice=_OPTIONS)
    causes = list(_causes(error))
    refused = [cause for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)]
    if refused:
        codes = {getattr(cause, "verify_code", 0) for cause in refused}  # aiohttp's own error of that class has none
        why = next((_CERTIFICATE[code] for code in codes if code in _CERTIFICATE), certificates.UNKNOWN)
        told = certificates.advice(why, "set AWS_CA_BUNDLE to the file of its authority")
        return Meaning(StoreDenied, passes=False, advice=told)
    if any(isinstance(cause, FileNotFoundError) for cause in causes):
        return Meaning(StoreDenied, passes=False, advice=_NO_FILE)
    if isinstance(error, _SILENCE):
        nowhere = any(isinstance(cause, socket.gaierror | ConnectionRefusedError) for cause in causes)
        advice = _ELSEWHERE if is_unfollowed(error) else _advice(causes)
        return Meaning(StoreTimeout, passes=True, advice=advice, is_nowhere=nowhere)
    return Meaning(StoreError, passes=False)


_SILENCE = (
    Stalled,
    Torn,
    Foreign,
    OSError,
    asyncio.TimeoutError,
    aiohttp.ClientError,
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.CredentialRetrievalError,
    ResponseParserError,
)
"""Errors for no answer, or none that makes sense: the network's, a proxy's or a server's that goes down."""


def _of_answer(code: str, status: int) -> Meaning:
    if code in _DENIED:
        return Meaning(StoreDenied, passes=False, advice=_DENIED[code])
    if code in s3_codes.FULL or status == 507:
        return Meaning(StoreFull, passes=False, advice="make room, or raise the quota")
    if code in s3_codes.BUSY | s3_codes.DAMAGED or status in s3_codes.BUSY_STATUS:
        return Meaning(StoreTimeout, passes=True, advice=_PAGE.format(status) if status > 507 else "")
    if status in (401, 403):
        return Meaning(StoreDenied, passes=False, advice=_RIGHTS)
    if status in (301, 307):
        return Meaning(StoreDenied, passes=False, advice=_REGION)
    advice = "" if code else _PAGE.format(status)  # botocore's own text does not tell the status
    return Meaning(StoreError, passes=False, advice=_UPLOAD if code == "NoSuchUpload" else advice)


def _advice(causes: list[BaseException]) -> str:
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "the name of the server is not known here: check the endpoint_url, the region and DNS"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "nobody listens there: check the endpoint_url and its port, whether the server runs, and proxies"
    if any(isinstance(cause, ssl.SSLError | boto.SSLError) for cause in causes):
        return "TLS failed: check whether the endpoint_url wants http://, and whether a proxy is in the way"
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and what it came from, as chained by Python, by botocore and by aiohttp."""
    seen: set[int] = set()
    left: list[object] = [error]
    while left:
        cause = left.pop()
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        kept = getattr(cause, "kwargs", None)
        inner = kept.get("error") if isinstance(kept, dict) else None
        left += [cause.__cause__, cause.__context__, inner, getattr(cause, "os_error", None)]
