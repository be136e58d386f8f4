"""The ridge correction on a GPU: gather, rotation, both products and scatter in one kernel."""

import triton
import triton.language as tl

from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.lowrank_correct.triton import narrow
from crossfill_kernels.ridge_correct.ridge_map import KERNEL_RANK, RidgeMap
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.rope_rerotate.triton import (
    ALIGNED,
    ALONE,
    NEOX,
    SEGMENT_TYPES,
    heads_for,
    load_turned,
    rows_of,
    segment_arguments,
    store_turned,
    tile_columns,
    tile_count,
)
from crossfill_kernels.segments import SegmentRows

BLOCK_TOKENS = 32
BLOCK_COLUMNS = {True: 64, False: 32}
"""Columns of a tile, by whether the products are in bfloat16; 64 in float32 spill."""


@triton.jit
def _ridge(
    source,
    out,
    down,
    up,
    mean,
    bias,
    cos,
    sin,
    source_slots,
    out_slots,
    source_first,
    out_first,
    length,
    heads,
    dim,
    width,
    rank,
    half,
    turn_stride,
    source_row,
    source_head,
    out_row,
    out_head,
    LAYOUT: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    present = tokens < length
    ranks = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    rows = rows_of(source_slots, source_first, tokens, present) * source_row
    targets = rows_of(out_slots, out_first, tokens, present) * out_row
    tiles = tile_count(dim, half, BLOCK_D)
    operand = tl.bfloat16 if NARROW else tl.float32
    precision: tl.constexpr = "ieee" if NARROW else "tf32x3"
    hidden = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for tile in range(heads * tiles):
        head = (tile // tiles).to(tl.int64)
        columns, there = tile_columns(tile % tiles, dim, half, LAYOUT, BLOCK_D)  # [BLOCK_D]
        inside = present[:, None] & there[None, :]  # [BLOCK_T, BLOCK_D]
        x = load_turned(source, rows + head * source_head, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
        # Centred before it is rounded: a channel's mean may be far larger than what it varies by.
        x -= tl.load(mean + head * dim + columns, mask=there, other=0.0)[None, :]
        within = there[:, None] & (ranks < rank)[None, :]
        p = tl.load(down + (head * dim + columns)[:, None] * rank + ranks[None, :], mask=within, other=0.0)
        hidden = tl.dot(x.to(operand), p.to(operand), hidden, input_precision=precision)
    for tile in range(heads * tiles):
        head = (tile // tiles).to(tl.int64)
        columns, there = tile_columns(tile % tiles, dim, half, LAYOUT, BLOCK_D)
        inside = present[:, None] & there[None, :]
        x = load_turned(source, rows + head * source_head, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
        x += tl.load(bias + head * dim + columns, mask=there, other=0.0)[None, :]
        within = (ranks < rank)[:, None] & there[None, :]
        q = tl.load(up + ranks[:, None] * width + (head * dim + columns)[None, :], mask=within, other=0.0)
        x = tl.dot(hidden.to(operand), q.to(operand), x, input_precision=precision)
        store_turned(out, targets + head * out_head, columns, inside, x)


def ridge_triton(source: SegmentRows, out: SegmentRows, state: RidgeMap, rotation: Rotation | None) -> None:
    """See `ridge_correct`; arguments were checked, and the map fits the kernel."""
    source, out = heads_for(source, out, rotation)
    folded = state.folded
    assert folded.up is not None, "checked by fits_kernel"
    rank, width = folded.up.shape
    block_rank, bf16 = max(16, int(triton.next_power_of_2(rank))), narrow(out.data)
    _ridge[triton.cdiv(source.length, BLOCK_TOKENS),](
        source.data,
        out.data,
        folded.down,
        folded.up,
        state.mean,
        state.bias,
        **segment_arguments(source, out, rotation),
        heads=source.heads,
        width=width,
        rank=rank,
        NARROW=bf16,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=BLOCK_COLUMNS[bf16],
        BLOCK_R=block_rank,
        num_warps=_warps_of(block_rank, bf16=bf16),
        num_stages=2,
    )


def _warps_of(block_rank: int, *, bf16: bool) -> int:
    # With 4, float32 spills at rank 64.
    return 4 if bf16 or block_rank <= 32 else 8


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `ridge_triton` chooses, of usual ranks."""
    return tuple(
        CompileCase(
            name=f"rank {rank}, {dtype}, {kind}",
            kernel=_ridge,
            signature={
                **dict.fromkeys(("source", "out"), f"*{dtype}"),
                **dict.fromkeys(("down", "up", "mean", "bias"), "*fp32"),
                **SEGMENT_TYPES,
                **dict.fromkeys(("heads", "width", "rank"), "i32"),
            },
            constants={
                "LAYOUT": layout,
                "NARROW": dtype == "bf16",
                "BLOCK_T": BLOCK_TOKENS,
                "BLOCK_D": BLOCK_COLUMNS[dtype == "bf16"],
                "BLOCK_R": rank,
            },
            num_warps=_warps_of(rank, bf16=dtype == "bf16"),
            aligned=ALIGNED | {"width", "rank"},
            tensor_cores=True,
        )
        for rank in (32, KERNEL_RANK)
        for dtype in ("bf16", "fp32")
        for kind, layout in (("keys", NEOX), ("values", ALONE))
    )
