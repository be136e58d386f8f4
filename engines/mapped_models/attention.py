"""What the attention of the models here has in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn import functional

from engines.attention import mapped as maps

if TYPE_CHECKING:
    from engines.attention.mapped import Projection


class MappedAttention(torch.nn.Module):
    """Of SGLang's attention modules: first of their bases, so that `super().forward` is theirs.

    Needs what Llama's and its relatives' have: `qkv_proj`, `o_proj`, `rotary_emb`, `attn`, `q_size`, `kv_size`,
    `head_dim` and `forward_prepare_native`, which gives queries, keys and values.
    """

    attn: Any
    o_proj: Any
    head_dim: int

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """See SGLang's; rows that maps give have no queries."""
        forward = maps.current()
        rows = forward.rows(self.attn.layer_id) if forward is not None else []
        if forward is None or not rows:
            whole: torch.Tensor = super().forward(
                positions=positions, hidden_states=hidden_states, forward_batch=forward_batch
            )
            return whole
        projection = Projected(self, positions, hidden_states)
        attended = forward.attend(self.attn, rows, projection, forward_batch.out_cache_loc)
        output: torch.Tensor = self.o_proj(attended)[0]
        return output

    def shape_queries(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What lies between projecting queries [n, H·d] and rotating them; for models that do something."""
        return queries

    def shape_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """What lies between projecting keys [n, H_kv·d] and rotating them; for models that do something."""
        return keys


class Projected:
    """Projections of one layer's hidden states (`engines.attention.mapped.Projection`).

    Args:
        attention: of the layer.
        positions: int64 [n].
        hidden: [n, D].
    """

    def __init__(self, attention: Any, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        self._attention = attention
        self._positions = positions
        self._hidden = hidden

    def whole(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Projection.whole`."""
        found = self._attention.forward_prepare_native(self._positions[rows], self._hidden[rows])
        queries, keys, values = map(self._by_head, found)
        return queries, keys, values

    def queries(self, rows: slice) -> torch.Tensor:
        """See `Projection.queries`."""
        attention, positions = self._attention, self._positions[rows]
        projected = attention.shape_queries(self._project(rows, 0, attention.q_size), positions)
        return self._by_head(attention.rotary_emb(positions, projected, projected[:, : attention.head_dim].clone())[0])

    def keys(self, rows: slice) -> torch.Tensor:
        """See `Projection.keys`."""
        attention = self._attention
        projected = attention.shape_keys(self._project(rows, attention.q_size, attention.kv_size))
        # SGLang rotates both at once, of queries here a single head.
        one = projected[:, : attention.head_dim].clone()
        return self._by_head(attention.rotary_emb(self._positions[rows], one, projected)[1])

    def values(self, rows: slice) -> torch.Tensor:
        """See `Projection.values`."""
        attention = self._attention
        return self._by_head(self._project(rows, attention.q_size + attention.kv_size, attention.kv_size))

    def _project(self, rows: slice, start: int, size: int) -> torch.Tensor:
        linear, own = self._attention.qkv_proj, slice(start, start + size)
        bias = None if linear.bias is None else linear.bias[own]
        return functional.linear(self._hidden[rows], linear.weight[own], bias)

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.reshape(projected.shape[0], -1, self._attention.head_dim)


if TYPE_CHECKING:
    _: type[Projection] = Projected


def adopt(model: Any, theirs: type[Any], ours: type[MappedAttention]) -> None:
    """Make all attention of class `theirs` in a model `ours`, a subclass; quantised projections cannot be cut in two.

    SGLang's decoder layers name their attention's class, so it is changed once they are made.
    """
    for module in model.modules():
        if type(module) is theirs and isinstance(module.qkv_proj.quant_method, UnquantizedLinearMethod):
            module.__class__ = ours


def skips_queries(model: torch.nn.Module) -> bool:
    """Whether all attention of a model computes no queries of rows that maps give."""
    from sglang.srt.layers.radix_attention import RadixAttention

    attention = [module for module in model.modules() if isinstance(module, RadixAttention)]
    ours = [module for module in model.modules() if isinstance(module, MappedAttention)]
    return bool(ours) and len(ours) == len(attention)
