"""Small block masses and their mixture in C++: the binding of mix_mass.cpp."""

import ctypes

import torch

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.mix_mass.codes import QuantisedMass, fractions, thresholds
from crossfill_kernels.native import library

_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_quantise = library.Function(
    "crossfill_quantise_mass", *(_POINTER,) * 4, *(_COUNT,) * 3, ctypes.c_double, *(_POINTER,) * 3, _INT
)
_mix = library.Function("crossfill_mix_mass", *(_POINTER,) * 5, *(_COUNT,) * 4, _POINTER, _INT)


def quantise_mass_native(mass: BlockMass, *, keep: float) -> QuantisedMass:
    """As `quantise_mass`, whose check has passed."""
    heads, row_blocks, width = mass.mass.shape
    offsets = torch.zeros(heads * row_blocks + 1, dtype=torch.int32)
    # Room for whole lists; memory that is not touched costs nothing.
    room = heads * row_blocks * width
    columns, codes = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.uint8)
    masses, totals, bounds = mass.mass.contiguous(), mass.totals.contiguous(), thresholds()
    _quantise(
        masses.data_ptr(),
        mass.blocks.data_ptr(),
        totals.data_ptr(),
        bounds.data_ptr(),
        heads,
        row_blocks,
        width,
        keep,
        offsets.data_ptr(),
        columns.data_ptr(),
        codes.data_ptr(),
        library.threads(),
    )
    kept = int(offsets[-1])
    return QuantisedMass(heads, mass.blocks, offsets, columns[:kept].clone(), codes[:kept].clone())


def mix_mass_native(mass: QuantisedMass, weights: torch.Tensor, columns: int) -> BlockMass:
    """As `mix_mass`, whose check has passed."""
    row_blocks, receivers = mass.blocks.numel(), weights.shape[1]
    mixed = torch.empty(receivers, row_blocks, columns)
    weights, stands_for = weights.contiguous(), fractions()
    _mix(
        mass.offsets.data_ptr(),
        mass.columns.data_ptr(),
        mass.codes.data_ptr(),
        stands_for.data_ptr(),
        weights.data_ptr(),
        mass.heads,
        receivers,
        row_blocks,
        columns,
        mixed.data_ptr(),
        library.threads(),
    )
    return BlockMass(mixed, mass.blocks, torch.ones(row_blocks))
