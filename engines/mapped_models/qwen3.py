"""Qwen3, whose queries and keys are normed head by head."""

from typing import Any

import torch
from sglang.srt.models import qwen3

from engines.mapped_models.attention import MappedAttention, adopt


class Qwen3Attention(MappedAttention, qwen3.Qwen3Attention):  # type: ignore[misc]  # SGLang is untyped
    """Norms before the rotation."""

    def shape_queries(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Norm each head."""
        return _normed(self.q_norm, queries, self.head_dim)

    def shape_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Norm each head."""
        return _normed(self.k_norm, keys, self.head_dim)


def _normed(norm: Any, projected: torch.Tensor, dim: int) -> torch.Tensor:
    normed: torch.Tensor = norm(projected.reshape(-1, dim))
    return normed.view(projected.shape)


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):  # type: ignore[misc]
    """SGLang's, with this attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self, qwen3.Qwen3Attention, Qwen3Attention)


EntryClass = Qwen3ForCausalLM
