"""Advice on a server's certificate that is refused; clients say why in words of their own."""

from __future__ import annotations

EXPIRED, OTHER_NAME, UNKNOWN = "expired", "other name", "unknown"

_ADVICE = {
    EXPIRED: "the server's certificate has expired, or is not valid yet: who runs the server must renew it; a job that "
    "runs goes on with the new one. If it is valid, the clock of this host is wrong: set it by NTP",
    OTHER_NAME: "the server's certificate is for another name: correct the endpoint_url, or ask whether a proxy is in "
    "the way",
    UNKNOWN: "the server's certificate is not trusted: {trust}, correct the endpoint_url, or ask whether a proxy is in "
    "the way. Where it was replaced, who runs the server must take one of the authority known here; a job that is to "
    "trust another one must be started again",
}


def advice(why: str, trust: str) -> str:
    """Returns what to do. `why`: one of the above; `trust`: how the client is told of an authority."""
    return _ADVICE[why].format(trust=trust)
