"""Removes secrets from a store's URL and options, in messages and tracebacks."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = re.compile(r"secret|token|password|passwd|passphrase|key|credential|connection_string|auth", re.IGNORECASE)
_USERINFO = re.compile(r"://[^/@:]*:([^/]*)@")


class Secrets:
    """The secrets in the URL and the options of one store."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._secrets = _secrets_of({**options, "url": url})

    def hide(self, text: str) -> str:
        """Returns the text with stars for each secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def harmless(self, error: BaseException) -> BaseException | None:
        """Returns the error, to be chained; None if a traceback would print a secret with it."""
        return None if any(secret in str(error) for secret in self._secrets) else error


def without_userinfo(url: str) -> str:
    """Returns the URL as it may be shown."""
    return _USERINFO.sub("://", url)


def _secrets_of(options: Mapping[str, object]) -> list[str]:
    secrets: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            secrets += _secrets_of(value)
        elif isinstance(value, str):
            secrets += [value] if _NAMES.search(name) else _USERINFO.findall(value)
    return [secret for secret in secrets if secret]
