"""Selects what to save of a model on a base that bitsandbytes has quantized, as for QLoRA."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def weights_of(model: Any) -> object:
    """Returns what to save of a model. If bitsandbytes has quantized it, these are the trained parameters, and buffers,
    which a forward pass may change: no load could fill the frozen rest in place, and `from_pretrained` makes it. Also
    for Accelerate's models."""
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return {**trained, **_buffers_of(model)}
    return model


def _buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers in its `state_dict()`, by their names there."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
