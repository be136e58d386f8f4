"""Block masses on a GPU, in the same pass as the attention or from sampled rows.

What a tile of keys adds to a row's softmax is noted, with the maximum of that moment, in a scratch of the program;
once the row's log-sum-exp is known, the notes become masses. Long contexts are launched some row blocks at a time, to
bound the scratch.
"""

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots
from crossfill_kernels.triton_parts import (
    COMPILED,
    LN_2,
    TYPE_NAMES,
    Tiling,
    cache_rows,
    compute_dtype,
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

SCRATCH_BYTES = 128 * 2**20
"""Bound of the notes of one launch: 1,024 programs at 32K tokens, about four turns of an H100."""

LINES = 16
"""Column blocks whose notes are summed at once."""


@triton.jit
def _note(scratch, tile, most, added, BLOCK: tl.constexpr):
    """Note what a tile of keys added: log2 of it, whatever the maximum becomes later."""
    tl.store(scratch + tile * BLOCK + tl.arange(0, BLOCK), tl.log2(added) + most)


@triton.jit
def _noted(scratch, left, last, row_lse, present, BLOCK: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr):
    """Shares [LINES, BLOCK] that rows give to the column blocks from `left` on; `last` is the last tile with a note."""
    lanes = tl.arange(0, BLOCK)
    tile = left * PARTS + tl.arange(0, LINES * PARTS)
    mask = (tile <= last)[:, None] & present[None, :]
    noted = tl.load(scratch + tile[:, None] * BLOCK + lanes[None, :], mask=mask, other=float("-inf"))
    share = tl.exp2(noted - row_lse[None, :])
    return tl.sum(tl.reshape(share, [LINES, PARTS, BLOCK]), 1)


@triton.jit(do_not_specialize=["first", "row_blocks", "leading", "columns"])
def _block_mass(
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
    out,
    out_row,
    out_head,
    lse,
    lse_row,
    lse_head,
    mass,
    scratch,
    row_blocks,
    leading,
    columns,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    LINES: tl.constexpr,
    PAGED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // KEYS
    lanes = tl.arange(0, BLOCK)
    # The longest row blocks first; heads that share keys side by side.
    head = tl.program_id(0).to(tl.int64)
    entry = leading - tl.program_id(1)
    scratch += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + head) * columns * PARTS * BLOCK
    start = tl.load(starts + entry)
    present = lanes < tl.load(starts + entry + 1) - start
    rows = (start + lanes).to(tl.int64)
    # Rows that are not there see the first key only, to stay finite.
    position = tl.load(positions + rows, mask=present, other=0).to(tl.int32)
    query += head * query_head
    q = query_of(query, rows, query_row, present, D, D_PADDED, CHUNK, COMPUTE)  # [BLOCK, D]
    keys = key_cache + head // GROUP * key_head
    values = value_cache + head // GROUP * value_head
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    state = tl.zeros([BLOCK, D_PADDED], tl.float32)
    last = tl.max(position, 0)
    for tile in range(last // KEYS + 1):
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
        state, most, total, added = softmax_step(state, most, total, score, v)
        _note(scratch, tile, most, added, BLOCK)
    store_rows(out + head * out_head, rows, out_row, state / total[:, None], present, D, D_PADDED)
    row_lse = most + tl.log2(total)  # [BLOCK]
    if WITH_LSE:
        tl.store(lse + rows * lse_row + head * lse_head, row_lse * LN_2, mask=present)
    # The notes of a thread are read by others.
    tl.debug_barrier()
    line = mass + (head * row_blocks + entry) * columns
    for left in range(0, columns, LINES):
        column = left + tl.arange(0, LINES)
        share = _noted(scratch, left, last // KEYS, row_lse, present, BLOCK, LINES, PARTS)
        tl.store(line + column, tl.sum(share, 1), mask=column < columns)


@triton.jit(do_not_specialize=["first", "row_blocks", "leading", "columns"])
def _block_mass_sampled(
    query,
    query_row,
    query_head,
    key_cache,
    key_row,
    key_head,
    slots,
    first,
    positions,
    starts,
    mass,
    scratch,
    row_blocks,
    leading,
    columns,
    scale,
    stride,
    GROUP: tl.constexpr,
    SAMPLES: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    LINES: tl.constexpr,
    PAGED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # A program's lanes are (row block, head of a group, sample): few samples fill no tensor core by themselves.
    LISTS: tl.constexpr = BLOCK // SAMPLES
    PACK: tl.constexpr = LISTS // GROUP_TILE
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    PARTS: tl.constexpr = BLOCK // KEYS
    lanes = tl.arange(0, BLOCK)
    lists = tl.arange(0, LISTS)
    unit = tl.program_id(0)
    pack = leading - tl.program_id(1)
    scratch += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + unit) * columns * PARTS * BLOCK
    kv_head = (unit // TILES).to(tl.int64)
    in_group = unit % TILES * GROUP_TILE + lanes // SAMPLES % GROUP_TILE
    entry = pack * PACK + lanes // (SAMPLES * GROUP_TILE)
    there = (entry < row_blocks) & (in_group < GROUP)
    start = tl.load(starts + entry, mask=there, other=0)
    row = tl.load(starts + entry + 1, mask=there, other=0) - 1 - lanes % SAMPLES * stride
    present = there & (row >= start)
    row = row.to(tl.int64)
    position = tl.load(positions + row, mask=present, other=0).to(tl.int32)
    offsets = row * query_row + (kv_head * GROUP + in_group) * query_head
    q = query_of(query, offsets, 1, present, D, D_PADDED, CHUNK, COMPUTE)  # [BLOCK, D]
    keys = key_cache + kv_head * key_head
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    last = tl.max(position, 0)
    for tile in range(last // KEYS + 1):
        key_position = tile * KEYS + tl.arange(0, KEYS)
        seen = key_position <= last
        base, at = cache_rows(slots, first, tile, seen, KEYS, PAGED)
        k = keys + base * key_row
        score = scores(
            q, query, offsets, 1, present, k, at, key_row, seen, scale, D, D_PADDED, CHUNK, COMPUTE
        )  # [BLOCK, KEYS]
        score = tl.where(key_position[None, :] <= position[:, None], score, float("-inf"))
        renewed = tl.maximum(most, tl.max(score, 1))
        added = tl.sum(tl.exp2(score - renewed[:, None]), 1)
        total = total * tl.exp2(most - renewed) + added
        most = renewed
        _note(scratch, tile, most, added, BLOCK)
    row_lse = most + tl.log2(total)
    tl.debug_barrier()
    list_entry = pack * PACK + lists // GROUP_TILE  # [LISTS]
    list_in_group = unit % TILES * GROUP_TILE + lists % GROUP_TILE
    list_there = (list_entry < row_blocks) & (list_in_group < GROUP)
    lines = mass + ((kv_head * GROUP + list_in_group) * row_blocks + list_entry) * columns
    for left in range(0, columns, LINES):
        column = left + tl.arange(0, LINES)
        share = _noted(scratch, left, last // KEYS, row_lse, present, BLOCK, LINES, PARTS)
        summed = tl.sum(tl.reshape(share, [LINES, LISTS, SAMPLES]), 2)  # [LINES, LISTS]
        tl.store(lines[None, :] + column[:, None], summed, mask=(column < columns)[:, None] & list_there[None, :])


def block_mass_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> BlockMass:
    """`block_mass` on a GPU, or interpreted; the arguments are checked."""
    heads, kv_heads, d = query.shape[1], key_cache.shape[1], query.shape[2]
    columns = rows.last // BLOCK + 1
    mass = query.new_empty(heads, rows.block_count, columns, dtype=torch.float32)
    tiling = tiling_of(query.dtype, d)
    pointer, first, paged = slot_arguments(slots, rows)
    noted = mass if lse is None else lse
    scratch, turns = _turns(mass, rows.block_count, heads, columns, tiling.keys)
    for leading, entries in turns:
        _block_mass[heads, entries](
            *(query, query.stride(0), query.stride(1)),
            *(key_cache, key_cache.stride(0), key_cache.stride(1)),
            *(value_cache, value_cache.stride(0), value_cache.stride(1)),
            *(pointer, first, rows.positions, rows.starts),
            *(out, out.stride(0), out.stride(1)),
            *(noted, noted.stride(0), noted.stride(1)),
            *(mass, scratch, rows.block_count, leading, columns, scale),
            PAGED=paged,
            WITH_LSE=lse is not None,
            **_constants(heads // kv_heads, d, tiling, compute_dtype(query)),
            **tiling.launch,
        )
    return BlockMass(mass, rows.blocks, rows.starts.diff().float())


def block_mass_sampled_triton(
    query: torch.Tensor, key_cache: torch.Tensor, slots: Slots, rows: Rows, *, scale: float, stride: int = 8
) -> BlockMass:
    """`block_mass_sampled` on a GPU, or interpreted; the arguments are checked."""
    heads, kv_heads, d = query.shape[1], key_cache.shape[1], query.shape[2]
    columns = rows.last // BLOCK + 1
    mass = query.new_empty(heads, rows.block_count, columns, dtype=torch.float32)
    samples, group_tile = _lanes(heads // kv_heads, stride)
    tiling = tiling_of(query.dtype, d)
    pointer, first, paged = slot_arguments(slots, rows)
    units = kv_heads * triton.cdiv(heads // kv_heads, group_tile)
    packs = triton.cdiv(rows.block_count, BLOCK // samples // group_tile)
    scratch, turns = _turns(mass, packs, units, columns, tiling.keys)
    for leading, entries in turns:
        _block_mass_sampled[units, entries](
            *(query, query.stride(0), query.stride(1)),
            *(key_cache, key_cache.stride(0), key_cache.stride(1)),
            *(pointer, first, rows.positions, rows.starts),
            *(mass, scratch, rows.block_count, leading, columns, scale, stride),
            PAGED=paged,
            SAMPLES=samples,
            GROUP_TILE=group_tile,
            **_constants(heads // kv_heads, d, tiling, compute_dtype(query)),
            **tiling.launch,
        )
    return BlockMass(mass, rows.blocks, ((rows.starts.diff() + stride - 1) // stride).float())


def _turns(
    mass: torch.Tensor, entries: int, width: int, columns: int, keys: int
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Scratch for one launch, and the launches as (last entry, entries), from the last row blocks to the first."""
    if entries == 0 or width == 0:
        return mass, []
    size = width * columns * (BLOCK // keys) * BLOCK
    most = max(1, min(entries, SCRATCH_BYTES // (4 * size)))
    scratch = mass.new_empty(most * size)
    return scratch, [(leading, min(most, leading + 1)) for leading in range(entries - 1, -1, -most)]


def _lanes(group: int, stride: int) -> tuple[int, int]:
    """Lanes for the samples of a row block, and heads of a group side by side: powers of two, at most a block."""
    samples = triton.next_power_of_2(triton.cdiv(BLOCK, stride))
    return samples, min(triton.next_power_of_2(group), BLOCK // samples)


def _constants(group: int, d: int, tiling: Tiling, compute: tl.dtype) -> dict[str, object]:
    return {
        "GROUP": group,
        "D": d,
        "D_PADDED": padded(d),
        "BLOCK": BLOCK,
        "KEYS": tiling.keys,
        "CHUNK": tiling.chunk,
        "LINES": LINES,
        "COMPUTE": compute,
    }


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that the launchers choose."""
    return tuple(
        _case(dtype, d, paged=paged, sampled=sampled) for dtype, d, paged in COMPILED for sampled in (False, True)
    )


def _case(dtype: torch.dtype, d: int, *, paged: bool, sampled: bool) -> CompileCase:
    tiling, name = tiling_of(dtype, d), TYPE_NAMES[dtype]
    own: dict[str, object] = {"SAMPLES": 8, "GROUP_TILE": 2} if sampled else {"WITH_LSE": True}
    tensors = ("query", "key_cache", "value_cache", "out")
    return CompileCase(
        name=f"{'sampled' if sampled else 'all rows'}, d {d}, {name}, {'paged' if paged else 'consecutive'}",
        kernel=_block_mass_sampled if sampled else _block_mass,
        signature=pointer_types(dtype, tensors, fp32=("lse", "mass", "scratch"), floats=("scale",)),
        constants=_constants(2, d, tiling, tl.str_to_ty(name, None)) | own | {"PAGED": paged},
        tensor_cores=True,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
