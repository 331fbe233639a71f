"""A process to which the modes of files apply, also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import platform

_DAC_OVERRIDE, _DAC_READ_SEARCH, _FOWNER = 1, 2, 3
_PR_CAPBSET_DROP = 24
_VERSION = 0x20080522
_CAPGET, _CAPSET = (125, 126) if platform.machine() == "x86_64" else (90, 91)


def give_up_rights() -> None:
    """For good, and for every program that this process starts: modes of files hold for it as for any other user."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.syscall(_CAPGET, header, sets) == 0, os.strerror(ctypes.get_errno())
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH, _FOWNER):
        assert libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        for n in range(3):  # effective, permitted, inheritable
            sets[n] &= ~(1 << capability)
    assert libc.syscall(_CAPSET, header, sets) == 0, os.strerror(ctypes.get_errno())
