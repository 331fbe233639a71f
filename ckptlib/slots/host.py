"""This host: whether it can have slots, and what it and the memory of its slots are called. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ckptlib.errors import SaveFailed

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check_platform() -> None:
    """Raises SaveFailed if there can be no slots, or none that outlive their process safely."""
    lacking = [name for name in ("posix_fallocate", "preadv") if not hasattr(os, name)]
    if lacking:
        raise SaveFailed(
            f"saving needs Linux: snapshots outlive their process in shared memory, and {platform.system()} has no "
            f"{' and no '.join(lacking)}. Loading, and ckptlib ls, show and verify, work here"
        )


def boot_id() -> str:
    """Returns a name of this machine until it boots again. Containers have host names of their own; one machine has one
    boot id."""
    return BOOT_ID.read_text().strip()


def memory_of(directory: Path) -> str:
    """Returns a name of the memory that slots of a directory lie in: the same for all who see the same files."""
    found = os.stat(directory)
    return f"{boot_id()}:{found.st_dev}:{found.st_ino}"
