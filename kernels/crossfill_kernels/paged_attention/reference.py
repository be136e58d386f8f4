"""The maths of paged attention, in plain torch."""

import torch

from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots, length_of


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal softmax attention: the row at position p sees keys 0 … p.

        O[i, h] = Σ_{t ≤ p_i} softmax_t(scale · q[i, h] · k[t, h // G]) v[t, h // G],  G = H / H_kv

    Args:
        query: [n, H, d].
        key_cache, value_cache: [rows, H_kv, d], shared by all requests.
        slots: cache rows of positions 0 … T-1.
        rows: positions of the query rows.
        scale: factor on the scores, usually 1/√d.

    Returns:
        [n, H, d] in the dtype of `query`, computed in float64.
    """
    probabilities = causal_scores(query, key_cache, slots, rows, scale=scale).softmax(dim=-1)
    group = query.shape[1] // key_cache.shape[1]
    values = value_cache[slots].double().repeat_interleave(group, dim=1)
    return torch.einsum("hnt,thd->nhd", probabilities, values).to(query.dtype)


def causal_scores(
    query: torch.Tensor, key_cache: torch.Tensor, slots: Slots, rows: Rows, *, scale: float
) -> torch.Tensor:
    """Scaled scores in float64 [H, n, T], minus infinity where a key stands behind its row; arguments as above."""
    group = query.shape[1] // key_cache.shape[1]
    keys = key_cache[slots].double().repeat_interleave(group, dim=1)  # [T, H, d]
    scores = torch.einsum("nhd,thd->hnt", query.double(), keys) * scale
    hidden = torch.arange(length_of(slots), device=query.device)[None, :] > rows.positions[:, None]  # [n, T]
    return scores.masked_fill(hidden, float("-inf"))
