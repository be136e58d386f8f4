"""Checks that the attention ops share; each raises an `ArgumentError` that names the argument at fault."""

import torch

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots, is_run, length_of

FLOATS = (torch.float32, torch.bfloat16)
"""What queries and caches are in."""


def check_query(query: torch.Tensor, rows: Rows) -> None:
    """`query` is float32 or bfloat16 [n, H, d], with the n rows of `rows`."""
    if query.dim() != 3 or query.dtype not in FLOATS or 0 in query.shape[1:]:
        raise ArgumentError("query", f"want float32 or bfloat16 [n, H, d], got {query.dtype} {list(query.shape)}")
    if query.stride(2) != 1:
        raise ArgumentError("query", f"want unit stride in the last dimension, got strides {query.stride()}")
    if rows.count != query.shape[0]:
        raise ArgumentError("rows", f"{rows.count} positions for {query.shape[0]} rows of query")
    if rows.positions.device != query.device:
        raise ArgumentError("rows", f"on {rows.positions.device}, query on {query.device}")


def check_cache(name: str, cache: torch.Tensor, query: torch.Tensor) -> None:
    """`cache` is [rows, H_kv, d] of the dtype, device and d of `query`, and H is a multiple of H_kv."""
    _, heads, dim = query.shape
    if cache.dim() != 3 or cache.shape[2] != dim or cache.shape[1] == 0:
        raise ArgumentError(name, f"want [rows, H_kv, {dim}], got {list(cache.shape)}")
    if heads % cache.shape[1]:
        raise ArgumentError("query", f"{heads} heads are no multiple of the {cache.shape[1]} of {name}")
    _check_like(name, cache, query)


def check_values(value_cache: torch.Tensor, key_cache: torch.Tensor) -> None:
    """Both caches have one shape, dtype and device."""
    if value_cache.shape != key_cache.shape:
        raise ArgumentError(
            "value_cache", f"want the shape of key_cache {list(key_cache.shape)}, got {list(value_cache.shape)}"
        )
    _check_like("value_cache", value_cache, key_cache)


def check_out(out: torch.Tensor, query: torch.Tensor) -> None:
    """`out` is like `query`."""
    if out.shape != query.shape:
        raise ArgumentError("out", f"want {list(query.shape)}, got {list(out.shape)}")
    if 0 in out.stride() and out.numel():
        raise ArgumentError("out", f"want an element for each number, got strides {out.stride()}")
    _check_like("out", out, query)


def check_slots(slots: Slots, cache_rows: int, rows: Rows) -> None:
    """`slots` name rows of the cache, and every query row stands within the context."""
    if isinstance(slots, slice) and not is_run(slots):
        raise ArgumentError("slots", f"want a slice from a first to a last row, got {slots}")
    length = length_of(slots)
    if rows.last >= length:
        raise ArgumentError("slots", f"{length} positions, and a query row at position {rows.last}")
    if isinstance(slots, slice):
        if not 0 <= slots.start <= slots.stop <= cache_rows:
            raise ArgumentError("slots", f"{slots.start} … {slots.stop} leaves the {cache_rows} rows of the cache")
        return
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ArgumentError("slots", f"want contiguous int64 [T], got {slots.dtype} {list(slots.shape)}")
    if slots.device != rows.positions.device:
        raise ArgumentError("slots", f"on {slots.device}, rows on {rows.positions.device}")
    # A GPU would have to be waited for.
    if slots.device.type == "cpu" and length:
        low, high = (int(bound) for bound in slots.aminmax())
        if low < 0 or high >= cache_rows:
            raise ArgumentError("slots", f"{low} … {high} leaves the {cache_rows} rows of the cache")


def check_scale(scale: float) -> None:
    """`scale` is a finite float32."""
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ArgumentError("scale", f"want a finite number, got {scale}")


def check_index(index: BlockIndex, rows: Rows, query: torch.Tensor) -> None:
    """`index` holds lists for the heads of `query` and the row blocks of `rows`."""
    if index.heads != query.shape[1]:
        raise ArgumentError("index", f"{index.heads} heads, query has {query.shape[1]}")
    if index.blocks.device != query.device:
        raise ArgumentError("index", f"on {index.blocks.device}, query on {query.device}")
    if index.blocks.numel() != rows.block_count:
        raise ArgumentError("index", f"{index.blocks.numel()} row blocks, rows fall into {rows.block_count}")
    if query.device.type != "cpu":
        return
    if not torch.equal(index.blocks, rows.blocks):
        raise ArgumentError("index", "its row blocks are not those of rows")
    index.check_content()


def check_weights(weights: torch.Tensor, senders: int, device: torch.device) -> None:
    """`weights` is float32 [senders, H_R] on `device`, finite and nowhere negative; H_R is at least 1."""
    if weights.dim() != 2 or weights.dtype != torch.float32 or weights.shape[0] != senders or 0 in weights.shape:
        raise ArgumentError("weights", f"want float32 [{senders}, H_R], got {weights.dtype} {list(weights.shape)}")
    if weights.device != device:
        raise ArgumentError("weights", f"on {weights.device}, the map on {device}")
    # A GPU would have to be waited for.
    if device.type == "cpu":
        least, greatest = (float(bound) for bound in weights.aminmax())
        # Not `least < 0 or …`: with a NaN among the weights both bounds are NaN.
        if least >= 0 and greatest < float("inf"):
            return
        raise ArgumentError("weights", "want finite weights that are not negative")


def check_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Everything that an attention op with outputs is given."""
    check_query(query, rows)
    check_cache("key_cache", key_cache, query)
    check_values(value_cache, key_cache)
    check_out(out, query)
    check_slots(slots, key_cache.shape[0], rows)
    check_scale(scale)


def _check_like(name: str, tensor: torch.Tensor, model: torch.Tensor) -> None:
    if tensor.dtype != model.dtype:
        raise ArgumentError(name, f"want {model.dtype} as its partner, got {tensor.dtype}")
    if tensor.device != model.device:
        raise ArgumentError(name, f"on {tensor.device}, its partner on {model.device}")
    if tensor.stride(2) != 1:
        raise ArgumentError(name, f"want unit stride in the last dimension, got strides {tensor.stride()}")
