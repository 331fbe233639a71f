"""What nanogpt_before.py and nanogpt_after.py train: a model and batches as nanoGPT has them, only smaller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocabulary: int = 65
    width: int = 32
    context: int = 16
    dropout: float = 0.1


class GPT(nn.Module):
    """One layer of attention; the embedding and the head are one tensor."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.drop = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(config: Config) -> torch.Tensor:
    """Random, as nanoGPT's are: from the global generator."""
    first = torch.randint(config.vocabulary, (8, 1))
    return (first + torch.arange(config.context)) % config.vocabulary
