"""What is saved of a model on a base that bitsandbytes has quantized, as for QLoRA."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def weights_of(model: Any) -> object:
    """What is saved of a model. Of one that bitsandbytes has quantized, what is trained, and buffers, which a forward
    pass may change: no load could fill the rest in place, which is frozen, and `from_pretrained` makes it. Of
    Accelerate's models, too."""
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return {**trained, **_buffers_of(model)}
    return model


def _buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that its `state_dict()` has, by the names that they have there."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
