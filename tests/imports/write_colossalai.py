"""Wrote `written/colossalai-0.5.0`, with ColossalAI's own GeneralCheckpointIO: `python write_colossalai.py OUT`.

What ColossalAI imports and a CPU does not have, such as triton's kernels, is stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch
from write_sources import trained

LACKING = (
    "peft",
    "triton",
    "apex",
    "flash_attn",
    "bitsandbytes",
    "galore_torch",
    "fabric",
    "ray",
    "contexttimer",
    "rpyc",
)


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] in LACKING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: object) -> ModuleType:
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__ = [], spec
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


def main(out: Path) -> None:
    sys.meta_path.append(Missing())
    from colossalai.checkpoint_io import GeneralCheckpointIO

    model, optimizer = trained()
    io = GeneralCheckpointIO()
    io.save_model(model, str(out / "modeling"), shard=True, size_per_shard=1e-4)
    io.save_optimizer(optimizer, str(out / "optimizer"), shard=True, size_per_shard=1e-4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}.truth.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
