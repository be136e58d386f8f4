"""Paged attention in C++."""

import ctypes

import torch

from crossfill_kernels.native import library
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

_paged_attention = library.Function(
    "crossfill_paged_attention",
    ctypes.POINTER(library.Tensor3),
    ctypes.POINTER(library.Cache),
    ctypes.POINTER(library.RowsView),
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.POINTER(library.Tensor3),
    ctypes.c_int32,
)


def paged_attention_native(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`paged_attention`; arguments as there, already checked."""
    _paged_attention(
        library.tensor3(query),
        library.cache(key_cache, value_cache, slots),
        library.rows_view(rows),
        query.shape[1],
        scale,
        library.tensor3(out),
        library.threads(),
    )
