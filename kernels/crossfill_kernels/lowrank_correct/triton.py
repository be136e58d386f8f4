"""The low-rank correction on a GPU: gather, rotation, product and scatter in one kernel."""

import torch
import triton
import triton.language as tl

from crossfill_kernels.compilation import CompileCase
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
    tiles_of,
)
from crossfill_kernels.segments import SegmentRows

BLOCK_TOKENS, BLOCK_COLUMNS = 64, 64
BLOCK_RANK = {True: 32, False: 16}
"""Inner dimension of a step, by whether the product is in bfloat16; 32 in float32 spill on sm_90."""


@triton.jit
def _add_anchors(
    corrected,
    a_rows,
    b_columns,
    w_rows,
    present,
    inside,
    anchors,
    rank,
    left_anchor,
    right_anchor,
    right_rank,
    weight_anchor,
    NARROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """`corrected` [BLOCK_T, BLOCK_D] plus Σ_v w_v A_v B_v, from the pointers of its rows and columns."""
    ranks = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    chunks = tl.cdiv(rank, BLOCK_R)
    # One loop over anchors and ranks: only innermost loops are pipelined.
    for step in range(anchors * chunks):
        anchor = (step // chunks).to(tl.int64)
        at = (step % chunks) * BLOCK_R + ranks
        a = tl.load(
            a_rows + anchor * left_anchor + at[None, :],
            mask=present[:, None] & (at < rank)[None, :],
            other=0.0,
        )  # [BLOCK_T, BLOCK_R]
        b = tl.load(
            b_columns + anchor * right_anchor + at[:, None] * right_rank,
            mask=(at < rank)[:, None] & inside[None, :],
            other=0.0,
        )  # [BLOCK_R, BLOCK_D]
        w = tl.load(w_rows + anchor * weight_anchor, mask=present, other=0.0)
        scaled = a.to(tl.float32) * w[:, None]
        if NARROW:
            corrected = tl.dot(scaled.to(tl.bfloat16), b, corrected)
        else:
            corrected = tl.dot(scaled, b.to(tl.float32), corrected, input_precision="tf32x3")
    return corrected


@triton.jit
def _correct(
    source,
    out,
    left,
    right,
    weights,
    cos,
    sin,
    source_slots,
    out_slots,
    source_first,
    out_first,
    length,
    dim,
    anchors,
    rank,
    half,
    turn_stride,
    source_row,
    source_head,
    out_row,
    out_head,
    left_anchor,
    left_token,
    right_anchor,
    right_rank,
    weight_anchor,
    weight_token,
    LAYOUT: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head = tl.program_id(1).to(tl.int64)
    columns, there = tile_columns(tl.program_id(2), dim, half, LAYOUT, BLOCK_D)  # [BLOCK_D]
    present = tokens < length
    inside = present[:, None] & there[None, :]  # [BLOCK_T, BLOCK_D]
    offsets = rows_of(source_slots, source_first, tokens, present) * source_row + head * source_head
    corrected = load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
    corrected = _add_anchors(
        corrected,
        left + tokens.to(tl.int64)[:, None] * left_token,
        right + (head * dim + columns)[None, :],
        weights + tokens.to(tl.int64) * weight_token,
        present,
        there,
        anchors,
        rank,
        left_anchor,
        right_anchor,
        right_rank,
        weight_anchor,
        NARROW,
        BLOCK_R,
    )
    targets = rows_of(out_slots, out_first, tokens, present) * out_row + head * out_head
    store_turned(out, targets, columns, inside, corrected)


def correct_triton(
    source: SegmentRows,
    out: SegmentRows,
    left: torch.Tensor,
    right: torch.Tensor,
    weights: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """See `lowrank_correct`; arguments were checked."""
    source, out = heads_for(source, out, rotation)
    left, right = unit_stride(left), unit_stride(right)
    bf16 = narrow(out.data, left, right)
    grid = (
        triton.cdiv(source.length, BLOCK_TOKENS),
        source.heads,
        tiles_of(source.dim, rotation, BLOCK_COLUMNS),
    )
    _correct[grid](
        source.data,
        out.data,
        left,
        right,
        weights,
        **segment_arguments(source, out, rotation),
        anchors=left.shape[0],
        rank=left.shape[2],
        left_anchor=left.stride(0),
        left_token=left.stride(1),
        right_anchor=right.stride(0),
        right_rank=right.stride(1),
        weight_anchor=weights.stride(0),
        weight_token=weights.stride(1) if weights.dim() == 2 else 0,
        NARROW=bf16,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=BLOCK_COLUMNS,
        BLOCK_R=BLOCK_RANK[bf16],
        num_warps=4,
        num_stages=3,
    )


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dimension has strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def narrow(out: torch.Tensor, *factors: torch.Tensor) -> bool:
    """Whether bfloat16 products are exact enough; the interpreter cannot multiply bfloat16."""
    return out.is_cuda and all(tensor.dtype == torch.bfloat16 for tensor in (out, *factors))


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `correct_triton` chooses."""
    strides = ("left_anchor", "left_token", "right_anchor", "right_rank")
    return tuple(
        CompileCase(
            name=f"{dtype}, {kind}",
            kernel=_correct,
            signature={
                **dict.fromkeys(("source", "out", "left", "right"), f"*{dtype}"),
                "weights": "*fp32",
                **SEGMENT_TYPES,
                **dict.fromkeys(("anchors", "rank", "weight_anchor", "weight_token", *strides), "i32"),
            },
            constants={
                "LAYOUT": layout,
                "NARROW": dtype == "bf16",
                "BLOCK_T": BLOCK_TOKENS,
                "BLOCK_D": BLOCK_COLUMNS,
                "BLOCK_R": BLOCK_RANK[dtype == "bf16"],
            },
            num_stages=3,
            aligned=ALIGNED | {*strides, "rank"},
            tensor_cores=True,
        )
        for dtype in ("bf16", "fp32")
        for kind, layout in (("keys", NEOX), ("values", ALONE))
    )
