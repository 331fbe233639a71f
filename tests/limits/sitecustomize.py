"""Other limits of requests in a process that is started with this directory on its path; see `helpers.limits`."""

import json
import os

from ckptlib.policy import keep
from ckptlib.stores import io_limits

for name, value in json.loads(os.environ.get("CKPTLIB_TEST_IO_LIMITS", "{}")).items():
    setattr(keep if hasattr(keep, name) else io_limits, name, value)
