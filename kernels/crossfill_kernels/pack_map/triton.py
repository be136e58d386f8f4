"""Kept probabilities written into slots on a GPU: a program walks the list of one (row block, head), once or twice.

Lanes of a program are places of a row block, whichever of them are present, because that is what a slot holds.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import BlockIndex, MapStorage, PackedMap
from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.pack_map.layout import lay_out
from crossfill_kernels.pack_map.reference import LEAST_SCALE
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots
from crossfill_kernels.triton_parts import (
    LOG2_E,
    TYPE_NAMES,
    Tiling,
    cache_rows,
    compute_dtype,
    padded,
    pointer_types,
    query_of,
    row_in_block,
    scores,
    slot_arguments,
    tiling_of,
)


@triton.jit(do_not_specialize=["first"])
def _pack_map(
    query,
    query_row,
    query_head,
    key_cache,
    key_row,
    key_head,
    slots,
    first,
    positions,
    blocks,
    starts,
    offsets,
    columns,
    slot_of,
    lse,
    lse_row,
    lse_head,
    stored,
    scales,
    scale,
    least_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CODES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // KEYS
    tl.static_assert(PARTS == 1 or not CODES)
    lanes = tl.arange(0, BLOCK)
    head = tl.program_id(0).to(tl.int64)
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    block = tl.load(blocks + entry)
    last = tl.load(positions + tl.load(starts + entry + 1) - 1).to(tl.int32)
    rows = row_in_block(positions, starts, entry, block, BLOCK)  # [BLOCK]
    present = rows >= 0
    position = block * BLOCK + lanes
    query += head * query_head
    q = query_of(query, rows, query_row, present, D, D_PADDED, CHUNK, COMPUTE)  # [BLOCK, D]
    keys = key_cache + head // GROUP * key_head
    listed = offsets + head * tl.num_programs(1) + entry
    begin = tl.load(listed)
    end = tl.load(listed + 1)
    if RENORMALISE:
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for step in range(begin * PARTS, end * PARTS):
            tile = tl.load(columns + step // PARTS) * PARTS + step % PARTS
            score = _visible_scores(
                *(q, query, rows, query_row, present, keys, key_row, slots, first, tile, position, last, scale),
                *(D, D_PADDED, KEYS, CHUNK, PAGED, COMPUTE),
            )
            renewed = tl.maximum(most, tl.max(score, 1))
            total = total * tl.exp2(most - renewed) + tl.sum(tl.exp2(score - renewed[:, None]), 1)
            most = renewed
        row_lse = most + tl.log2(total)
    else:
        row_lse = tl.load(lse + rows * lse_row + head * lse_head, mask=present, other=0.0) * LOG2_E
    for step in range(begin * PARTS, end * PARTS):
        entry_step = step // PARTS
        part = step % PARTS
        column = tl.load(columns + entry_step)
        slot = tl.load(slot_of + entry_step).to(tl.int64)
        score = _visible_scores(
            *(q, query, rows, query_row, present, keys, key_row, slots, first, column * PARTS + part),
            *(position, last, scale, D, D_PADDED, KEYS, CHUNK, PAGED, COMPUTE),
        )
        kept = present[:, None] & (score != float("-inf"))
        probability = tl.where(kept, tl.exp2(score - row_lse[:, None]), 0.0)  # [BLOCK, KEYS]
        at = stored + slot * BLOCK * BLOCK + lanes[:, None] * BLOCK + (part * KEYS + tl.arange(0, KEYS))[None, :]
        if CODES:
            # One tile is the whole row here, so its greatest probability is at hand.
            unit = tl.max(probability, 1) / 255
            unit = tl.where(unit < least_scale, 0.0, unit)
            code = probability / tl.where(unit == 0.0, 1.0, unit)[:, None]
            code = tl.where(unit[:, None] == 0.0, 0.0, tl.minimum(code + 0.5, 255.0))
            tl.store(at, code.to(tl.uint8))
            tl.store(scales + slot * BLOCK + lanes, unit)
        else:
            tl.store(at, probability.to(stored.dtype.element_ty))


@triton.jit
def _visible_scores(
    q,
    query,
    rows,
    query_row,
    present,
    keys,
    key_row,
    slots,
    first,
    tile,
    position,
    last,
    scale,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Scores [BLOCK, KEYS] of a tile of keys; -inf for keys that causality hides."""
    key_position = tile * KEYS + tl.arange(0, KEYS)
    seen = key_position <= last
    base, at = cache_rows(slots, first, tile, seen, KEYS, PAGED)
    k = keys + base * key_row
    score = scores(q, query, rows, query_row, present, k, at, key_row, seen, scale, D, D_PADDED, CHUNK, COMPUTE)
    # A place without a row sees all, to stay finite.
    return tl.where((key_position[None, :] <= position[:, None]) | ~present[:, None], score, float("-inf"))


def pack_map_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    storage: MapStorage,
    slot_ids: torch.Tensor,
    lse: torch.Tensor | None = None,
    renormalise: bool = True,
) -> PackedMap:
    """`pack_map` on a GPU, or interpreted; the arguments are checked."""
    heads, kv_heads, d = query.shape[1], key_cache.shape[1], query.shape[2]
    layout = lay_out(index, slot_ids.numel())
    packed = PackedMap(heads, index.blocks, layout.offsets, layout.columns, slot_ids, storage)
    if slot_ids.numel() == 0:
        return packed
    # By place in the lists of the index, which the kernel walks.
    slot_of = torch.empty_like(slot_ids)
    slot_of[layout.order] = slot_ids
    codes = storage.scales is not None
    tiling = _tiling(query.dtype, d, codes=codes)
    pointer, first, paged = slot_arguments(slots, rows)
    scales = slot_of if storage.scales is None else storage.scales
    sums = query if renormalise or lse is None else lse
    _pack_map[heads, rows.block_count](
        *(query, query.stride(0), query.stride(1)),
        *(key_cache, key_cache.stride(0), key_cache.stride(1)),
        *(pointer, first, rows.positions, rows.blocks, rows.starts, index.offsets, index.columns, slot_of),
        *(sums, sums.stride(0), sums.stride(1), storage.blocks, scales, scale, LEAST_SCALE),
        PAGED=paged,
        RENORMALISE=renormalise,
        CODES=codes,
        COMPUTE=compute_dtype(query),
        **_constants(heads // kv_heads, d, tiling),
        **tiling.launch,
    )
    return packed


def _tiling(dtype: torch.dtype, d: int, *, codes: bool) -> Tiling:
    """Codes need a row's greatest probability, so their tile is a whole block; float32 has room, without values."""
    if not codes:
        return tiling_of(dtype, d)
    if dtype == torch.bfloat16:
        return replace(tiling_of(dtype, d), keys=BLOCK)
    return Tiling(keys=BLOCK, chunk=min(32, padded(d)), num_warps=8, num_stages=1)


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
    return (
        _case(torch.bfloat16, 128, torch.bfloat16, paged=False, renormalise=True),
        _case(torch.bfloat16, 128, torch.uint8, paged=True, renormalise=True),
        _case(torch.bfloat16, 128, torch.uint8, paged=False, renormalise=False),
        _case(torch.bfloat16, 64, torch.bfloat16, paged=True, renormalise=True),
        _case(torch.bfloat16, 256, torch.uint8, paged=True, renormalise=True),
        _case(torch.float32, 128, torch.float32, paged=True, renormalise=True),
        _case(torch.float32, 128, torch.uint8, paged=True, renormalise=True),
        _case(torch.float32, 64, torch.uint8, paged=False, renormalise=True),
    )


def _case(dtype: torch.dtype, d: int, stored: torch.dtype, *, paged: bool, renormalise: bool) -> CompileCase:
    tiling, name = _tiling(dtype, d, codes=stored == torch.uint8), TYPE_NAMES[dtype]
    lists = ("blocks", "offsets", "columns", "slot_of")
    pointers = pointer_types(
        dtype, ("query", "key_cache"), fp32=("lse", "scales"), i32=lists, floats=("scale", "least_scale")
    )
    own = {"PAGED": paged, "RENORMALISE": renormalise, "CODES": stored == torch.uint8}
    return CompileCase(
        name=f"d {d}, {name} → {TYPE_NAMES[stored]}, {'paged' if paged else 'consecutive'}, "
        f"{'renormalised' if renormalise else 'raw'}",
        kernel=_pack_map,
        signature=pointers | {"stored": f"*{TYPE_NAMES[stored]}"},
        constants=_constants(2, d, tiling) | own | {"COMPUTE": tl.str_to_ty(name, None)},
        tensor_cores=True,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
