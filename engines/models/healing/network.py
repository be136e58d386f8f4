"""Attention and cache of transformers models as a CPU runs them fastest in training and in sampling.

Plain matrix products in blocks of rows: on AVX-512 with bfloat16 torch's fused attention takes twice as long at 512
tokens, nearly all of it in the backward pass, and its cache is copied whole for every new token.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_NAME = "crossfill_rows"
_ROWS = 256


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention: [batch, heads, rows, dim] over [batch, kv heads, context, dim], the last rows of the context.

    Query heads that share a kv head are rows of one product, so nothing is repeated. At most 256 rows at a time, over
    the part of the context that they see.
    """
    import torch

    batch, heads, rows, dim = query.shape
    groups, context = key.shape[1], key.shape[2]
    past = context - rows
    outputs = []
    for begin in range(0, rows, _ROWS):
        end = min(begin + _ROWS, rows)
        seen = past + end
        piece = (query[:, :, begin:end] * scale).reshape(batch, groups, -1, dim)
        scores = torch.matmul(piece, key[:, :, :seen].transpose(2, 3))
        if end - begin > 1:
            hidden = torch.full((end - begin, seen), float("-inf"), dtype=query.dtype).triu(past + begin + 1)
            scores = scores.view(batch, groups, heads // groups, end - begin, seen) + hidden
        weights = scores.softmax(-1).view(batch, groups, -1, seen)
        outputs.append(torch.matmul(weights, value[:, :, :seen]).view(batch, heads, end - begin, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


@contextmanager
def training_attention(model: Any) -> Iterator[None]:
    """`model` (transformers) with `attend` instead of its own attention; put back on leaving."""
    import transformers

    def forward(
        _layer: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        return attend(query, key, value, scaling).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(_NAME, forward)
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def growing_cache(length: int) -> Any:
    """A transformers KV cache for at most `length` tokens that is allocated once and never copied."""
    import torch
    import transformers
    from transformers.cache_utils import DynamicLayer

    class Layer(DynamicLayer):  # type: ignore[misc]
        is_initialized: bool

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                shape = (*key_states.shape[:2], length, key_states.shape[3])
                self.buffers = torch.empty(shape, dtype=key_states.dtype), torch.empty(shape, dtype=key_states.dtype)
                self.dtype, self.device = key_states.dtype, key_states.device
                self.used, self.is_initialized = 0, True
            begin, self.used = self.used, self.used + key_states.shape[2]
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[:, :, begin : self.used] = states
            self.keys, self.values = (buffer[:, :, : self.used] for buffer in self.buffers)
            return self.keys, self.values

    cache = transformers.DynamicCache()
    cache.layer_class_to_replicate = Layer
    return cache
