"""Choice of blocks in C++: the binding of select_blocks.cpp."""

import ctypes

import torch

from crossfill_kernels.blocks import BlockIndex, BlockMass
from crossfill_kernels.native import library

_select_blocks = library.Function(
    "crossfill_select_blocks",
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_double,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
)
_NO_CAP = 2**31 - 1


def select_blocks_native(mass: BlockMass, *, top_p: float, cap: int | None) -> BlockIndex:
    """As `select_blocks`, whose check has passed."""
    heads, row_blocks, width = mass.mass.shape
    most = min(cap or _NO_CAP, _NO_CAP)
    offsets = torch.zeros(heads * row_blocks + 1, dtype=torch.int32)
    # Room for whole lists; memory that is not touched costs nothing.
    columns = torch.empty(heads * row_blocks * min(width, most), dtype=torch.int32)
    masses, totals = mass.mass.contiguous(), mass.totals.contiguous()
    _select_blocks(
        masses.data_ptr(),
        mass.blocks.data_ptr(),
        totals.data_ptr(),
        heads,
        row_blocks,
        width,
        top_p,
        most,
        offsets.data_ptr(),
        columns.data_ptr(),
        library.threads(),
    )
    # A copy, so that the room that was not needed is given back.
    return BlockIndex(heads, mass.blocks, offsets, columns[: int(offsets[-1])].clone())
