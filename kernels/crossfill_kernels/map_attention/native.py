"""Attention by mixed maps in C++: the binding of map_attention.cpp."""

import ctypes

import torch

from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.map_attention.arguments import Form, packed_rows
from crossfill_kernels.map_attention.cost import choose_form, count_work
from crossfill_kernels.native import library
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

_CODES: dict[Form, int] = {"paper": 1, "mix": 2, "values_first": 3, "sparse": 4}
_map_attention = library.Function(
    "crossfill_map_attention",
    ctypes.POINTER(library.PackedView),
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(library.Cache),
    ctypes.POINTER(library.RowsView),
    ctypes.POINTER(library.Tensor3),
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
)


def map_attention_native(
    packed: PackedMap,
    weights: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    out: torch.Tensor,
    form: Form,
) -> None:
    """As `map_attention`, whose check has passed."""
    where = packed_rows(packed, rows)
    if form == "auto":
        form = choose_form(count_work(packed, where, weights, value_cache.shape[1], value_cache.shape[2]))
    weights = weights.contiguous()
    _map_attention(
        library.packed_view(packed),
        where.data_ptr(),
        weights.data_ptr(),
        library.cache(value_cache, value_cache, slots),
        library.rows_view(rows),
        library.tensor3(out),
        weights.shape[1],
        _CODES[form],
        library.threads(),
    )
