"""One connection to one bucket: s3fs's own client, and how each of its requests is bounded and sent again.

s3fs makes the client from what the user gave (key, profile, endpoint, ...); its own ways to put, get and list are not
used, since they have traps:

* Its tries multiply with botocore's, and a body whose sending stalls is waited for without limit. Here botocore tries
  once, each try is watched, and what may pass is tried again for `io_limits.RETRY_S`.
* botocore adds `Expect: 100-continue` to bodies, and aiohttp waits without limit for the answer. It is removed.
* Payloads are signed by SHA-256 or not checked at all. Here each has a checksum, which costs less than half of that.
* Credentials of a file are read once. Here they are read again when the server does not take them any more.
* aiohttp, since 3.14, raises if a request whose body is gone is sent elsewhere, before botocore could learn in which
  region the bucket is. Here a request without a body asks that.
* aiohttp keeps a connection that it is to close until all is sent: for ever if a server is there, and reads nothing.
  Here the kernel ends such a connection, if these versions have a way to ask for that; TLS ends by itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import aiohttp
import botocore.config
import fsspec
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError

from ckptlib.errors import CkptError, StoreError, StoreTimeout
from ckptlib.stores import io_limits
from ckptlib.stores.retries import Retries
from ckptlib.stores.s3_body import Body, Progress
from ckptlib.stores.s3_errors import STALE, Foreign, Stalled, WrongOption, code_of, is_unfollowed, meaning_of
from ckptlib.stores.s3_sums import Sums
from ckptlib.stores.secrets import Secrets, without_userinfo

T = TypeVar("T")

_CONNECTIONS = 64
_SILENCE_S = 3
"""How many idle limits a server may think before it answers CompleteMultipartUpload: it joins the parts."""

_LOOP_S = 10.0
"""How long the loop may be busy with something else, such as the start of a client."""

_CANCEL_S = 2.0
"""How long a request that was given up may take to end."""

_GIVEN = ("key", "username", "anon", "session")
"""Options that fix the credentials, for good."""

_OF_OBJECT = ({"ContentLength"}, {"ETag", "LastModified"})
_TOLD: dict[str, tuple[set[str], ...]] = {
    "put_object": ({"ETag"},),
    "upload_part": ({"ETag"},),
    "create_multipart_upload": ({"UploadId"},),
    "list_objects_v2": ({"IsTruncated"},),
    "get_object": _OF_OBJECT,
    "head_object": _OF_OBJECT,
}
"""Fields of an answer, at least one of each set, that every server of S3 gives when it has done what it was asked. Else
a page that a proxy answers by, or sends us to, would be taken for the proof of a put, or for an empty bucket."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store's method: what it does, for messages, and when all of it must have ended."""

    doing: str
    key: str
    nbytes: int | None = None
    deadline: float | None = None


Attempt: TypeAlias = "Callable[[Progress], Coroutine[Any, Any, T]]"
"""Makes one try of a request, and tells when it moves."""


class S3Client:
    """The objects below `url`; `options` are those of s3fs."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = without_userinfo(url).rstrip("/")
        self._secrets = Secrets(url, options)
        config = _config(options.get("config_kwargs"))
        fs, root = fsspec.core.url_to_fs(url, **{**options, "config_kwargs": config, "skip_instance_cache": True})
        self._fs: Any = fs
        self.bucket, prefix, _ = fs.split_path(str(root).rstrip("/"))
        self.prefix = f"{prefix}/" if prefix else ""
        self._s3: Any = None
        self.sums = Sums()
        self.was_there = False
        """Whether the server has answered; if so, one that refuses connections is only away for a while."""
        self._pid = os.getpid()
        client_kwargs: Any = options.get("client_kwargs") or {}
        self._looks_up = not (any(map(options.get, _GIVEN)) or "aws_access_key_id" in client_kwargs)
        self._renewing = asyncio.Lock()
        self._renewals = 0
        """How many times other credentials were found."""

    # -- on the loop's thread

    async def ask(
        self,
        call: Call,
        operation: str,
        parameters: Mapping[str, object],
        retries: Retries | None = None,
        more_s: float = 0.0,
    ) -> dict[str, Any]:
        """Returns the answer to one request without a body, which is sent again after what may pass. `more_s`: how much
        longer than another the server may think.

        Raises botocore's error for an answer that will not pass, and StoreTimeout.
        """
        idle_s = io_limits.IDLE_S * (_SILENCE_S if operation == "complete_multipart_upload" else 1) + more_s

        async def request(progress: Progress) -> dict[str, Any]:
            return await self.send(operation, parameters)

        return await self.tried(call, request, retries or Retries(call.deadline), idle_s)

    async def give(
        self,
        call: Call,
        operation: str,
        parameters: Mapping[str, object],
        body: Body,
        sums: dict[str, str],
        retries: Retries,
    ) -> dict[str, Any]:
        """Sends a request with a body until the server has checked it; returns the answer. `sums`: what `self.sums`
        said of it."""

        async def request(progress: Progress) -> dict[str, Any]:
            try:
                return await self.send(operation, {**parameters, **sums, "Body": body.sent(progress)})
            except BotoCoreError as error:
                if is_unfollowed(error):  # botocore remembers the region that the answer to a HEAD tells
                    with contextlib.suppress(BotoCoreError, ClientError, Foreign):
                        await self.send("head_object", {"Key": parameters["Key"]})
                raise

        while True:
            try:
                answer = await self.tried(call, request, retries)
            except ClientError as error:
                if not self.sums.refused(sums, error):
                    raise
            else:
                if self.sums.checked(sums, answer):
                    return answer
                retries.failures += 1
            sums = self.sums.of(body)

    async def tried(self, call: Call, attempt: Attempt[T], retries: Retries, idle_s: float | None = None) -> T:
        """Returns the result of an attempt, which is watched, and repeated after a fault that may pass, or with newer
        credentials."""
        renewing = Retries(call.deadline)  # a program for credentials may print others each time
        while True:
            renewals = self._renewals
            progress = Progress(io_limits.IDLE_S if idle_s is None else idle_s)
            try:
                result = await _watched(attempt(progress), progress, call.deadline)
                self.was_there = True
                return result
            except Exception as error:
                self.was_there |= isinstance(error, ClientError)
                if self._looks_up and code_of(error) in STALE:
                    looking = Progress(io_limits.IDLE_S)
                    is_renewed = await _watched(self._is_renewed(renewals), looking, call.deadline)
                    wait_s = renewing.wait_s() if is_renewed else None
                    if wait_s is None:
                        raise
                    await asyncio.sleep(wait_s)
                    continue
                meaning = meaning_of(error)
                if not meaning.passes:
                    raise
                is_wrong = meaning.is_nowhere and not self.was_there
                wait_s = retries.wait_s(min(io_limits.NOWHERE_S, io_limits.RETRY_S) if is_wrong else None)
                if wait_s is None:
                    tries = f"gave up after {retries.elapsed_s:.1f} s, {retries.failures} tries: "
                    raise StoreTimeout(self._told(call, error, tries)) from self._secrets.harmless(error)
            await asyncio.sleep(wait_s)

    async def _is_renewed(self, renewals: int) -> bool:
        """Looks for other credentials than those at `renewals`; returns whether there are some.

        They are put into those that the client has, so that no request of it is disturbed.
        """
        async with self._renewing:
            if self._renewals != renewals:
                return True
            used = await self._fs.session.get_credentials()
            if isinstance(used, RefreshableCredentials):  # these renew themselves
                return False
            try:
                found = await AioSession(**self._fs.kwargs).get_credentials()
            # somebody is writing the file, or the program that it names fails
            except (BotoCoreError, OSError, ValueError, AttributeError, TypeError):
                return False
            if found is None:
                return False
            new = await found.get_frozen_credentials()
            if (new.access_key, new.secret_key, new.token) == (used.access_key, used.secret_key, used.token):
                return False
            used.access_key, used.secret_key, used.token = new.access_key, new.secret_key, new.token
            self._renewals += 1
            return True

    async def send(self, operation: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        """Sends one request, which is neither watched nor sent again."""
        try:
            await self._fs.set_session()
            client = await self._fs.get_s3(self.bucket)
        # s3fs does not know botocore's options, and passes on any name; a program for credentials may print null
        except (TypeError, ValueError, AttributeError) as error:
            raise WrongOption(f"{type(error).__name__}: {error}") from error
        if client is not self._s3:
            client.meta.events.register_last("before-call.s3", _expect_nothing)
            self._s3 = client
        method = getattr(client, operation)
        answer: dict[str, Any] = await method(
            # those of every request, such as who pays for it, are added by newer versions of s3fs alone
            **self._fs._get_s3_method_kwargs(method, self._fs.req_kw, Bucket=self.bucket, **parameters)
        )
        for told in _TOLD.get(operation, ()):
            if told.isdisjoint(answer):
                if "Body" in answer:
                    answer["Body"].close()
                raise Foreign(
                    f"answered by {answer['ResponseMetadata']['HTTPStatusCode']} without {' or '.join(sorted(told))}, "
                    "as no S3 server does; is there a proxy in the way?"
                )
        return answer

    # -- on any other thread

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begins the work on the thread of fsspec's loop."""
        try:
            if self._pid != os.getpid():
                raise StoreError(f"{self.url}: opened in another process; open the store again after a fork")
            return asyncio.run_coroutine_threadsafe(work, self._fs.loop)
        except BaseException:
            work.close()
            raise

    def wait(self, call: Call, futures: Collection[concurrent.futures.Future[Any]]) -> None:
        """Returns when one of them is done. Raises StoreTimeout if the loop does not run, whatever holds it."""
        while True:
            wait_s = _LOOP_S
            if call.deadline is not None:
                wait_s = max(0.1, min(wait_s, call.deadline - time.monotonic() + _CANCEL_S))
            if concurrent.futures.wait(futures, wait_s, concurrent.futures.FIRST_COMPLETED).done:
                return
            if not self._loop_runs(wait_s):
                for future in futures:
                    future.cancel()
                raise StoreTimeout(
                    f"{self.url}/{call.key}: cannot {call.doing}: fsspec's event loop has not answered for "
                    f"{wait_s:.1f} s; something in this process blocks it or has ended it"
                )

    def _loop_runs(self, wait_s: float) -> bool:
        answered = threading.Event()
        try:
            self._fs.loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it is closed
            return False
        return answered.wait(wait_s)

    def run(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of the coroutine."""
        with self.failures(call):
            future = self.start(work)
            self.wait(call, [future])
            return future.result()

    @contextlib.contextmanager
    def failures(self, call: Call) -> Iterator[None]:
        """Turns errors of the clients into those of the contract."""
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            raise self.failure(call, error) from self._secrets.harmless(error)

    def failure(self, call: Call, error: BaseException, kind: type[StoreError] | None = None) -> StoreError:
        """Returns the error of the contract. `kind`: its class here, if not the one that it has everywhere."""
        return (kind or meaning_of(error).kind)(self._told(call, error, ""))

    def _told(self, call: Call, error: BaseException, tries: str) -> str:
        cause = self._secrets.hide(f"{type(error).__name__}: {error}")
        nbytes = "" if call.nbytes is None else f", {call.nbytes} bytes"
        advice = meaning_of(error).advice
        return f"{self.url}/{call.key}: cannot {call.doing}: {tries}{cause}{nbytes}{'; ' if advice else ''}{advice}"

    def close(self) -> None:
        """Ends the connections. Those of a parent process are left alone."""
        if self._s3 is None or self._pid != os.getpid():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            future = asyncio.run_coroutine_threadsafe(self._s3.close(), self._fs.loop)
            concurrent.futures.wait([future], _CANCEL_S)


async def _watched(work: Coroutine[Any, Any, T], progress: Progress, deadline: float | None) -> T:
    """Returns the result of the work. Raises Stalled if it makes no progress for too long, and at the deadline."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            left_s = progress.left_s()
            if deadline is not None:
                left_s = min(left_s, deadline - time.monotonic())
            if left_s <= 0:
                raise Stalled(_why(progress))
            await asyncio.wait({task}, timeout=left_s)
        return task.result()
    finally:
        await ended([task])


def _why(progress: Progress) -> str:
    return f"no progress for {progress.limit_s:g} s" if progress.left_s() <= 0 else "the time for it was over"


async def ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Ends tasks that are not done; their connections are closed."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_CANCEL_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # nobody else may ask for it


def _expect_nothing(params: dict[str, Any], **_: object) -> None:
    params["headers"].pop("Expect", None)


def _config(given: object) -> dict[str, Any]:
    """Returns the user's options for botocore, but for tries and time-outs, which are ours."""
    wanted: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    defaults = {
        "parameter_validation": False,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    config = {
        **{name: value for name, value in defaults.items() if name in botocore.config.Config.OPTION_DEFAULTS},
        **wanted,
        "s3": {"payload_signing_enabled": False, **(wanted.get("s3") or {})},
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": max(_CONNECTIONS, wanted.get("max_pool_connections") or 0),
        "connect_timeout": io_limits.IDLE_S,
        "read_timeout": io_limits.IDLE_S * _SILENCE_S + io_limits.DELETE_S * io_limits.PAGE_KEYS,  # each try is watched
    }
    sockets = {"connector_args": {"socket_factory": _socket, **(wanted.get("connector_args") or {})}}
    return {**config, **sockets} if _takes(config, sockets) else config


def _takes(config: Mapping[str, object], sockets: Mapping[str, object]) -> bool:
    """Returns whether these versions of aiohttp and aiobotocore, and this system, know how sockets are to be made."""
    known = inspect.signature(aiohttp.TCPConnector).parameters
    if "socket_factory" not in known or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return False
    try:
        AioConfig(**{**config, **sockets})
    except (BotoCoreError, TypeError):  # for options that the user gave: the first request tells of them
        return False
    return True


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Returns a socket whose connection ends when the server has taken nothing of what was sent for too long."""
    made = socket.socket(*address[:3])
    with contextlib.suppress(OSError):  # a kernel that does not know it
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * io_limits.IDLE_S * _SILENCE_S))
    return made
