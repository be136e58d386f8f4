"""Re-rotation on a GPU, and the load of rotated rows that the corrections start from.

A tile holds both numbers of every pair that it turns, so that a program that writes where it reads finds its partners
unturned, whatever the tile's width.
"""

import triton
import triton.language as tl

from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows, merged_pair

BLOCK_TOKENS, BLOCK_COLUMNS = 32, 64
ALONE, NEOX, GPTJ = 0, 1, 2
"""Which dimensions turn together; `ALONE`: none turns."""


@triton.jit
def rows_of(slots, first, tokens, mask):
    """Cache rows [BLOCK_T] of tokens; consecutive from `first` on without slots."""
    if slots is not None:
        return tl.load(slots + tokens, mask=mask, other=0)
    return first + tokens.to(tl.int64)


@triton.jit
def tile_count(dim, half, BLOCK_D: tl.constexpr):
    """Tiles of a head: first those of pairs, then those of numbers that do not turn."""
    return tl.cdiv(half, BLOCK_D // 2) + tl.cdiv(dim - 2 * half, BLOCK_D)


@triton.jit
def tile_columns(tile, dim, half, LAYOUT: tl.constexpr, BLOCK_D: tl.constexpr):
    """The numbers of a head in a tile, and which of them there are; int32 and bool [BLOCK_D]."""
    lanes = tl.arange(0, BLOCK_D)
    pair_tiles = tl.cdiv(half, BLOCK_D // 2)
    alone = 2 * half + (tile - pair_tiles) * BLOCK_D + lanes
    if LAYOUT == 0:
        return alone, alone < dim
    if LAYOUT == 1:
        pair = tile * (BLOCK_D // 2) + lanes % (BLOCK_D // 2)
        turning = tl.where(lanes < BLOCK_D // 2, pair, pair + half)
        there = pair < half
    else:
        turning = tile * BLOCK_D + lanes
        there = turning < 2 * half
    return tl.where(tile < pair_tiles, turning, alone), tl.where(tile < pair_tiles, there, alone < dim)


@triton.jit
def load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT: tl.constexpr):
    """Numbers `columns` of a head whose tokens begin at `offsets` from `source`, turned; float32 [BLOCK_T, BLOCK_D]."""
    own = tl.load(source + offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        return own
    if LAYOUT == 1:
        first = columns < half
        partner = tl.where(first, columns + half, columns - half)
        frequency = tl.where(first, columns, columns - half)
    else:
        first = columns % 2 == 0
        partner = tl.where(first, columns + 1, columns - 1)
        frequency = columns // 2
    turns = inside & (columns < 2 * half)[None, :]
    other = tl.load(source + offsets[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    angle = tokens.to(tl.int64)[:, None] * turn_stride + frequency[None, :]
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    return own * c + tl.where(first, -1.0, 1.0)[None, :] * other * s


@triton.jit
def store_turned(out, offsets, columns, inside, values):
    """Store float32 [BLOCK_T, BLOCK_D] to rows that may be those which `load_turned` read."""
    # A thread's columns are the partners of another's: all have to be read before any is written.
    tl.debug_barrier()
    tl.store(out + offsets[:, None] + columns[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    source,
    out,
    cos,
    sin,
    source_slots,
    out_slots,
    source_first,
    out_first,
    length,
    dim,
    half,
    turn_stride,
    source_row,
    source_head,
    out_row,
    out_head,
    LAYOUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head = tl.program_id(1).to(tl.int64)
    columns, there = tile_columns(tl.program_id(2), dim, half, LAYOUT, BLOCK_D)  # [BLOCK_D]
    present = tokens < length
    inside = present[:, None] & there[None, :]  # [BLOCK_T, BLOCK_D]
    offsets = rows_of(source_slots, source_first, tokens, present) * source_row + head * source_head
    turned = load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
    targets = rows_of(out_slots, out_first, tokens, present) * out_row + head * out_head
    store_turned(out, targets, columns, inside, turned)


def rotate_triton(source: SegmentRows, out: SegmentRows, rotation: Rotation) -> None:
    """See `rotate_keys`; arguments were checked."""
    grid = (
        triton.cdiv(source.length, BLOCK_TOKENS),
        source.heads,
        tiles_of(source.dim, rotation, BLOCK_COLUMNS),
    )
    _rotate[grid](
        source.data,
        out.data,
        **segment_arguments(source, out, rotation),
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=BLOCK_COLUMNS,
        num_warps=4,
    )


def tiles_of(dim: int, rotation: Rotation | None, columns: int) -> int:
    """`tile_count`, for a grid."""
    half = 0 if rotation is None else rotation.half
    return int(triton.cdiv(half, columns // 2) + triton.cdiv(dim - 2 * half, columns))


def heads_for(source: SegmentRows, out: SegmentRows, rotation: Rotation | None) -> tuple[SegmentRows, SegmentRows]:
    """The rows with the heads that a rotation needs; without one as a single head, so that narrow heads fill tiles."""
    return merged_pair(source, out) if rotation is None else (source, out)


def segment_arguments(source: SegmentRows, out: SegmentRows, rotation: Rotation | None) -> dict[str, object]:
    """Where rows lie and how they turn, as keyword arguments of a kernel."""
    arguments: dict[str, object] = {"length": source.length, "dim": source.dim}
    arguments |= place_arguments("source", source) | place_arguments("out", out)
    if rotation is None:
        return arguments | {"cos": None, "sin": None, "turn_stride": 0, "half": 0, "LAYOUT": ALONE}
    layout = GPTJ if rotation.layout == "gptj" else NEOX
    stride = rotation.half if rotation.cos.shape[0] > 1 else 0
    turn = {"cos": rotation.cos, "sin": rotation.sin, "turn_stride": stride, "half": rotation.half, "LAYOUT": layout}
    return arguments | turn


def place_arguments(name: str, rows: SegmentRows) -> dict[str, object]:
    """The arguments `{name}_slots`, `{name}_first`, `{name}_row` and `{name}_head` of a kernel."""
    slots, first = (None, rows.slots.start) if isinstance(rows.slots, slice) else (rows.slots, 0)
    return {
        f"{name}_slots": slots,
        f"{name}_first": first,
        f"{name}_row": rows.data.stride(0),
        f"{name}_head": rows.data.stride(1),
    }


STRIDES = ("source_row", "source_head", "out_row", "out_head", "turn_stride")
SEGMENT_TYPES = {
    **dict.fromkeys(("source_slots", "out_slots"), "*i64"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("source_first", "out_first", "length", "dim", "half", *STRIDES), "i32"),
}
"""Types of `segment_arguments`, for `CompileCase`."""
ALIGNED = frozenset({"dim", "half", *STRIDES})


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `rotate_triton` chooses."""
    return tuple(
        CompileCase(
            name=f"{dtype}, {layout}",
            kernel=_rotate,
            signature={"source": f"*{dtype}", "out": f"*{dtype}", **SEGMENT_TYPES},
            constants={"LAYOUT": number, "BLOCK_T": BLOCK_TOKENS, "BLOCK_D": BLOCK_COLUMNS},
            aligned=ALIGNED,
        )
        for dtype in ("bf16", "fp32")
        for layout, number in (("neox", NEOX), ("gptj", GPTJ))
    )
