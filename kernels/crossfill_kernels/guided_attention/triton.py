"""Exact attention over kept blocks on a GPU: a program walks the list of one (row block, head)."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import BlockIndex
from crossfill_kernels.compilation import CAPABILITIES, CompileCase
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots
from crossfill_kernels.triton_parts import (
    COMPILED,
    TYPE_NAMES,
    Tiling,
    cache_rows,
    compute_dtype,
    generation,
    load_rows,
    padded,
    pointer_types,
    query_of,
    scores,
    slot_arguments,
    softmax_step,
    store_rows,
    tiling_of,
)


@triton.jit(do_not_specialize=["first"])
def _guided_attention(
    query,
    query_row,
    query_head,
    key_cache,
    key_row,
    key_head,
    value_cache,
    value_row,
    value_head,
    slots,
    first,
    positions,
    starts,
    offsets,
    columns,
    out,
    out_row,
    out_head,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // KEYS
    lanes = tl.arange(0, BLOCK)
    # Late row blocks have the longest lists, so they come first; heads that share keys run side by side.
    head = tl.program_id(0).to(tl.int64)
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.load(starts + entry)
    end = tl.load(starts + entry + 1)
    present = lanes < end - start
    rows = (start + lanes).to(tl.int64)
    last = tl.load(positions + end - 1).to(tl.int32)
    # Rows that are not there see all that is read, to stay finite.
    position = tl.load(positions + rows, mask=present, other=0x7FFFFFFF).to(tl.int32)
    query += head * query_head
    q = query_of(query, rows, query_row, present, D, D_PADDED, CHUNK, COMPUTE)  # [BLOCK, D]
    keys = key_cache + head // GROUP * key_head
    values = value_cache + head // GROUP * value_head
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    state = tl.zeros([BLOCK, D_PADDED], tl.float32)
    listed = offsets + head * tl.num_programs(1) + entry
    for step in range(tl.load(listed) * PARTS, tl.load(listed + 1) * PARTS):
        tile = tl.load(columns + step // PARTS) * PARTS + step % PARTS
        key_position = tile * KEYS + tl.arange(0, KEYS)
        # Keys behind the block's last row are not read, so they need not exist.
        seen = key_position <= last
        base, at = cache_rows(slots, first, tile, seen, KEYS, PAGED)
        k = keys + base * key_row
        score = scores(
            q, query, rows, query_row, present, k, at, key_row, seen, scale, D, D_PADDED, CHUNK, COMPUTE
        )  # [BLOCK, KEYS]
        score = tl.where(key_position[None, :] <= position[:, None], score, float("-inf"))
        v = load_rows(values + base * value_row, at, value_row, seen, D, D_PADDED, COMPUTE)
        state, most, total, _ = softmax_step(state, most, total, score, v)
    # A row without a kept key gives zeros.
    state = state / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out + head * out_head, rows, out_row, state, present, D, D_PADDED)


def guided_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`guided_attention` on a GPU, or interpreted; the arguments are checked."""
    heads, kv_heads, d = query.shape[1], key_cache.shape[1], query.shape[2]
    if rows.block_count == 0 or heads == 0:
        return
    pointer, first, paged = slot_arguments(slots, rows)
    tiling = _tiling(query.dtype, d, generation(query.device), paged=paged)
    _guided_attention[heads, rows.block_count](
        *(query, query.stride(0), query.stride(1)),
        *(key_cache, key_cache.stride(0), key_cache.stride(1)),
        *(value_cache, value_cache.stride(0), value_cache.stride(1)),
        *(pointer, first, rows.positions, rows.starts, index.offsets, index.columns),
        *(out, out.stride(0), out.stride(1), scale),
        PAGED=paged,
        COMPUTE=compute_dtype(query),
        **_constants(heads // kv_heads, d, tiling),
        **tiling.launch,
    )


def _tiling(dtype: torch.dtype, d: int, capability: int, *, paged: bool) -> Tiling:
    tiling = tiling_of(dtype, d)
    # 4 warps spill 2 registers there; 8 warps take 174.
    crowded = paged and capability == 80 and dtype == torch.bfloat16 and 64 < d <= 128
    return replace(tiling, num_warps=8) if crowded else tiling


def _constants(group: int, d: int, tiling: Tiling) -> dict[str, object]:
    return {
        "GROUP": group,
        "D": d,
        "D_PADDED": padded(d),
        "BLOCK": BLOCK,
        "KEYS": tiling.keys,
        "CHUNK": tiling.chunk,
    }


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that the launcher chooses."""
    return tuple(
        _case(dtype, d, capability, paged=paged) for dtype, d, paged in COMPILED for capability in CAPABILITIES
    )


def _case(dtype: torch.dtype, d: int, capability: int, *, paged: bool) -> CompileCase:
    tiling, name = _tiling(dtype, d, capability, paged=paged), TYPE_NAMES[dtype]
    return CompileCase(
        name=f"d {d}, {name}, {'paged' if paged else 'consecutive'}",
        kernel=_guided_attention,
        signature=pointer_types(
            dtype, ("query", "key_cache", "value_cache", "out"), i32=("offsets", "columns"), floats=("scale",)
        ),
        constants=_constants(2, d, tiling) | {"PAGED": paged, "COMPUTE": tl.str_to_ty(name, None)},
        capabilities=(capability,),
        tensor_cores=True,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
