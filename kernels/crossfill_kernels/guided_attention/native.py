"""Guided attention in C++."""

import ctypes

import torch

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.native import library
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

_guided_attention = library.Function(
    "crossfill_guided_attention",
    ctypes.POINTER(library.Tensor3),
    ctypes.POINTER(library.Cache),
    ctypes.POINTER(library.RowsView),
    ctypes.POINTER(library.IndexView),
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.POINTER(library.Tensor3),
    ctypes.c_int32,
)


def guided_attention_native(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`guided_attention`; arguments as there, already checked."""
    _guided_attention(
        library.tensor3(query),
        library.cache(key_cache, value_cache, slots),
        library.rows_view(rows),
        library.index_view(index),
        query.shape[1],
        scale,
        library.tensor3(out),
        library.threads(),
    )
