"""Makes this Python one that was built on an old system, and lacks functions for what the kernel can do."""

import os
import signal

LACKING = "pidfd_open", "memfd_create", "RWF_NOWAIT", "RWF_HIPRI", "copy_file_range", "getrandom", "eventfd", "splice"

for name in LACKING:
    if hasattr(os, name):
        delattr(os, name)
if hasattr(signal, "pidfd_send_signal"):
    del signal.pidfd_send_signal
