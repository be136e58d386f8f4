"""Paged attention on a CPU, on torch's flash attention."""

import torch

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.paged_attention.slots import Slots, length_of

# torch's public scaled_dot_product_attention hides the row log-sum-exp that the merge below needs, and takes 1.1 to 1.4
# times as long with a mask as these maskless calls (512 rows over 2,048 keys … 2,048 over 8,192; 9/3 heads, d 64, one
# thread; `make bench`).
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of a request's newest rows over its cache; see `paged_attention_reference` for the maths.

    The cached prefix is attended without a mask and the new rows causally among themselves; the two results are merged
    by their log-sum-exp. The cost is that of the new rows only: n·T, never T².

    Args:
        query: [n, H, d], the newest n rows of the request, in order; n may be 0.
        key_cache, value_cache: [rows, H_kv, d] of the same dtype as `query`; H is a multiple of H_kv.
        slots: cache rows of positions 0 … T-1 (see `as_slots`), T ≥ n; the new rows' keys and values are already there.
        scale: factor on the scores, usually 1/√d.
        out: [n, H, d], written.

    Raises:
        ArgumentError: a shape or dtype does not fit.
    """
    rows = query.shape[0]
    context = length_of(slots)
    _check(query, key_cache, value_cache, out, context)
    if rows == 0:
        return
    q = query.transpose(0, 1).unsqueeze(0)  # [1, H, n, d]
    k = key_cache[slots].transpose(0, 1).unsqueeze(0)  # [1, H_kv, T, d]
    v = value_cache[slots].transpose(0, 1).unsqueeze(0)
    prefix = context - rows
    if rows == 1:
        result, _ = _flash(q, k, v, 0.0, False, scale=scale)
    else:
        result, own_lse = _flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=scale)
        if prefix:
            before, before_lse = _flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=scale)
            share = torch.sigmoid(before_lse - own_lse).unsqueeze(-1).to(result.dtype)
            result = torch.lerp(result, before, share)
    out.copy_(result[0].transpose(0, 1))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, context: int) -> None:
    if q.dim() != 3:
        raise ArgumentError("query", f"want [n, H, d], got {list(q.shape)}")
    if k.dim() != 3 or k.shape[2] != q.shape[2]:
        raise ArgumentError("key_cache", f"want [rows, H_kv, {q.shape[2]}], got {list(k.shape)}")
    if v.shape != k.shape:
        raise ArgumentError("value_cache", f"want the shape of key_cache {list(k.shape)}, got {list(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ArgumentError("query", f"{q.shape[1]} heads are no multiple of {k.shape[1]} KV heads")
    for name, tensor in (("key_cache", k), ("value_cache", v), ("out", out)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(name, f"want the dtype of query {q.dtype}, got {tensor.dtype}")
    if out.shape != q.shape:
        raise ArgumentError("out", f"want {list(q.shape)}, got {list(out.shape)}")
    if context < q.shape[0]:
        raise ArgumentError("slots", f"{context} positions for {q.shape[0]} new rows")
