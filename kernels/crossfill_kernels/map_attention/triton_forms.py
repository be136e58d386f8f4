"""The GPU kernels of `map_attention`, one an order of work.

Lanes of rows are places of a row block, because that is what a stored block holds; a last step finds the query rows
that stand there. The third grid dimension splits the list of a row block, for calls whose row blocks do not fill a GPU.
"""

import triton
import triton.language as tl

from crossfill_kernels.triton_parts import cache_rows, load_rows, row_in_block, store_rows


@triton.jit
def _stored(stored, scales, slot, part, BLOCK: tl.constexpr, KEYS: tl.constexpr, CODES: tl.constexpr):
    """A part of a stored block's columns [BLOCK, KEYS], float32."""
    rows = tl.arange(0, BLOCK)
    keys = part * KEYS + tl.arange(0, KEYS)
    tile = tl.load(stored + slot * BLOCK * BLOCK + rows[:, None] * BLOCK + keys[None, :]).to(tl.float32)
    if CODES:
        tile = tile * tl.load(scales + slot * BLOCK + rows)[:, None]
    return tile


@triton.jit
def _share(count):
    """The part of a list that this program walks."""
    step = tl.cdiv(count, tl.num_programs(2))
    begin = tl.program_id(2) * step
    return begin, tl.minimum(begin + step, count)


@triton.jit
def _values(
    values,
    value_row,
    slots,
    first,
    tile,
    last,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Values [KEYS, D] of a tile of keys, zero behind the block's last row: they need not exist."""
    seen = tile * KEYS + tl.arange(0, KEYS) <= last
    base, at = cache_rows(slots, first, tile, seen, KEYS, PAGED)
    return load_rows(values + base * value_row, at, value_row, seen, D, D_PADDED, COMPUTE)


@triton.jit(do_not_specialize=["first", "entries"])
def sparse(
    stored,
    scales,
    columns,
    stored_at,
    offsets,
    places,
    lists,
    counts,
    weights,
    weights_row,
    weights_column,
    value_cache,
    value_row,
    value_head,
    slots,
    first,
    positions,
    blocks,
    starts,
    out,
    out_split,
    out_row,
    out_head,
    entries,
    row_blocks,
    SENDERS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    CODES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One receiver head: every entry of nonzero weight times the values."""
    PARTS: tl.constexpr = BLOCK // KEYS
    head = tl.program_id(0).to(tl.int64)
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    place = tl.load(places + entry)
    last = tl.load(positions + tl.load(starts + entry + 1) - 1).to(tl.int32)
    lists += head * entries + tl.load(offsets + place)
    values = value_cache + head // GROUP * value_head
    state = tl.zeros([BLOCK, D_PADDED], tl.float32)
    begin, end = _share(tl.load(counts + head * row_blocks + place))
    for step in range(begin * PARTS, end * PARTS):
        at = tl.load(lists + step // PARTS)
        part = step % PARTS
        column = tl.load(columns + at)
        weight = tl.load(weights + column % SENDERS * weights_row + head * weights_column)
        tile = _stored(stored, scales, tl.load(stored_at + at).to(tl.int64), part, BLOCK, KEYS, CODES)
        v_tile = column // SENDERS * PARTS + part
        v = _values(values, value_row, slots, first, v_tile, last, D, D_PADDED, KEYS, PAGED, COMPUTE)
        state = tl.dot((tile * weight).to(COMPUTE), v, state, input_precision="tf32x3")
    rows = row_in_block(positions, starts, entry, tl.load(blocks + entry), BLOCK)
    out += tl.program_id(2).to(tl.int64) * out_split + head * out_head
    store_rows(out, rows, out_row, state, rows >= 0, D, D_PADDED)


@triton.jit(do_not_specialize=["first"])
def paper(
    stored,
    scales,
    columns,
    stored_at,
    offsets,
    places,
    firsts,
    counts,
    weights,
    weights_row,
    weights_column,
    value_cache,
    value_row,
    value_head,
    slots,
    first,
    positions,
    blocks,
    starts,
    out,
    out_split,
    out_row,
    out_head,
    SENDERS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    CODES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One receiver head: the entries of a position mixed, then multiplied with its values (MapFlow, Algorithm 2)."""
    PARTS: tl.constexpr = BLOCK // KEYS
    head = tl.program_id(0).to(tl.int64)
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    place = tl.load(places + entry)
    last = tl.load(positions + tl.load(starts + entry + 1) - 1).to(tl.int32)
    listed = firsts + tl.load(offsets + place)
    behind = tl.load(offsets + place + 1)
    count = tl.load(counts + place)
    values = value_cache + head // GROUP * value_head
    state = tl.zeros([BLOCK, D_PADDED], tl.float32)
    begin, end = _share(count)
    for step in range(begin * PARTS, end * PARTS):
        position = step // PARTS
        part = step % PARTS
        left = tl.load(listed + position)
        right = tl.load(listed + position + 1, mask=position + 1 < count, other=behind)
        mixed = tl.zeros([BLOCK, KEYS], tl.float32)
        # Loads that feed no matrix product are prefetched only when asked for.
        for at in tl.range(left, right, num_stages=STAGES):
            weight = tl.load(weights + tl.load(columns + at) % SENDERS * weights_row + head * weights_column)
            slot = tl.load(stored_at + at).to(tl.int64)
            mixed += weight * _stored(stored, scales, slot, part, BLOCK, KEYS, CODES)
        v_tile = tl.load(columns + left) // SENDERS * PARTS + part
        v = _values(values, value_row, slots, first, v_tile, last, D, D_PADDED, KEYS, PAGED, COMPUTE)
        state = tl.dot(mixed.to(COMPUTE), v, state, input_precision="tf32x3")
    rows = row_in_block(positions, starts, entry, tl.load(blocks + entry), BLOCK)
    out += tl.program_id(2).to(tl.int64) * out_split + head * out_head
    store_rows(out, rows, out_row, state, rows >= 0, D, D_PADDED)


@triton.jit(do_not_specialize=["first"])
def values_first(
    stored,
    scales,
    columns,
    stored_at,
    offsets,
    places,
    weights,
    weights_row,
    weights_column,
    value_cache,
    value_row,
    value_head,
    slots,
    first,
    positions,
    blocks,
    starts,
    out,
    out_split,
    out_row,
    out_head,
    SENDERS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    CODES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Some receiver heads of one KV head: every entry times the values, once, and the product added to each of them."""
    PARTS: tl.constexpr = BLOCK // KEYS
    TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = (tl.program_id(0) // TILES).to(tl.int64)
    in_group = tl.program_id(0) % TILES * GROUP_TILE + tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP + in_group  # [GROUP_TILE]
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    place = tl.load(places + entry)
    last = tl.load(positions + tl.load(starts + entry + 1) - 1).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    values = value_cache + kv_head * value_head
    state = tl.zeros([GROUP_TILE, BLOCK, D_PADDED], tl.float32)
    listed = tl.load(offsets + place)
    begin, end = _share(tl.load(offsets + place + 1) - listed)
    for step in range((listed + begin) * PARTS, (listed + end) * PARTS):
        at = step // PARTS
        part = step % PARTS
        column = tl.load(columns + at)
        slot = tl.load(stored_at + at).to(tl.int64)
        weight = tl.load(
            weights + column % SENDERS * weights_row + head * weights_column, mask=in_group < GROUP, other=0.0
        )
        keys = part * KEYS + tl.arange(0, KEYS)
        tile = tl.load(stored + slot * BLOCK * BLOCK + lanes[:, None] * BLOCK + keys[None, :])
        v_tile = column // SENDERS * PARTS + part
        v = _values(values, value_row, slots, first, v_tile, last, D, D_PADDED, KEYS, PAGED, COMPUTE)
        product = tl.dot(tile.to(COMPUTE), v, input_precision="tf32x3")  # [BLOCK, D]
        if CODES:
            # Codes are exact in bfloat16; what they count is put right afterwards.
            product = product * tl.load(scales + slot * BLOCK + lanes)[:, None]
        state += weight[:, None, None] * product[None, :, :]
    rows = row_in_block(positions, starts, entry, tl.load(blocks + entry), BLOCK)
    dims = tl.arange(0, D_PADDED)
    out += tl.program_id(2).to(tl.int64) * out_split
    at = rows[None, :, None] * out_row + head[:, None, None] * out_head + dims[None, None, :]
    mask = (rows >= 0)[None, :, None] & (in_group < GROUP)[:, None, None] & (dims < D)[None, None, :]
    tl.store(out + at, state.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first"])
def mix(
    stored,
    scales,
    columns,
    stored_at,
    offsets,
    places,
    firsts,
    counts,
    weights,
    weights_row,
    weights_column,
    value_cache,
    value_row,
    value_head,
    slots,
    first,
    positions,
    blocks,
    starts,
    out,
    out_split,
    out_row,
    out_head,
    kv_heads,
    SENDERS: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    CODES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """ROWS places, the receiver heads of KV_TILE KV heads, D_TILE dimensions: mixing is a matrix product as well.

    Runs have up to LANES entries; a position with more of them is multiplied with its values more than once.
    """
    HEADS: tl.constexpr = KV_TILE * GROUP_PADDED
    D_TILES: tl.constexpr = (D + D_TILE - 1) // D_TILE
    PARTS: tl.constexpr = BLOCK // ROWS
    # Programs side by side read the same stored rows.
    unit = tl.program_id(0)
    dims = unit % D_TILES * D_TILE + tl.arange(0, D_TILE)
    part = unit // D_TILES % PARTS
    kv_first = unit // (D_TILES * PARTS) * KV_TILE
    entry = tl.num_programs(1) - 1 - tl.program_id(1)
    place = tl.load(places + entry)
    last = tl.load(positions + tl.load(starts + entry + 1) - 1).to(tl.int32)
    kv_head = kv_first + tl.arange(0, KV_TILE)
    lane = tl.arange(0, HEADS)
    lane_kv = kv_first + lane // GROUP_PADDED
    lane_head = lane_kv * GROUP + lane % GROUP_PADDED
    lane_there = (lane % GROUP_PADDED < GROUP) & (lane_kv < kv_heads)
    cells = part * ROWS * BLOCK + tl.arange(0, ROWS * BLOCK)
    keys = tl.arange(0, BLOCK)
    listed = firsts + tl.load(offsets + place)
    behind = tl.load(offsets + place + 1)
    count = tl.load(counts + place)
    # A batch of one product would be compiled far worse than the product.
    if KV_TILE == 1:
        state = tl.zeros([HEADS * ROWS, D_TILE], tl.float32)
    else:
        state = tl.zeros([KV_TILE, GROUP_PADDED * ROWS, D_TILE], tl.float32)
    begin, end = _share(count)
    for step in range(begin, end):
        at = tl.load(listed + step) + tl.arange(0, LANES)
        there = at < tl.load(listed + step + 1, mask=step + 1 < count, other=behind)
        column = tl.load(columns + at, mask=there, other=0)
        slot = tl.load(stored_at + at, mask=there, other=0).to(tl.int64)
        weight = tl.load(
            weights + (column % SENDERS)[None, :] * weights_row + lane_head[:, None] * weights_column,
            mask=lane_there[:, None] & there[None, :],
            other=0.0,
        )  # [HEADS, LANES]
        tile = tl.load(stored + slot[:, None] * BLOCK * BLOCK + cells[None, :], mask=there[:, None], other=0.0)
        if CODES:
            unit_of = tl.load(
                scales + slot[:, None] * BLOCK + (cells // BLOCK)[None, :], mask=there[:, None], other=0.0
            )
            tile = tile.to(tl.float32) * unit_of
        mixed = tl.dot(weight.to(COMPUTE), tile.to(COMPUTE), input_precision="tf32x3")  # [HEADS, ROWS · BLOCK]
        block_column = tl.max(column, 0) // SENDERS
        seen = block_column * BLOCK + keys <= last
        base, value_rows = cache_rows(slots, first, block_column, seen, BLOCK, PAGED)
        v_at = base * value_row + value_rows[:, None] * value_row + dims[None, :]
        v_mask = seen[:, None] & (dims < D)[None, :]
        if KV_TILE == 1:
            v = tl.load(value_cache + kv_first.to(tl.int64) * value_head + v_at, mask=v_mask, other=0.0)
            mixed = tl.reshape(mixed.to(COMPUTE), [HEADS * ROWS, BLOCK])
        else:
            v = tl.load(
                value_cache + kv_head.to(tl.int64)[:, None, None] * value_head + v_at[None, :, :],
                mask=v_mask[None, :, :] & (kv_head < kv_heads)[:, None, None],
                other=0.0,
            )  # [KV_TILE, BLOCK, D_TILE]
            mixed = tl.reshape(mixed.to(COMPUTE), [KV_TILE, GROUP_PADDED * ROWS, BLOCK])
        state = tl.dot(mixed, v.to(COMPUTE), state, input_precision="tf32x3")
    rows = row_in_block(positions, starts, entry, tl.load(blocks + entry), BLOCK)
    # The query rows at this program's places.
    mine = (part * ROWS + tl.arange(0, ROWS))[:, None] == keys[None, :]
    rows = tl.sum(tl.where(mine, rows[None, :] + 1, 0), 1) - 1  # [ROWS]
    cell = tl.reshape(state, [HEADS, ROWS, D_TILE])
    out += tl.program_id(2).to(tl.int64) * out_split
    target = rows[None, :, None] * out_row + lane_head.to(tl.int64)[:, None, None] * out_head + dims[None, None, :]
    mask = (rows >= 0)[None, :, None] & lane_there[:, None, None] & (dims < D)[None, None, :]
    tl.store(out + target, cell.to(out.dtype.element_ty), mask=mask)
