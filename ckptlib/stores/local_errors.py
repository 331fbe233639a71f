"""Turns errors of the file system into errors of a store."""

from __future__ import annotations

import errno
import os

from ckptlib.errors import ObjectUnreadable, StoreDenied, StoreError, StoreFull

ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
"""Errors that say that there is no such object."""

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_RENAME = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OWN = {
    *(errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "EUCLEAN", "ENODATA", "EILSEQ", "EREMOTEIO")),
}
"""Errors that may concern one file alone: bad sectors, checksums of the file system, permissions."""


def failure(error: OSError, doing: str, path: str, nbytes: int = 0) -> StoreError:
    """Returns the store's error. `doing`: a verb, such as "read"; `nbytes`: how many were to be written."""
    cause = f"{os.strerror(error.errno)} (errno {error.errno})" if error.errno else str(error)
    if error.errno == errno.EXDEV:
        cause += "; a root must be on one file system"
    if doing == "publish" and error.errno in _NO_RENAME:
        cause += (
            "; this file system can neither link nor rename a file. If it is a mounted bucket, give the bucket's own "
            "URL, such as s3://bucket/run"
        )
    if error.errno == errno.ENOTDIR and (found := _in_the_way(error.filename, path)) is not None:
        cause += f"; {found} is in the place of a directory of the root; move it away"
    if error.errno in _DENIED and isinstance(error.filename, str) and os.path.isabs(error.filename):
        cause += f", of {error.filename}"  # a directory above the root, or the root
    if error.errno in _FULL:
        return StoreFull(f"{path}: cannot {doing} {nbytes} bytes: {cause}; {_free(path)}; make room and try again")
    kind: type[StoreError] = ObjectUnreadable if doing == "read" and error.errno in _OWN else StoreError
    if doing == "begin to write" and error.errno in _DENIED:  # nothing is there yet; later a flush may be refused
        kind = StoreDenied
    return kind(f"{path}: cannot {doing}: {cause}")


def _in_the_way(named: object, path: str) -> str | None:
    """Returns the lowest part of a path that is there, if it is a file or a link; None if it is gone. The path is the
    one that the error has named, or else `path` without its last name."""
    at = named if isinstance(named, str) and os.path.isabs(named) else os.path.dirname(path)
    while os.path.isdir(at) or not os.path.lexists(at):
        if os.path.islink(at):
            break
        if at == os.path.dirname(at):
            return None
        at = os.path.dirname(at)
    return at


def _free(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:
        return "the free space is unknown"
    if status.f_files and not status.f_favail:
        return "its file system has no inode left for another file"
    return f"{status.f_bavail * status.f_frsize} bytes are free on its file system"
