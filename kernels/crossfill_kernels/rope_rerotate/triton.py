"""Re-rotation on a GPU, and the load of rotated rows that the corrections start from."""

import triton
import triton.language as tl

from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.rope_rerotate.rotation import Rotation
from crossfill_kernels.segments import SegmentRows

ALONE, NEOX, GPTJ = 0, 1, 2
"""Which dimensions turn together; `ALONE`: none turns."""


@triton.jit
def rows_of(slots, first, tokens, mask):
    """Cache rows [BLOCK_T] of tokens; consecutive from `first` on without slots."""
    if slots is not None:
        return tl.load(slots + tokens, mask=mask, other=0)
    return first + tokens.to(tl.int64)


@triton.jit
def load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT: tl.constexpr):
    """Numbers `columns` of a head whose tokens begin at `offsets` from `source`, turned; float32 [BLOCK_T, BLOCK_D].

    With a rotation this also reads the partners of the columns.
    """
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
    columns = tl.arange(0, BLOCK_D)
    present = tokens < length
    inside = present[:, None] & (columns < dim)[None, :]  # [BLOCK_T, BLOCK_D]
    offsets = rows_of(source_slots, source_first, tokens, present) * source_row + head * source_head
    turned = load_turned(source, offsets, tokens, columns, inside, cos, sin, turn_stride, half, LAYOUT)
    targets = rows_of(out_slots, out_first, tokens, present) * out_row + head * out_head
    store_turned(out, targets, columns, inside, turned)


def _tokens_of(dim: int) -> int:
    # 16 numbers a thread: with 64 of them, float32 heads of 256 spill.
    return max(1, 2048 // int(triton.next_power_of_2(dim)))


def rotate_triton(source: SegmentRows, out: SegmentRows, rotation: Rotation) -> None:
    """See `rotate_keys`; arguments were checked."""
    tokens = _tokens_of(source.dim)
    grid = (triton.cdiv(source.length, tokens), source.heads)
    _rotate[grid](
        source.data,
        out.data,
        **rotation_arguments(rotation),
        **place_arguments("source", source),
        **place_arguments("out", out),
        length=source.length,
        dim=source.dim,
        BLOCK_T=tokens,
        BLOCK_D=triton.next_power_of_2(source.dim),
        num_warps=4,
    )


def rotation_arguments(rotation: Rotation | None) -> dict[str, object]:
    """What `load_turned` needs to know of a rotation."""
    if rotation is None:
        return {"cos": None, "sin": None, "turn_stride": 0, "half": 0, "LAYOUT": ALONE}
    layout = GPTJ if rotation.layout == "gptj" else NEOX
    stride = rotation.half if rotation.cos.shape[0] > 1 else 0
    return {"cos": rotation.cos, "sin": rotation.sin, "turn_stride": stride, "half": rotation.half, "LAYOUT": layout}


def place_arguments(name: str, rows: SegmentRows) -> dict[str, object]:
    """Where rows lie, as the arguments `{name}_slots`, `{name}_first`, `{name}_row` and `{name}_head` of a kernel."""
    slots, first = (None, rows.slots.start) if isinstance(rows.slots, slice) else (rows.slots, 0)
    return {
        f"{name}_slots": slots,
        f"{name}_first": first,
        f"{name}_row": rows.data.stride(0),
        f"{name}_head": rows.data.stride(1),
    }


PLACE_TYPES = {
    "source_slots": "*i64",
    "out_slots": "*i64",
    "source_first": "i32",
    "out_first": "i32",
    "source_row": "i32",
    "source_head": "i32",
    "out_row": "i32",
    "out_head": "i32",
    "length": "i32",
    "dim": "i32",
}
"""Types of the arguments that say where rows lie, for `CompileCase`."""
ROTATION_TYPES = {"cos": "*fp32", "sin": "*fp32", "turn_stride": "i32", "half": "i32"}
ALIGNED = frozenset({"source_row", "source_head", "out_row", "out_head", "dim", "half", "turn_stride"})


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that `rotate_triton` chooses, of usual heads."""
    return tuple(
        CompileCase(
            name=f"d {dim}, {dtype}, {layout}",
            kernel=_rotate,
            signature={"source": f"*{dtype}", "out": f"*{dtype}", **PLACE_TYPES, **ROTATION_TYPES},
            constants={"LAYOUT": number, "BLOCK_T": _tokens_of(dim), "BLOCK_D": dim},
            aligned=ALIGNED,
        )
        for dim in (64, 128, 256)
        for dtype in ("bf16", "fp32")
        for layout, number in (("neox", NEOX), ("gptj", GPTJ))
    )
