"""Choice of the column blocks that sparse attention keeps (MapFlow, Algorithm 1; first block and diagonal forced).

`select_blocks_reference` documents the maths; every other implementation returns exactly the same index.
"""

import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, BlockMass
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.select_blocks.native import select_blocks_native
from crossfill_kernels.select_blocks.reference import select_blocks_reference

__all__ = ["select_blocks", "select_blocks_reference"]


def select_blocks(mass: BlockMass, *, top_p: float, cap: int | None = None) -> BlockIndex:
    """The smallest sets of column blocks that reach a share of the mass; see `select_blocks_reference`.

    Args:
        mass: the masses [H, R, C]; C reaches every row block's diagonal.
        top_p: share of `mass.totals` to reach, in (0, 1]; 1 keeps every causal block.
        cap: most column blocks that a list may have, 2 or more; None for no bound.

    Returns:
        The index, on the device of the masses.

    Raises:
        ArgumentError: `top_p` or `cap` is out of range, or the masses end before a diagonal.
    """
    if not 0 < top_p <= 1:
        raise ArgumentError("top_p", f"want a share in (0, 1], got {top_p}")
    if cap is not None and cap < 2:
        raise ArgumentError("cap", f"want room for the first block and the diagonal (2), got {cap}")
    check_columns(mass)
    chosen = dispatch.choose("select_blocks", mass.mass)
    if chosen == "triton":
        from crossfill_kernels.select_blocks.triton import select_blocks_triton

        index: BlockIndex = select_blocks_triton(mass, top_p=top_p, cap=cap)
        return index
    if chosen == "native":
        return select_blocks_native(mass, top_p=top_p, cap=cap)
    return select_blocks_reference(mass, top_p=top_p, cap=cap)


def check_columns(mass: BlockMass) -> None:
    """Raise an ArgumentError unless the masses are on one device and, on a CPU, reach the diagonals and are masses."""
    for name, tensor in (("blocks", mass.blocks), ("totals", mass.totals)):
        if tensor.device != mass.mass.device:
            raise ArgumentError(name, f"want it on {mass.mass.device}, got {tensor.device}")
    if mass.mass.is_cuda or mass.blocks.numel() == 0:
        return
    if int(mass.blocks[0]) < 0 or bool((mass.blocks.diff() <= 0).any()):
        raise ArgumentError("blocks", "want ascending row blocks from 0 on")
    last = int(mass.blocks[-1])
    if last >= mass.mass.shape[2]:
        raise ArgumentError("mass", f"row block {last} has no diagonal in {mass.mass.shape[2]} column blocks")
    if mass.mass.numel():
        least, greatest = torch.aminmax(mass.mass)
        if not (float(least) >= 0 and float(greatest) < float("inf")):
            raise ArgumentError("mass", "want finite masses that are not negative")
