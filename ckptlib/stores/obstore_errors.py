"""Turns errors of obstore into errors of a store.

obstore has few classes of errors; what happened stands in the text, after which comes a dump of all that Rust knows.
Only the status, the server's own code and sentence, and the kind of a broken connection are taken from both, and told:
addresses may hold a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from obstore import exceptions

from ckptlib.errors import ObjectNotFound, ObjectUnreadable, StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.stores import certificates, s3_codes
from ckptlib.stores.secrets import Secrets

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>|\(code: ([A-Za-z]{1,100})\)")
_SENTENCE = re.compile(r"<Message>([^<]{1,500})")
_KIND = re.compile(r"kind: (Timeout|Connect|Interrupted|Request|Decode|Unknown),")
_TLS = re.compile(r"\berror: (InvalidCertificate|InvalidMessage)\(\s*(\w*)")
_CERTIFICATE = {
    **dict.fromkeys(("Expired", "ExpiredContext", "NotValidYet", "NotValidYetContext"), certificates.EXPIRED),
    **dict.fromkeys(("NotValidForName", "NotValidForNameContext"), certificates.OTHER_NAME),
}
"""Reasons, by the errors of rustls."""
_PAGE = re.compile(
    r"performing (?!HEAD )[A-Z]+ .*status code: (?:403 Forbidden|404 Not Found): (?!\{|Not Found\s*$)", re.DOTALL
)
"""Matches an answer without a code of the store's: what a proxy says of a server that is away, or refuses for a while.
A HEAD has no body; emulators of GCS have JSON, or the two words."""
_SENT_AGAIN = re.compile(r"\bretries: [1-9]")
_NO_STORE = "answered by success without an ETag or a date"
FOUND = "answered by success for an object that is not there"
"""Said of an object that nobody has ever put."""
UNLISTED = "listed nothing, though there is an object"
_FOREIGN = re.compile(
    rf"{_NO_STORE}|{FOUND}|{UNLISTED}|Header missing from response|Got invalid (multipart|list) response|"
    "Received non-partial response"
)
"""Matches what the client, and `check_answer`, say of an answer by success that no store gives."""

_OTHER_SUM = (
    "the server does not know the checksum that this client sends: set AWS_CHECKSUM_ALGORITHM=sha256, which it may "
    "know; or, to send none, give config_kwargs={'request_checksum_calculation': 'when_required'}"
)

_CREDENTIALS = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", *s3_codes.RENEW),
    *("AuthenticationFailed", "NoAuthenticationInformation", "InvalidAuthenticationInfo"),
    *("UnauthorizedAccess", "AuthenticationRequired", "AuthorizationFailure"),
}
_CLOCK = {"RequestTimeTooSkewed"}
_OF_ONE_OBJECT = {"", "AccessDenied", "Forbidden", "InvalidObjectState", "AuthorizationPermissionMismatch"}
"""Codes of a 403 that may concern one object alone. A HEAD tells no code."""
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"}
_NO_UPLOAD = {"NoSuchUpload"}
_NOT_THESE_PARTS = {"MalformedXML", "InvalidPart", "InvalidPartOrder", "InvalidXmlDocument", "InvalidBlockList"}
_WRONG_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_FULL = {"AccountQuotaExceeded", *s3_codes.FULL}
_DAMAGED = {"Md5Mismatch", "Crc64Mismatch", *s3_codes.DAMAGED}


class Foreign(OSError):
    """A successful answer that is no store's, but a proxy's own page."""


def check_answer(meta: Mapping[str, Any]) -> None:
    """Raises Foreign if an object's metadata are not a store's: every store tells its ETag, or its date."""
    if meta["e_tag"] is None and not meta["last_modified"].timestamp():
        raise Foreign(_NO_STORE)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of obstore, parsed."""

    status: int
    """Status of HTTP; 0 if there was no answer."""
    code: str
    """The server's error code; '' if it gave none."""
    sentence: str
    """The server's message, or the client's; one line."""
    kind: str
    """How the connection broke; '' if it did not."""
    tls: str
    """Why TLS failed: the server's certificate, or a message that is none of TLS; '' if TLS did not fail."""
    certificate: str
    """Why a certificate was refused, if that is why TLS failed: one of `certificates`."""
    was_sent_again: bool
    """Whether the request had been sent before: what it wanted may have been done by then."""
    is_page: bool
    """Whether a page says 403 or 404, and not a store."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = str(error)
        first = text.partition("\n\nDebug source")[0]
        status, code, said = _STATUS.search(text), _CODE.search(text), _SENTENCE.search(text)
        found = (code.group(1) or code.group(2)) if code else ""
        if "incorrectly configured region" in text:
            found = "PermanentRedirect"
        elif status and status.group(1) == "404" and "bucket does not exist" in text:
            found = "NoSuchBucket"
        kind = _KIND.search(text)
        tls = _TLS.search(text)
        broken = kind.group(1) if kind else "Timeout" if "TimedOut" in text or "timed out" in text else ""
        return cls(
            int(status.group(1)) if status else 0,
            found,
            _plain(said.group(1) if said else first),
            "" if status else broken,
            tls.group(1) if tls and broken == "Connect" else "",
            _CERTIFICATE.get(tls.group(2), certificates.UNKNOWN) if tls else "",
            _SENT_AGAIN.search(text) is not None,
            not (found or _lacks_credentials(text)) and _PAGE.search(first) is not None,
        )

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed; obstore has often repeated by then what it sends again itself."""
        broken = self.kind in ("Timeout", "Interrupted", "Decode", "Unknown")
        return broken or self.is_foreign or self.code in _DAMAGED | s3_codes.BUSY

    @property
    def is_foreign(self) -> bool:
        """Whether what answered is no store."""
        return self.is_page or _FOREIGN.search(self.sentence) is not None

    @property
    def is_busy(self) -> bool:
        """Whether the server, or what is in front of it, asked to come again later."""
        return self.status in s3_codes.BUSY_STATUS or self.code in s3_codes.BUSY

    @property
    def lost_directory(self) -> bool:
        """Whether gateways to a file system answer this to a put into a directory that a delete has just emptied."""
        return self.code == "NoSuchKey"

    @property
    def was_damaged(self) -> bool:
        """Whether the server got other bytes than were sent."""
        return self.code in _DAMAGED

    @property
    def has_no_upload(self) -> bool:
        """Whether the upload in parts is not, or no longer, under way."""
        return self.code in _NO_UPLOAD

    @property
    def refuses_parts(self) -> bool:
        """Whether the server made no object of the list of parts: it may have been altered on its way, if no
        checksum protects it."""
        return self.code in _NOT_THESE_PARTS or self.has_no_upload

    @property
    def has_no_bucket(self) -> bool:
        return self.code in _NO_BUCKET

    @property
    def may_refuse_condition(self) -> bool:
        """Whether it may be the condition of a put that the server refuses: it does not know it, or says nothing of
        why."""
        vague = self.status == 400 and self.code in ("", "InvalidArgument", "InvalidRequest")
        return self.status in (405, 501) or vague

    @property
    def refuses_sum(self) -> bool:
        """Whether the server does not know the checksum that a body carries."""
        return self.status == 501 and "checksum" in self.sentence.lower()

    @property
    def is_beyond(self) -> bool:
        """Whether the range asked for does not lie in the object."""
        return self.status == 416 or "Wanted range starting at" in self.sentence or "CONTENT_RANGE" in self.sentence

    def as_error(self, error: BaseException, doing: str, where: str, nbytes: int, secrets: Secrets) -> StoreError:
        """Returns the error of the contract. `doing`: a verb; `nbytes`: how many were to be put."""
        code, what = self.code, f"{where}: cannot {doing}"
        answer = " ".join(filter(None, [str(self.status or ""), code]))
        cause = secrets.hide(": ".join(filter(None, [answer, self.sentence])))
        refused = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        denied = refused or code == "AccessDenied"
        if code in _NO_BUCKET:
            return StoreDenied(f"{what}: there is no such bucket ({cause}); make it, or correct the URL")
        if code in _WRONG_REGION:
            remedy = "name the bucket's region: client_kwargs={'region_name': ...}, or AWS_REGION"
            return StoreDenied(f"{what}: the bucket is in another region ({cause}); {remedy}")
        if code in _CLOCK:
            return StoreDenied(f"{what}: the clock of this host is wrong: set it by NTP ({cause})")
        if code in _CREDENTIALS or self.status == 401:
            return StoreDenied(f"{what}: the credentials are not accepted ({cause}); renew or correct them")
        if _lacks_credentials(str(error)):
            return StoreDenied(
                f"{what}: found no credentials; pass them as options, set the variables of the environment that the "
                f"service documents, or give the machine a role ({cause})"
            )
        if code in _FULL or self.status == 507:
            return StoreFull(f"{what} {nbytes} bytes: {cause}; make room, raise the quota, and try again")
        if (denied or self.status == 403) and not self.is_page:
            if doing == "get" and code in _OF_ONE_OBJECT:
                return ObjectUnreadable(f"{what}: the credentials may not read it ({cause}); grant them the right to")
            return StoreDenied(f"{what}: the credentials may not do that ({cause}); grant them the right to {doing}")
        if isinstance(error, FileNotFoundError) and doing == "get" and not self.is_page:
            return ObjectNotFound(f"{where}: no such object")
        if self.tls == "InvalidCertificate":
            remedy = certificates.advice(self.certificate, "give client_kwargs={'verify': the file of its authority}")
            return StoreDenied(f"{what}: {remedy} ({cause})")
        if self.tls:
            remedy = "check whether the endpoint_url wants http://, and whether a proxy is in the way"
            return StoreTimeout(f"{what}: TLS failed: {remedy} ({cause})")
        if self.kind == "Connect":
            return StoreTimeout(f"{what}: no connection ({cause}); is the endpoint right, and up?")
        if self.kind:
            return StoreTimeout(f"{what}: no answer, or no progress, however often it was sent ({cause})")
        if self.is_busy:
            return StoreTimeout(f"{what}: the store is busy or down, however often it was asked ({cause})")
        if self.is_foreign:
            return StoreTimeout(f"{what}: no store answers like this ({cause}); is there a proxy in the way?")
        if self.was_damaged:
            return StoreError(f"{what}: what arrived was not what had been sent ({cause}); nothing was stored")
        if self.refuses_sum:
            return StoreError(f"{what}: {cause}; {_OTHER_SUM}")
        return StoreError(f"{what}: {cause}")


def _plain(text: str) -> str:
    """Returns one line without addresses."""
    return " ".join(re.sub(r"[a-z0-9+]+://\S+", "...", text).split())[:500].rstrip(" -:")


def _lacks_credentials(text: str) -> bool:
    places = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "token request", "CredentialProvider")
    return any(place in text for place in (*places, "External AWS credential provider"))
