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
    PLACE_TYPES,
    ROTATION_TYPES,
    load_turned,
    place_arguments,
    rotation_arguments,
    rows_of,
    store_turned,
)
from crossfill_kernels.segments import SegmentRows

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
    tiles = tl.cdiv(dim, BLOCK_D)
    head = (tl.program_id(1) // tiles).to(tl.int64)
    columns = (tl.program_id(1) % tiles) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    present = tokens < length
    inside = present[:, None] & (columns < dim)[None, :]  # [BLOCK_T, BLOCK_D]
    offsets = rows_of(source_slots, source_first, tokens, present) * source_row + head * source_head
    corrected = load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
    corrected = _add_anchors(
        corrected,
        left + tokens.to(tl.int64)[:, None] * left_token,
        right + (head * dim + columns)[None, :],
        weights + tokens.to(tl.int64) * weight_token,
        present,
        columns < dim,
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
    if rotation is None:
        source, out = _merged(source, out)
    left, right = unit_stride(left), unit_stride(right)
    tokens, columns = tile_of(source.dim, whole=rotation is not None)
    bf16 = narrow(out.data, left, right)
    grid = (triton.cdiv(source.length, tokens), source.heads * triton.cdiv(source.dim, columns))
    _correct[grid](
        source.data,
        out.data,
        left,
        right,
        weights,
        **rotation_arguments(rotation),
        **place_arguments("source", source),
        **place_arguments("out", out),
        length=source.length,
        dim=source.dim,
        anchors=left.shape[0],
        rank=left.shape[2],
        left_anchor=left.stride(0),
        left_token=left.stride(1),
        right_anchor=right.stride(0),
        right_rank=right.stride(1),
        weight_anchor=weights.stride(0),
        weight_token=weights.stride(1) if weights.dim() == 2 else 0,
        NARROW=bf16,
        BLOCK_T=tokens,
        BLOCK_D=columns,
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


def tile_of(dim: int, *, whole: bool) -> tuple[int, int]:
    """Tokens and columns of a tile of 4,096 numbers (8,192 spill in float32); `whole`: of all of a head's columns."""
    columns = max(16, int(triton.next_power_of_2(dim)))
    columns = columns if whole else min(columns, 128)
    return max(16, min(64, 4096 // columns)), columns


def _merged(source: SegmentRows, out: SegmentRows) -> tuple[SegmentRows, SegmentRows]:
    # Without a rotation heads do not matter: tiles then fit narrow heads, too.
    one, other = source.merged(), out.merged()
    return (source, out) if one is None or other is None else (one, other)


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `correct_triton` chooses, of usual heads."""
    strides = {
        **dict.fromkeys(("left_anchor", "left_token", "right_anchor", "right_rank"), "i32"),
        **dict.fromkeys(("anchors", "rank", "weight_anchor", "weight_token"), "i32"),
    }
    cases = []
    for dim in (64, 128, 256):
        for dtype in ("bf16", "fp32"):
            for layout, number in (("keys", NEOX), ("values", ALONE)):
                tokens, columns = tile_of(dim, whole=layout == "keys")
                constants = {"LAYOUT": number, "NARROW": dtype == "bf16"}
                cases.append(
                    CompileCase(
                        name=f"d {dim}, {dtype}, {layout}",
                        kernel=_correct,
                        signature={
                            **dict.fromkeys(("source", "out", "left", "right"), f"*{dtype}"),
                            "weights": "*fp32",
                            **PLACE_TYPES,
                            **ROTATION_TYPES,
                            **strides,
                        },
                        constants={
                            **constants,
                            "BLOCK_T": tokens,
                            "BLOCK_D": columns,
                            "BLOCK_R": BLOCK_RANK[dtype == "bf16"],
                        },
                        num_stages=3,
                        aligned=ALIGNED | {"left_anchor", "left_token", "right_anchor", "right_rank", "rank"},
                        tensor_cores=True,
                    )
                )
    return tuple(cases)
