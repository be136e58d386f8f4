"""The maths of paged attention, in plain torch."""

import torch

from crossfill_kernels.paged_attention.slots import Slots, length_of


def paged_attention_reference(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: Slots, *, scale: float
) -> torch.Tensor:
    """Softmax attention with a causal mask that counts from the end of the context.

    Row i of n stands at position p = T - n + i and sees keys 0 … p:

        O[i, h] = Σ_{t ≤ p} softmax_t(scale · q[i, h] · k[t, h // G]) v[t, h // G],  G = H / H_kv

    Args:
        query: [n, H, d], the newest n rows of the request, in order.
        key_cache, value_cache: [rows, H_kv, d], shared by all requests.
        slots: cache rows of positions 0 … T-1, the newest n included.
        scale: factor on the scores, usually 1/√d.

    Returns:
        [n, H, d] in the dtype of `query`, computed in float64.
    """
    rows, heads = query.shape[0], query.shape[1]
    group = heads // key_cache.shape[1]
    keys = key_cache[slots].double().repeat_interleave(group, dim=1)  # [T, H, d]
    values = value_cache[slots].double().repeat_interleave(group, dim=1)
    length = length_of(slots)
    scores = torch.einsum("nhd,thd->hnt", query.double(), keys) * scale
    position = torch.arange(length - rows, length)
    hidden = torch.arange(length)[None, :] > position[:, None]  # [n, T]
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnt,thd->nhd", probabilities, values).to(query.dtype)
