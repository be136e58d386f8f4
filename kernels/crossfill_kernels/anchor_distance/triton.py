"""Distances to anchors on a GPU: the residual lives in registers only."""

import torch
import triton
import triton.language as tl

from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.lowrank_correct.triton import narrow, unit_stride
from crossfill_kernels.rope_rerotate.triton import place_arguments, rows_of
from crossfill_kernels.segments import SegmentRows

BLOCK_TOKENS, BLOCK_COLUMNS = 64, 64
BLOCK_RANK = {True: 32, False: 16}
"""Ranks of a step, by whether the product is in bfloat16; 32 in float32 spill on sm_80."""


@triton.jit
def _squares(
    source,
    left,
    right,
    squares,
    source_slots,
    source_first,
    length,
    dim,
    rank,
    source_row,
    left_anchor,
    left_token,
    right_anchor,
    right_rank,
    NARROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    anchor = tl.program_id(1).to(tl.int64)
    present = tokens < length
    offsets = rows_of(source_slots, source_first, tokens, present) * source_row
    ranks = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    a_rows = left + anchor * left_anchor + tokens.to(tl.int64) * left_token
    total = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)  # [BLOCK_D]
        inside = present[:, None] & (columns < dim)[None, :]
        c = tl.load(source + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
        product = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
        for first in range(0, rank, BLOCK_R):
            at = first + ranks
            a = tl.load(
                a_rows[:, None] + at[None, :], mask=present[:, None] & (at < rank)[None, :], other=0.0
            )  # [BLOCK_T, BLOCK_R]
            b = tl.load(
                right + anchor * right_anchor + at[:, None] * right_rank + columns[None, :],
                mask=(at < rank)[:, None] & (columns < dim)[None, :],
                other=0.0,
            )  # [BLOCK_R, BLOCK_D]
            if NARROW:
                product = tl.dot(a, b, product)
            else:
                product = tl.dot(a.to(tl.float32), b.to(tl.float32), product, input_precision="tf32x3")
        residual = c.to(tl.float32) - product
        total += tl.sum(residual * residual, axis=1)
    tl.store(squares + anchor * length + tokens, total, mask=present)


def token_squares_triton(segment: SegmentRows, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """‖C[t] - A_v[t] B_v‖², float32 [N, T]; arguments were checked."""
    merged = segment.merged()
    if merged is None:
        rows = segment.read().flatten(1).contiguous()
        merged = SegmentRows(rows.unsqueeze(1), slice(0, segment.length))
    left, right = unit_stride(left), unit_stride(right)
    squares = torch.empty(left.shape[:2], dtype=torch.float32, device=left.device)
    # Products of bfloat16 are exact in float32, so that only the sums' own rounding is left.
    exact = narrow(left, right)
    place = place_arguments("source", merged)
    del place["source_head"]
    _squares[triton.cdiv(merged.length, BLOCK_TOKENS), left.shape[0]](
        merged.data,
        left,
        right,
        squares,
        **place,
        length=merged.length,
        dim=merged.dim,
        rank=left.shape[2],
        left_anchor=left.stride(0),
        left_token=left.stride(1),
        right_anchor=right.stride(0),
        right_rank=right.stride(1),
        NARROW=exact,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=BLOCK_COLUMNS,
        BLOCK_R=BLOCK_RANK[exact],
        num_warps=4,
        num_stages=3,
    )
    return squares


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `token_squares_triton` chooses."""
    integers = ("length", "dim", "rank", "source_first", "source_row")
    strides = ("left_anchor", "left_token", "right_anchor", "right_rank")
    return tuple(
        CompileCase(
            name=dtype,
            kernel=_squares,
            signature={
                **dict.fromkeys(("source", "left", "right"), f"*{dtype}"),
                "squares": "*fp32",
                "source_slots": "*i64",
                **dict.fromkeys((*integers, *strides), "i32"),
            },
            constants={
                "NARROW": dtype == "bf16",
                "BLOCK_T": BLOCK_TOKENS,
                "BLOCK_D": BLOCK_COLUMNS,
                "BLOCK_R": BLOCK_RANK[dtype == "bf16"],
            },
            num_stages=3,
            aligned=frozenset({"dim", "rank", "source_row", *strides}),
            tensor_cores=True,
        )
        for dtype in ("bf16", "fp32")
    )
