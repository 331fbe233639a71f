"""Makes a client of obstore from a URL and the options that s3fs, gcsfs and adlfs take.

An option that obstore lacks is refused by name: a dropped one would be missed much later, if ever.
"""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from ckptlib.errors import StoreDenied
from ckptlib.stores import io_limits
from ckptlib.stores.secrets import Secrets

_RETRIES = 100
"""Most retries of a request; more than fit in RETRY_S."""

LOOK_S = 60
"""How often the files of ~/.aws are read again; each time takes 0.07 s of CPU."""

_AHEAD_S = 300
"""obstore asks for new credentials this many seconds before the old ones expire."""

_S3 = {
    *("key", "secret", "token", "username", "password", "anon", "profile", "endpoint_url", "use_ssl"),
    *("requester_pays", "client_kwargs", "config_kwargs", "s3_additional_kwargs"),
}
_S3_CLIENT = {
    "region_name": "region",
    "endpoint_url": "endpoint",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables that obstore reads."""
_S3_ADDED = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id"}
_GCS = {"token", "endpoint_url", "project", "anon"}
_AZURE = {
    **{name: name for name in ("account_name", "account_key", "client_id", "client_secret", "tenant_id")},
    "sas_token": "sas_key",
}
_AZURE_OTHERS = {"connection_string", "account_host", "anon"}
_CONNECTION = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
_CONNECTION_OTHERS = {"DefaultEndpointsProtocol", "EndpointSuffix", "BlobEndpoint"}


@dataclass
class Client:
    """The options for obstore; `open` makes a client."""

    make: Callable[..., Any]
    bucket: str
    root: str
    """Prefix of all keys in the bucket; '' for none."""
    config: dict[str, Any] = field(default_factory=dict)
    client_options: dict[str, Any] = field(default_factory=dict)
    credential_provider: object = None

    @property
    def is_s3(self) -> bool:
        return self.make is S3Store

    @property
    def lists_in_order(self) -> bool:
        """Whether the names in a directory are listed in order. S3's directory buckets do not; Azure may not."""
        return self.make is GCSStore or (self.is_s3 and not self.bucket.endswith("--x-s3"))

    def open(self, nbytes: int, idle: bool, retry_s: float, **config: object) -> Any:
        """Returns a client whose requests carry at most `nbytes`. `idle`: whether the requests are so small, or come
        down, that an answer which does not begin, or stops, within IDLE_S counts as none. Raises ValueError for what
        obstore refuses."""
        timeouts = {"timeout": timedelta(seconds=io_limits.IDLE_S + nbytes / io_limits.SLOWEST_BPS)}
        if idle:
            timeouts["read_timeout"] = timedelta(seconds=io_limits.IDLE_S)
        given = {} if self.credential_provider is None else {"credential_provider": self.credential_provider}
        try:
            return self.make(
                self.bucket,
                config={**self.config, **config},
                client_options={
                    "connect_timeout": timedelta(seconds=io_limits.IDLE_S / 2),
                    **timeouts,
                    **self.client_options,
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=retry_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=max(0.1, retry_s / 12)),
                        "base": 2,
                    },
                },
                **given,
            )
        except BaseError as error:  # as for want of an account
            why = Secrets("", self.config).hide(str(error).partition("\n")[0])
            raise ValueError(f"client 'obstore' cannot take these options: {why}") from None


def client_of(url: str, options: Mapping[str, object]) -> Client:
    """Returns the client for a URL. Raises ValueError for a URL or an option that obstore has no word for."""
    parts = urlsplit(url)
    kinds = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs, "az": _azure, "abfs": _azure, "abfss": _azure}
    if parts.scheme not in kinds:
        raise ValueError(f"{parts.scheme}://...: client 'obstore' knows {', '.join(f'{kind}://' for kind in kinds)}")
    bucket, _, host = parts.netloc.partition("@")  # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/...
    if not bucket or (host and kinds[parts.scheme] is not _azure):
        raise ValueError(f"{parts.scheme}://{host or '...'}: expected {parts.scheme}://BUCKET/PREFIX")
    root = url.partition("://")[2].partition("/")[2].rstrip("/")  # as it stands: '?' and '#' may be in a name
    if root and not {"", ".", ".."}.isdisjoint(root.split("/")):
        one, base = posixpath.normpath(f"/{root}").lstrip("/"), f"{parts.scheme}://{parts.netloc}"
        raise ValueError(
            f"{base}/{root}: client 'obstore' has no names with '//', '/./' or '/../', where s3fs, gcsfs and adlfs "
            f"have others than with '/': is it {base}/{one}?"
        )
    given = {name: value for name, value in options.items() if value is not None}
    if host:
        given.setdefault("account_name", host.partition(".")[0])
    client = kinds[parts.scheme](bucket, root, given)
    _check_endpoint(*(str(client.config[name]) for name in ("endpoint", "base_url") if name in client.config))
    return client


def _check_endpoint(*places: str) -> None:
    """Raises ValueError for an endpoint without a scheme, on which obstore panics at the first request."""
    for place in places:
        if not place.lower().startswith(("http://", "https://")):
            raise ValueError(f"the endpoint {place!r}: expected http://... or https://...")


def _is_plain(place: object) -> bool:
    """Returns whether an endpoint is reached without TLS, which obstore must be allowed."""
    return str(place).lower().startswith("http://")


def _s3(bucket: str, root: str, options: dict[str, Any]) -> Client:
    _refuse_others("s3fs", options, _S3)
    client = Client(S3Store, bucket, root)
    config = client.config
    style, has_checksums = _config_kwargs(options)
    config["unsigned_payload"] = True  # a SHA-256 of all that is sent takes 0.5 s of CPU for a GB
    if has_checksums and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
        config["checksum_algorithm"] = "CRC64NVME"  # takes 0.03 s
    kwargs = dict(options.get("client_kwargs") or {})
    verify = kwargs.pop("verify", None)
    named = f"client_kwargs={{'verify': {str(verify)!r}}}"
    if verify is None and (bundle := os.environ.get("AWS_CA_BUNDLE")):
        verify, named = bundle, f"AWS_CA_BUNDLE={bundle}"
    use_ssl = kwargs.pop("use_ssl", options.get("use_ssl", True))
    _refuse_others("s3fs", kwargs, _S3_CLIENT, "client_kwargs")
    config.update({_S3_CLIENT[name]: value for name, value in kwargs.items() if value is not None})
    added = dict(options.get("s3_additional_kwargs") or {})
    _refuse_others("s3fs", added, _S3_ADDED, "s3_additional_kwargs")
    config.update({_S3_ADDED[name]: value for name, value in added.items()})
    for names, ours in (
        (("key", "username"), "access_key_id"),
        (("secret", "password"), "secret_access_key"),
        (("token",), "session_token"),
        (("endpoint_url",), "endpoint"),
    ):
        for name in names:
            if name in options:
                config[ours] = options[name]
    if options.get("requester_pays"):
        config["request_payer"] = True
    profile = options.get("profile") or os.environ.get("AWS_PROFILE")
    if "endpoint" not in config and not any(map(os.environ.get, _ENDPOINTS)):
        for name, value in _configured_endpoint(profile).items():
            config.setdefault(name, value)
    _set_endpoint(client, style, bool(use_ssl))
    if verify is False:
        client.client_options["allow_invalid_certificates"] = True
    elif isinstance(verify, str | os.PathLike):
        client.client_options["root_certificate"] = _certificates(named, verify)
    if options.get("anon"):
        config["skip_signature"] = True
    elif "access_key_id" not in config:
        _use_boto(client, profile)
    elif "profile" in options:
        raise ValueError("got a key and a profile; expected one of them")
    elif "session_token" not in config and "secret_access_key" in config:
        # obstore would add the token of the environment, which belongs to another key, and perhaps to another server
        given = {name: config[name] for name in ("access_key_id", "secret_access_key")}
        client.credential_provider = partial(dict, **given, token=None, expires_at=None)
    return client


def _certificates(named: str, path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a file of certificates. `named`: what names it, for the message."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{named}: {error.strerror}; expected a certificate file") from None


def _config_kwargs(options: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns how a bucket is addressed, and whether what is sent carries a checksum, as botocore is told it."""
    kwargs = dict(options.get("config_kwargs") or {})
    s3 = dict(kwargs.pop("s3", None) or {})
    style = str(s3.pop("addressing_style", "auto"))
    default = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    checksums = str(kwargs.pop("request_checksum_calculation", default))
    _refuse_others("s3fs", {**kwargs, **s3}, ("s3.addressing_style", "request_checksum_calculation"), "config_kwargs")
    return style, checksums.lower() != "when_required"


def _set_endpoint(client: Client, style: str, use_ssl: bool) -> None:
    endpoint = str(client.config.get("endpoint", "")).rstrip("/")
    if not use_ssl and not endpoint:
        raise ValueError("use_ssl=False: client 'obstore' needs an endpoint_url of http:// for that")
    if style == "virtual":
        client.config["virtual_hosted_style_request"] = True
        endpoint = endpoint.replace("://", f"://{client.bucket}.", 1)
    if endpoint:
        client.config["endpoint"] = endpoint
    elsewhere = [os.environ.get(name, "") for name in _ENDPOINTS]
    counts = elsewhere[:1] if endpoint or elsewhere[0] else elsewhere  # the first one also if there is an option
    _check_endpoint(*filter(None, counts))
    if any(map(_is_plain, (endpoint, *elsewhere))):
        client.client_options["allow_http"] = True


def _has_files() -> bool:
    """Returns whether there are files of ~/.aws, or of the variables that name others."""
    usual = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = [os.environ.get(name, place) for name, place in usual.items()]
    files = [*map(os.path.expanduser, files)]  # unchanged if no home is known: pathlib would raise
    return any(map(os.path.exists, files))


def _configured_endpoint(profile: str | None) -> dict[str, str]:
    """Returns the endpoint that a profile of ~/.aws names, if any, and its region. s3fs goes there; obstore would go to
    Amazon, with another server's keys. Raises ValueError if the profile names a section of services that is none."""
    if not _has_files() or importlib.util.find_spec("botocore") is None:
        return {}
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session(profile=profile)
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return {}
        told = session.get_scoped_config()
        sections, region = session.full_config.get("services", {}), session.get_config_variable("region")
    except BotoCoreError:  # no such profile, as whoever looks for credentials there tells
        return {}
    name = told.get("services")
    services = {} if name is None else sections.get(name)
    of_s3 = None if services is None else services.get("s3") or {}
    if not isinstance(of_s3, Mapping):
        raise ValueError(
            f"services = {name} in ~/.aws: expected [services {name}], with endpoint_url indented below s3 ="
        )
    if not (found := of_s3.get("endpoint_url") or told.get("endpoint_url")):
        return {}
    return {"endpoint": found, **({"region": region} if region else {})}


def _use_boto(client: Client, profile: str | None) -> None:
    """Lets boto3 look for credentials where obstore does not: in the files of ~/.aws, and sources named there."""
    if not profile and ("AWS_ACCESS_KEY_ID" in os.environ or not _has_files()):
        return
    if importlib.util.find_spec("boto3") is None:
        if profile:
            raise ValueError(f"profile {profile!r}: client 'obstore' reads profiles by boto3; pip install boto3")
        return
    import boto3  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session(profile_name=profile)
        found = session.get_credentials()
    # No such profile; a credential_process that fails, or prints null, a list, or a number as the Expiration.
    except (BotoCoreError, OSError, ValueError, AttributeError, TypeError) as error:
        told = f"client 'obstore' gets no credentials from boto3: {type(error).__name__}: {error}; correct ~/.aws"
        raise StoreDenied(told) from None
    if found is not None:
        client.credential_provider = _Credentials(found, profile)
    elif profile:
        raise ValueError(f"profile {profile!r}: boto3 finds no credentials in it")
    if session.region_name is not None:
        client.config.setdefault("region", session.region_name)


class _Credentials:
    """Gives obstore the credentials that boto3 finds, for as long as it may use them. One session of boto3 reads a file
    once, so a new session looks each time, unless the session that found the credentials renews them."""

    def __init__(self, found: Any, profile: str | None) -> None:
        self._found, self._profile = found, profile
        self._last: Any = None

    def __call__(self) -> dict[str, Any]:
        from boto3 import Session
        from botocore.credentials import RefreshableCredentials
        from botocore.exceptions import BotoCoreError, ClientError

        # The last four of a credential_process.
        failures = (BotoCoreError, ClientError, OSError, ValueError, AttributeError, TypeError)
        if not isinstance(self._found, RefreshableCredentials):
            with suppress(*failures):  # somebody is writing the file
                self._found = Session(profile_name=self._profile).get_credentials() or self._found
        try:
            now = self._last = self._found.get_frozen_credentials()
        except failures:  # who renews them is away; boto3 asks minutes before they expire
            if (now := self._last) is None:
                raise
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_AHEAD_S + LOOK_S),
        }


def _gcs(bucket: str, root: str, options: dict[str, Any]) -> Client:
    _refuse_others("gcsfs", options, _GCS)  # the project matters only to who makes or lists buckets
    client = Client(GCSStore, bucket, root)
    token = options.get("token")
    if options.get("anon") or token == "anon":
        client.config["skip_signature"] = True
    elif isinstance(token, Mapping):
        client.config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and os.path.isfile(token):  # pathlib's raises for a token too long to be a name
        kind = json.loads(Path(token).read_text()).get("type")
        client.config["service_account" if kind == "service_account" else "application_credentials"] = token
    elif isinstance(token, str) and token not in ("google_default", "cloud"):
        if token in ("cache", "browser"):
            raise ValueError(f"token={token!r}: client 'obstore' cannot; expected a file, a dict, 'anon', or a token")
        if token.endswith(".json"):  # Google would say that it does not know the caller
            raise ValueError(f"token={token!r}: there is no such file")
        client.config["bearer_token"] = token
    elif token is not None and not isinstance(token, str):
        raise ValueError(f"token of type {type(token).__name__}: client 'obstore' cannot; expected a file or a dict")
    if "endpoint_url" in options:
        client.config["base_url"] = str(options["endpoint_url"]).rstrip("/")
        client.client_options["allow_http"] = _is_plain(options["endpoint_url"])
    return client


def _azure(bucket: str, root: str, options: dict[str, Any]) -> Client:
    _refuse_others("adlfs", options, {*_AZURE, *_AZURE_OTHERS})
    client = Client(AzureStore, bucket, root)
    config = client.config
    if "connection_string" in options:
        config.update(_connection(str(options["connection_string"])))
    config.update({_AZURE[name]: value for name, value in options.items() if name in _AZURE})
    if "account_host" in options:
        config["endpoint"] = f"https://{options['account_host']}"
    if "sas_key" in config:
        config["sas_key"] = str(config["sas_key"]).removeprefix("?")
    if options.get("anon"):
        config["skip_signature"] = True
    if _is_plain(config.get("endpoint")):
        client.client_options["allow_http"] = True
    return client


def _connection(text: str) -> dict[str, str]:
    parts = {name.strip(): value for name, _, value in (part.partition("=") for part in text.split(";") if part)}
    _refuse_others("adlfs", parts, {*_CONNECTION, *_CONNECTION_OTHERS}, "connection_string")
    config = {_CONNECTION[name]: value for name, value in parts.items() if name in _CONNECTION}
    if "BlobEndpoint" in parts:
        config["endpoint"] = parts["BlobEndpoint"].rstrip("/")
    elif "EndpointSuffix" in parts:
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        config["endpoint"] = f"{scheme}://{parts.get('AccountName', '')}.blob.{parts['EndpointSuffix']}"
    return config


def _refuse_others(whose: str, given: Mapping[str, object], known: Iterable[str], where: str = "") -> None:
    known = sorted({*known})
    others = sorted(given.keys() - known)
    if others:
        place = f" of {where}" if where else ""
        raise ValueError(
            f"{', '.join(others)}{place}: client 'obstore' has no such option; expected {', '.join(known)}, as {whose} "
            "takes them"
        )
