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
    ctypes.c_void_p,
    ctypes.c_int32,
)
_NO_CAP = 2**31 - 1


def select_blocks_native(mass: BlockMass, *, top_p: float, cap: int | None) -> BlockIndex:
    """As `select_blocks`, whose check has passed."""
    heads, row_blocks, width = mass.mass.shape
    most = min(cap or _NO_CAP, _NO_CAP)
    places, room = room_for_lists(mass, most)
    offsets = torch.zeros(heads * row_blocks + 1, dtype=torch.int32)
    columns = torch.empty(room, dtype=torch.int32)
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
        places.data_ptr(),
        offsets.data_ptr(),
        columns.data_ptr(),
        library.threads(),
    )
    # A copy, so that the room that was not needed is given back.
    return BlockIndex(heads, mass.blocks, offsets, columns[: int(offsets[-1])].clone())


def room_for_lists(mass: BlockMass, most: int) -> tuple[torch.Tensor, int]:
    """Where the list of each (head, row block) may stand, int64 [H·R], and the room that all of them need at most.

    Args:
        mass: the masses.
        most: bound on a list's length, besides its causal blocks.
    """
    lengths = (mass.blocks.long() + 1).clamp(max=most).repeat(mass.mass.shape[0])
    ends = lengths.cumsum(0)
    return ends - lengths, int(ends[-1]) if ends.numel() else 0
