"""Makes a server check the bytes that it is sent: by CRC32 if it knows that, else by MD5.

A server that knows CRC32 tells it back; SeaweedFS and Amazon do. One that does not, such as JuiceFS, says nothing and
stores whatever comes. So the first bodies carry both sums, and nothing is ever stored unchecked.
"""

from __future__ import annotations

import base64
from typing import Any

from botocore.exceptions import ClientError

from ckptlib.stores.s3_body import Body
from ckptlib.stores.s3_errors import code_of, meaning_of, status_of

_CRC32, _MD5 = "ChecksumCRC32", "ContentMD5"


class Sums:
    """The checksums that a server was found to support."""

    def __init__(self) -> None:
        self._kinds = {_CRC32, _MD5}
        self._sure = False

    @property
    def of_upload(self) -> dict[str, str]:
        """Parameters of the request that begins an upload in parts, which all have the same sums."""
        return {"ChecksumAlgorithm": "CRC32"} if _CRC32 in self._kinds else {}

    def of(self, body: Body) -> dict[str, str]:
        """Returns the parameters of the request that has this body. Reads all of it."""
        md5 = _md5(body) if _MD5 in self._kinds else {}
        return {_CRC32: body.crc32, **md5} if _CRC32 in self._kinds else md5

    def checked(self, sent: dict[str, str], answer: dict[str, Any]) -> bool:
        """Whether the server has compared what it got; if not, the body must be sent again, with another sum."""
        if self._sure and _CRC32 in sent and _CRC32 not in answer:  # another server, or a proxy that tells less
            self._sure, self._kinds = False, {_CRC32, _MD5}
        elif _CRC32 in sent and not self._sure:
            self._sure = _CRC32 in answer
            self._kinds = {_CRC32} if self._sure else {_MD5}
        return _MD5 in sent or _CRC32 in answer

    def refused(self, sent: dict[str, str], error: ClientError) -> bool:
        """Returns whether a request was refused for its sums; if so, others are used from now on."""
        has_crc32 = _CRC32 in sent or "ChecksumAlgorithm" in sent
        unknown = code_of(error) == "NotImplemented" or status_of(error) == 400
        if self._sure or not has_crc32 or not unknown or meaning_of(error).passes:
            return False
        self._kinds = {_CRC32} if _MD5 in sent else {_MD5}
        return True


def fits(sums: dict[str, str], body: Body) -> bool:
    """Returns whether the sums are of this body."""
    return sums.items() <= {_CRC32: body.crc32, **_md5(body)}.items()


def _md5(body: Body) -> dict[str, str]:
    return {_MD5: base64.b64encode(body.md5).decode()}
