"""A callback by which a Checkpointer saves a training of Lightning: `callbacks=[CkptlibCallback(url, every=100)]`.

The state is the objects themselves: module, optimizers, schedulers; and everything in Lightning's own checkpoint that
is not in them. Needs the package lightning.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from ckptlib.adapters.lightning_state import LightningState
from ckptlib.checkpointer import Checkpointer
from ckptlib.data.loader import ResumableLoader
from ckptlib.data.sampler import ResumableSampler
from ckptlib.errors import Preempted
from ckptlib.policy.keep import Keep
from ckptlib.policy.stop_signal import TOLD_BY, handler
from ckptlib.policy.when import When

log = logging.getLogger(__name__)


class CkptlibCallback(Checkpoint):
    """Saves all of a training and the random state of every rank, while it goes on, as steps of a root.

        saves = CkptlibCallback("checkpoints/run7", every=100, keep=Keep(last=2, best="val_loss", mode="min"))
        Trainer(callbacks=[saves]).fit(module)  # again after a kill: it goes on

    `fit` begins with the newest step of the root. If there is none, it begins with `ckpt_path`, if given, but raises
    with `must_resume=True`. A step is one of the optimizer. With `keep.best`, each validation that logs this metric is
    saved, too; the last step always is.

    `fit` raises Preempted, status 75, if SIGTERM told the job to stop; the step is saved then.
    """

    def __init__(self, url: str | Path, *, every: When, keep: Keep | None = None, **options: Any) -> None:
        """`options`: further arguments of `Checkpointer` but `state`, such as peers, local, codec, must_resume."""
        self.best_model_path = ""
        """Lightning asks for it if `ckpt_path="best"`: there is no such file. See `ckptlib.load(step="best")`."""
        self._url = url
        self._keep = keep
        self._options = {**options, "every": every, "keep": keep}
        self._checkpointer: Checkpointer | None = None
        self._step = 0
        """The last step that the Checkpointer knows of."""
        self._global_step = 0
        """The step by Lightning's count, which counts each optimizer: there may be two."""
        self._of_validation: set[str] = set()
        """Metrics that validations have logged."""
        self._before_validation: set[str] = set()
        self._validated = False
        """Whether a validation belongs to the step that is told next."""
        self._loaded: LightningState | None = None
        self._handlers: dict[int, Any] = {}
        """Signal handlers of the Checkpointer, by signal."""

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer of the `fit` under way. Raises ValueError if there is none."""
        if self._checkpointer is None:
            raise ValueError("CkptlibCallback has a Checkpointer from on_fit_start to teardown only")
        return self._checkpointer

    # Beginning

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores. Everything is set up by now, wrapped and on its device; no data loader has begun."""
        self._close()
        state = LightningState(trainer)
        self._checkpointer = Checkpointer(self._url, state.objects, **self._options)
        own = handler()
        self._handlers = {} if own is None else {n: own for n in TOLD_BY if signal.getsignal(n) == own}
        report = self._checkpointer.restore()
        self._step, self._global_step = report.step, 0
        self._loaded = None if report.save is None else state
        if self._loaded is not None:
            self._loaded.hand_out()
            self._global_step = trainer.global_step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts data loaders and the random state back. Data loaders have begun by now."""
        if self._checkpointer is None:
            return
        for number, own in self._handlers.items():  # Lightning's handlers would end one rank alone
            signal.signal(number, own)
        if self._step == 0:  # the state may come from a file of Lightning's
            self._step = self._global_step = trainer.global_step
        if self._loaded is not None:
            self._loaded.place_data()
            self._loaded = None
        self._checkpointer.restore_random()
        if trainer.is_global_zero and trainer.num_training_batches == float("inf"):
            log.warning(
                "Lightning reads a data loader of no known length one batch ahead, so a run that goes on within an "
                "epoch leaves one batch out; give it a __len__, or save as epochs end"
            )
        for sampler in _uneven(trainer) if trainer.is_global_zero else ():
            log.warning(
                "%d items in batches of %d: some epochs have %d batches and some %d, and Lightning counts on %d; the "
                "end of a shorter one passes without its validation and its scheduler's step, and a run that goes on "
                "from there takes a batch more; make the ResumableSampler with drop_last=True",
                *(sampler.length, sampler.global_batch, len(sampler), len(sampler) - 1, len(sampler)),
            )

    # Training

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tells a step when everything that belongs to it is done: its validation, the end of its epoch."""
        loop = trainer.fit_loop
        validates = loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        if not trainer.is_last_batch and not validates:
            self._step_done(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the copy: callbacks may now exchange the weights for averaged ones."""
        self._before_validation = {*trainer.callback_metrics}
        if self._checkpointer is not None:
            with self._checkpointer.updating():
                pass

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._checkpointer is None or trainer.sanity_checking:
            return
        self._of_validation |= {*trainer.callback_metrics} - self._before_validation
        self._validated = trainer.global_step != self._global_step
        if not trainer.is_last_batch:
            self._step_done(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _ends(trainer):  # other callbacks may change the weights in on_train_end
            self._save_last(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells the last step of the epoch before."""
        self._step_done(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_last(trainer)

    def _step_done(self, trainer: Trainer) -> None:
        """Tells the Checkpointer of a step, once. Collective."""
        if self._checkpointer is None or trainer.global_step == self._global_step:
            return
        metrics = self._metrics(trainer)
        self._global_step = trainer.global_step
        self._step += 1
        self._checkpointer.after_step(self._step, metrics)
        if self._checkpointer.stopping:
            self._close()
            raise Preempted
        if _ends(trainer) or (self._validated and self._keep is not None and self._keep.best in metrics):
            last = self._checkpointer.pending
            has_them = last is not None and last.step == self._step
            self._checkpointer.save(self._step, None if has_them else metrics)
        self._validated = False

    def _save_last(self, trainer: Trainer) -> None:
        """Saves the last step unless it is saved. Collective."""
        self._step_done(trainer)
        if self._checkpointer is not None and self._step > 0:
            self._checkpointer.save(self._step)

    def _metrics(self, trainer: Trainer) -> Mapping[str, float]:
        """Returns the metrics of this step: those that an earlier validation logged belong to an earlier one."""
        but = () if self._validated else self._of_validation
        found = {name: value for name, value in trainer.callback_metrics.items() if name not in but}
        return _Numbers({name: value for name, value in found.items() if value.numel() == 1})

    # Ending

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for all saves. Raises SaveFailed."""
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for nothing: another process finishes what is under way."""
        if self._loaded is not None:
            self._loaded.let_go()
        self._let_go(exception)
        if handler() is not None:  # another Checkpointer is open
            return
        for number, own in self._handlers.items():  # otherwise Lightning would put back the handlers from before
            if trainer._signal_connector._original_handlers.get(number) == own:
                trainer._signal_connector._original_handlers[number] = signal.SIG_DFL

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _let_go(self, error: BaseException) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(error), error, error.__traceback__)


class _Numbers(Mapping[str, float]):
    """Numbers in tensors, read only if their step is saved: a read waits for all work that a GPU has been given."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @override
    def __getitem__(self, name: str) -> float:
        return float(self._tensors[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)


def _uneven(trainer: Trainer) -> list[ResumableSampler]:
    """Returns the training's samplers whose epochs differ in number of batches: the last batch takes from the next."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    within = [each.loader if isinstance(each, ResumableLoader) else each for each in loaders]
    samplers = [getattr(loader, "batch_sampler", None) for loader in within]
    own = [sampler for sampler in samplers if isinstance(sampler, ResumableSampler)]
    several = [sampler for sampler in own if sampler.global_batch < sampler.length]  # else each epoch has one batch
    return [sampler for sampler in several if not sampler.drop_last and sampler.length % sampler.global_batch]


def _ends(trainer: Trainer) -> bool:
    """Returns whether the training ends with this step, as far as can be told before the end of its epoch."""
    loop = trainer.fit_loop
    stops = trainer.should_stop and getattr(loop, "_can_stop_early", True)  # never before min_epochs and min_steps
    if stops or 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return bool(trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
