"""Block masses in C++."""

import ctypes

import torch

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.native import library
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots

_INPUTS = (
    ctypes.POINTER(library.Tensor3),
    ctypes.POINTER(library.Cache),
    ctypes.POINTER(library.RowsView),
    ctypes.c_int32,
    ctypes.c_float,
)
_block_mass = library.Function(
    "crossfill_block_mass",
    *_INPUTS,
    ctypes.POINTER(library.Tensor3),
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
)
_block_mass_sampled = library.Function(
    "crossfill_block_mass_sampled", *_INPUTS, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
)


def block_mass_native(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> BlockMass:
    """`block_mass`; arguments as there, already checked."""
    mass = torch.zeros(query.shape[1], rows.block_count, rows.last // BLOCK + 1)
    _block_mass(
        library.tensor3(query),
        library.cache(key_cache, value_cache, slots),
        library.rows_view(rows),
        query.shape[1],
        scale,
        library.tensor3(out),
        None if lse is None else lse.data_ptr(),
        mass.data_ptr(),
        mass.shape[2],
        library.threads(),
    )
    return BlockMass(mass, rows.blocks, rows.starts.diff().float())


def block_mass_sampled_native(
    query: torch.Tensor, key_cache: torch.Tensor, slots: Slots, rows: Rows, *, scale: float, stride: int
) -> BlockMass:
    """`block_mass_sampled`; arguments as there, already checked."""
    mass = torch.zeros(query.shape[1], rows.block_count, rows.last // BLOCK + 1)
    _block_mass_sampled(
        library.tensor3(query),
        # The values are never read.
        library.cache(key_cache, key_cache, slots),
        library.rows_view(rows),
        query.shape[1],
        scale,
        stride,
        mass.data_ptr(),
        mass.shape[2],
        library.threads(),
    )
    return BlockMass(mass, rows.blocks, ((rows.starts.diff() - 1) // stride + 1).float())
