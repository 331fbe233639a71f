"""Training data that goes on where training stopped: each item once per epoch, whatever was killed and restarted."""

from ckptlib.data.loader import ResumableLoader as ResumableLoader
from ckptlib.data.sampler import ResumableSampler as ResumableSampler
from ckptlib.data.worker_signals import outlast_signals as outlast_signals
from ckptlib.data.wrap import resumable as resumable

__all__ = ["ResumableLoader", "ResumableSampler", "outlast_signals", "resumable"]
