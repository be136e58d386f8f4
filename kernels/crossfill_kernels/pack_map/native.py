"""Packing a map in C++: the binding of pack_map.cpp."""

import ctypes

import torch

from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.native import library
from crossfill_kernels.pack_map.layout import lay_out
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

_pack_map = library.Function(
    "crossfill_pack_map",
    ctypes.POINTER(library.Tensor3),
    ctypes.POINTER(library.Cache),
    ctypes.POINTER(library.RowsView),
    ctypes.POINTER(library.IndexView),
    ctypes.POINTER(library.PackedView),
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_float,
    ctypes.c_int32,
)


def pack_map_native(  # noqa: PLR0913  # the arguments of the op
    query: torch.Tensor,
    key_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    storage: MapStorage,
    slot_ids: torch.Tensor,
    lse: torch.Tensor | None,
    renormalise: bool,
) -> PackedMap:
    """As `pack_map`, whose check has passed."""
    layout = lay_out(index, slot_ids.numel())
    packed = PackedMap(index.heads, index.blocks, layout.offsets, layout.columns, slot_ids, storage)
    # The C++ walks the index head by head.
    by_head = torch.empty_like(slot_ids)
    by_head[layout.order] = slot_ids
    denominators = None if renormalise or lse is None else lse.contiguous()
    _pack_map(
        library.tensor3(query),
        library.cache(key_cache, key_cache, slots),
        library.rows_view(rows),
        library.index_view(index),
        library.packed_view(packed),
        by_head.data_ptr(),
        None if denominators is None else denominators.data_ptr(),
        scale,
        library.threads(),
    )
    return packed
