"""Lists over the entries of a packed map that the GPU forms of `map_attention` walk; made on the GPU, nobody waits."""

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.compilation import CompileCase

STEP = 256
"""Entries looked at together; a row block of 32K tokens has up to 8,192 (16 heads)."""


@triton.jit
def _list_runs(columns, offsets, firsts, counts, HEADS: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr):
    """Where runs of up to MOST entries of one column block begin, in the room of the row block's entries."""
    entry = tl.program_id(0)
    begin = tl.load(offsets + entry)
    end = tl.load(offsets + entry + 1)
    count = tl.zeros([], tl.int32)
    for left in range(begin, end, STEP):
        at = left + tl.arange(0, STEP)
        column = tl.load(columns + at, mask=at < end, other=0) // HEADS
        before = tl.load(columns + at - 1, mask=(at > begin) & (at < end), other=-HEADS) // HEADS
        new = (column != before) & (at < end)
        # A column block has at most HEADS entries; its run is cut where a multiple of MOST of them stand before.
        for cut in tl.static_range(MOST, HEADS, MOST):
            inside = tl.load(columns + at - cut, mask=(at - cut >= begin) & (at < end), other=-HEADS) // HEADS
            beyond = tl.load(columns + at - cut - 1, mask=(at - cut > begin) & (at < end), other=-HEADS) // HEADS
            new = new | ((inside == column) & (beyond != column) & (at < end))
        new = new.to(tl.int32)
        tl.store(firsts + begin + count + tl.cumsum(new, 0) - new, at, mask=new != 0)
        count += tl.sum(new, 0)
    tl.store(counts + entry, count)


@triton.jit(do_not_specialize=["entries"])
def _list_nonzero(
    columns,
    offsets,
    weights,
    weights_row,
    weights_column,
    lists,
    counts,
    entries,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Entries whose sender head has a weight in a receiver head, row block by row block."""
    entry = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets + entry)
    end = tl.load(offsets + entry + 1)
    lists += head * entries + begin
    count = tl.zeros([], tl.int32)
    for left in range(begin, end, STEP):
        at = left + tl.arange(0, STEP)
        sender = tl.load(columns + at, mask=at < end, other=0) % HEADS
        weight = tl.load(weights + sender * weights_row + head * weights_column, mask=at < end, other=0.0)
        used = (weight != 0.0).to(tl.int32)
        tl.store(lists + count + tl.cumsum(used, 0) - used, at, mask=used != 0)
        count += tl.sum(used, 0)
    tl.store(counts + head * tl.num_programs(0) + entry, count)


def list_runs(packed: PackedMap, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of up to `most` entries of one position (row block, column block) begin.

    Returns:
        int32 [m]: from `offsets[i]` on, the first entry of each run of row block i; int32 [R]: how many runs.
    """
    row_blocks = packed.blocks.numel()
    firsts, counts = torch.empty_like(packed.columns), packed.offsets.new_zeros(row_blocks)
    if packed.columns.numel():
        _list_runs[(row_blocks,)](
            *(packed.columns, packed.offsets, firsts, counts),
            HEADS=packed.heads,
            MOST=most,
            STEP=STEP,
            num_warps=2,
        )
    return firsts, counts


def list_nonzero(packed: PackedMap, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries that each receiver head uses.

    Returns:
        int32 [H_R, m]: from `offsets[i]` on, the entries of row block i with a weight in the head; int32 [H_R, R]: how
        many.
    """
    row_blocks, receivers, entries = packed.blocks.numel(), weights.shape[1], packed.columns.numel()
    lists = packed.columns.new_empty(receivers, entries)
    counts = packed.columns.new_zeros(receivers, row_blocks)
    if entries:
        _list_nonzero[row_blocks, receivers](
            *(packed.columns, packed.offsets, weights, weights.stride(0), weights.stride(1), lists, counts, entries),
            HEADS=packed.heads,
            STEP=STEP,
            num_warps=2,
        )
    return lists, counts


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that are launched, for 40 sender heads."""
    constants = {"HEADS": 40, "STEP": STEP}
    names = ("columns", "offsets", "firsts", "counts", "lists")
    pointers = {**dict.fromkeys(names, "*i32"), "weights": "*fp32"}
    return (
        CompileCase("list of runs", _list_runs, pointers, constants | {"MOST": 16}, num_warps=2),
        CompileCase("list of nonzero weights", _list_nonzero, pointers, constants, num_warps=2),
    )
