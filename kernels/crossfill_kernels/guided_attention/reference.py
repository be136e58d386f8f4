"""The maths of guided attention, in plain torch."""

import torch

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.paged_attention.reference import causal_scores
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots


def guided_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal softmax attention in which head h of a row in block b sees only the keys of its kept blocks K[h, b].

        O[i, h] = Σ_{t ≤ p_i, t // 64 ∈ K[h, p_i // 64]} softmax_t(scale · q[i, h] · k[t, h // G]) v[t, h // G]

    Args:
        query: [n, H, d].
        key_cache, value_cache: [rows, H_kv, d].
        slots: cache rows of positions 0 … T-1.
        rows: positions of the query rows.
        index: kept column blocks.
        scale: factor on the scores.

    Returns:
        [n, H, d] in the dtype of `query`, computed in float64; zero where a row sees no kept key.
    """
    scores = causal_scores(query, key_cache, slots, rows, scale=scale)  # [H, n, T]
    scores = scores.masked_fill(~kept_keys(index, rows, scores.shape[2]), float("-inf"))
    sees_none = scores.isneginf().all(dim=-1, keepdim=True)
    probabilities = scores.softmax(dim=-1).masked_fill(sees_none, 0.0)
    group = query.shape[1] // key_cache.shape[1]
    values = value_cache[slots].double().repeat_interleave(group, dim=1)
    return torch.einsum("hnt,thd->nhd", probabilities, values).to(query.dtype)


def kept_keys(index: BlockIndex, rows: Rows, context: int) -> torch.Tensor:
    """Booleans [H, n, T]: whether a row's block keeps the block that a key stands in; causality is not looked at."""
    mask = index.mask((context + BLOCK - 1) // BLOCK)  # [H, R, C]
    of_row = torch.repeat_interleave(torch.arange(rows.block_count, device=mask.device), rows.starts.diff().long())
    return mask[:, of_row].repeat_interleave(BLOCK, dim=2)[:, :, :context]
