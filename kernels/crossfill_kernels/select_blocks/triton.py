"""Choice of column blocks on a GPU, without sorting and without telling the host how many were kept.

Masses are not negative, so their order is that of their bits: 31 halvings find the least mass that is kept, exactly.
"""

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import BlockIndex, BlockMass
from crossfill_kernels.compilation import CompileCase

NO_CAP = 2**31 - 1


@triton.jit
def greatest(key, value, held, count, target, most):
    """Which of the candidates [N] are kept, by falling key and the lower place first, until target or most is reached.

    key is int32, 0 for what is no candidate; value float64, equal for equal keys; held and count are the sum and the
    number of what is kept anyway.
    """
    threshold = tl.zeros([], tl.int32)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        above = key >= candidate
        reached = held + tl.sum(tl.where(above, value, 0.0), 0) >= target
        full = count + tl.sum(above.to(tl.int32), 0) >= most
        threshold = tl.where(reached | full, candidate, threshold)
    # Where neither is ever reached, every candidate is kept.
    threshold = tl.maximum(threshold, 1)
    above = key > threshold
    tie = key == threshold
    held += tl.sum(tl.where(above, value, 0.0), 0)
    count += tl.sum(above.to(tl.int32), 0)
    rank = tl.cumsum(tie.to(tl.int32), 0) - tie.to(tl.int32)
    before = held + rank.to(tl.float64) * tl.max(tl.where(tie, value, 0.0), 0)
    return above | (tie & (before < target) & (count + rank < most))


@triton.jit(do_not_specialize=["row_blocks", "columns", "most"])
def _select(
    mass,
    mass_head,
    mass_row,
    blocks,
    targets,
    flags,
    counts,
    row_blocks,
    columns,
    most,
    COLUMNS: tl.constexpr,
    KEEP_ALL: tl.constexpr,
):
    entry = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    block = tl.load(blocks + entry)
    causal = column <= block
    row = tl.load(mass + head * mass_head + entry * mass_row + column, mask=causal & (column < columns), other=0.0)
    forced = causal & ((column == 0) | (column == block))
    value = row.to(tl.float64)
    # A mass of zero is a candidate only where all are kept.
    key = row.to(tl.int32, bitcast=True) + KEEP_ALL
    key = tl.where(causal & ~forced, key, 0)
    held = tl.sum(tl.where(forced, value, 0.0), 0)
    count = tl.sum(forced.to(tl.int32), 0)
    kept = forced | greatest(key, value, held, count, tl.load(targets + entry), most)
    line = head * row_blocks + entry
    tl.store(flags + line * columns + column, kept.to(tl.int8), mask=column < columns)
    tl.store(counts + line, tl.sum(kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["columns"])
def _compact(flags, codes, offsets, out, out_codes, columns, COLUMNS: tl.constexpr, WITH_CODES: tl.constexpr):
    """Write the flagged columns of a line one after another, and their codes."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    kept = tl.load(flags + line * columns + column, mask=column < columns, other=0).to(tl.int32)
    at = tl.load(offsets + line) + tl.cumsum(kept, 0) - kept
    tl.store(out + at, column, mask=kept != 0)
    if WITH_CODES:
        code = tl.load(codes + line * columns + column, mask=column < columns, other=0)
        tl.store(out_codes + at, code, mask=kept != 0)


def select_blocks_triton(mass: BlockMass, *, top_p: float, cap: int | None = None) -> BlockIndex:
    """`select_blocks` on a GPU, or interpreted; the arguments are checked."""
    heads, row_blocks, columns = mass.mass.shape
    flags = mass.mass.new_empty(heads * row_blocks, columns, dtype=torch.int8)
    counts = mass.mass.new_empty(heads * row_blocks, dtype=torch.int32)
    line = mass.mass if mass.mass.stride(2) == 1 else mass.mass.contiguous()
    targets = mass.totals.double() * top_p
    if top_p == 1:
        targets.fill_(float("inf"))
    if counts.numel():
        _select[row_blocks, heads](
            *(line, line.stride(0), line.stride(1), mass.blocks, targets, flags, counts),
            *(row_blocks, columns, NO_CAP if cap is None else cap),
            KEEP_ALL=int(top_p == 1),
            **configuration(columns),
        )
    offsets, kept = compact(flags, counts, None)[:2]
    return BlockIndex(heads, mass.blocks, offsets, kept)


def compact(
    flags: torch.Tensor, counts: torch.Tensor, codes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lists of the flagged columns, line by line.

    Args:
        flags: int8 [lines, C].
        counts: int32 [lines], how many are flagged.
        codes: uint8 [lines, C], carried along if given.

    Returns:
        offsets int32 [lines + 1]; columns int32 and codes uint8, longer than `offsets[-1]`, for which nobody waits.
    """
    lines, columns = flags.shape
    offsets = counts.new_zeros(lines + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offsets[1:])
    kept = counts.new_empty(flags.numel())
    kept_codes = kept if codes is None else torch.empty_like(codes).flatten()
    if flags.numel():
        given = flags if codes is None else codes
        _compact[(lines,)](
            *(flags, given, offsets, kept, kept_codes, columns),
            WITH_CODES=codes is not None,
            **configuration(columns),
        )
    return offsets, kept, kept_codes


def configuration(columns: int) -> dict[str, int]:
    """A line lies wholly in the registers of its program: 8 masses a thread at most up to 128K tokens."""
    size = max(16, 1 << (columns - 1).bit_length())
    return {"COLUMNS": size, "num_warps": 1 if size <= 128 else 4 if size <= 1024 else 8}


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that the launchers choose, for 4K and 128K tokens."""
    cases = []
    for columns in (64, 2048):
        options = configuration(columns)
        warps = options.pop("num_warps")
        pointers = {"mass": "*fp32", "blocks": "*i32", "targets": "*fp64", "flags": "*i8", "counts": "*i32"}
        lists = {"flags": "*i8", "codes": "*u8", "offsets": "*i32", "out": "*i32", "out_codes": "*u8"}
        cases += [
            CompileCase(f"choose, {columns} columns", _select, pointers, options | {"KEEP_ALL": 0}, warps),
            CompileCase(f"compact, {columns} columns", _compact, lists, options | {"WITH_CODES": True}, warps),
        ]
    return tuple(cases)
