"""Ministral 3, whose queries grow with their position."""

from typing import Any

import torch
from sglang.srt.models import ministral3

from engines.mapped_models.attention import MappedAttention, adopt


class Ministral3Attention(MappedAttention, ministral3.Ministral3Attention):  # type: ignore[misc]  # SGLang is untyped
    """SGLang's own `forward` scales queries itself."""

    llama_4_scaling_beta: float | None

    def forward_prepare_native(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as `forward` makes them."""
        queries, keys, values = super().forward_prepare_native(positions, hidden_states)
        return self.shape_queries(queries, positions), keys, values

    def shape_queries(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scale by position, which a rotation does not mind."""
        if self.llama_4_scaling_beta is None:
            return queries
        scale = ministral3._get_llama_4_attn_scale(positions, self.llama_4_scaling_beta, self.max_position_embeddings)
        scaled: torch.Tensor = queries * scale.to(queries.dtype)
        return scaled


class Ministral3ForCausalLM(ministral3.Ministral3ForCausalLM):  # type: ignore[misc]
    """SGLang's, with this attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self, ministral3.Ministral3Attention, Ministral3Attention)


EntryClass = Ministral3ForCausalLM
