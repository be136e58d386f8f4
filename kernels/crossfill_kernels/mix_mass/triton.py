"""Quantised masses on a GPU: made without sorting, and mixed without being unpacked in memory."""

from functools import cache

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.mix_mass.codes import QuantisedMass, thresholds
from crossfill_kernels.select_blocks.triton import NO_CAP, compact, configuration, greatest
from crossfill_kernels.triton_parts import padded

TILE = 64
"""Column blocks mixed by a program; the tile, its lists and the weights of 32 senders take 128 registers or less."""

RECEIVERS = 32
"""Receiver heads mixed by a program."""


@triton.jit(do_not_specialize=["row_blocks", "columns"])
def _quantise(
    mass,
    mass_head,
    mass_row,
    blocks,
    totals,
    targets,
    least,
    flags,
    codes,
    counts,
    row_blocks,
    columns,
    most,
    COLUMNS: tl.constexpr,
):
    entry = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    causal = (column <= tl.load(blocks + entry)) & (column < columns)
    row = tl.load(mass + head * mass_head + entry * mass_row + column, mask=causal, other=0.0)
    share = tl.div_rn(row, tl.load(totals + entry))
    # How many of the 256 thresholds are not above the share.
    code = tl.zeros([COLUMNS], tl.int32)
    for step in range(8):
        higher = code + (128 >> step)
        code = tl.where(tl.load(least + higher - 1) <= share, higher, code)
    code += (tl.load(least + code) <= share).to(tl.int32) - 1
    key = tl.where(row > 0, row.to(tl.int32, bitcast=True), 0)
    target = tl.load(targets + entry)
    kept = greatest(key, row.to(tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.int32), target, most)
    kept = kept & (code >= 0)
    line = head * row_blocks + entry
    tl.store(flags + line * columns + column, kept.to(tl.int8), mask=column < columns)
    tl.store(codes + line * columns + column, tl.maximum(code, 0).to(tl.uint8), mask=column < columns)
    tl.store(counts + line, tl.sum(kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["row_blocks", "columns_count"])
def _mix(
    offsets,
    columns,
    codes,
    weights,
    weights_row,
    weights_column,
    mass,
    row_blocks,
    columns_count,
    senders,
    receivers,
    SENDERS: tl.constexpr,
    RECEIVERS: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    entry = tl.program_id(0)
    sender = tl.arange(0, SENDERS)
    receiver = tl.program_id(2) * RECEIVERS + tl.arange(0, RECEIVERS)
    wanted = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    listed = offsets + sender.to(tl.int64) * row_blocks + entry
    low = tl.load(listed, mask=sender < senders, other=0)[:, None] + tl.zeros([SENDERS, TILE], tl.int32)
    end = tl.load(listed + 1, mask=sender < senders, other=0)[:, None] + tl.zeros([SENDERS, TILE], tl.int32)
    high = end
    # The place of each column in the sender's list, by halving.
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        before = tl.load(columns + middle, mask=searching, other=0) < wanted
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & ~before, middle, high)
    found = tl.load(columns + low, mask=low < end, other=-1) == wanted
    code = tl.load(codes + low, mask=found, other=0).to(tl.float32)
    share = tl.where(found, tl.exp2((code - 255.0) / 16.0), 0.0)  # [SENDERS, TILE]
    weight = tl.load(
        weights + sender[None, :] * weights_row + receiver[:, None] * weights_column,
        mask=(sender < senders)[None, :] & (receiver < receivers)[:, None],
        other=0.0,
    )  # [RECEIVERS, SENDERS]
    mixed = tl.dot(weight, share, input_precision="tf32x3")  # [RECEIVERS, TILE]
    line = receiver.to(tl.int64) * row_blocks + entry
    tl.store(
        mass + line[:, None] * columns_count + wanted,
        mixed,
        mask=(receiver < receivers)[:, None] & (wanted < columns_count),
    )


def quantise_mass_triton(mass: BlockMass, *, keep: float = 0.98) -> QuantisedMass:
    """`quantise_mass` on a GPU, or interpreted; the arguments are checked.

    Waits for the GPU, to cut the lists to length: they are about to be published.
    """
    heads, row_blocks, columns = mass.mass.shape
    flags = mass.mass.new_empty(heads * row_blocks, columns, dtype=torch.int8)
    codes = torch.empty_like(flags, dtype=torch.uint8)
    counts = mass.mass.new_empty(heads * row_blocks, dtype=torch.int32)
    line = mass.mass if mass.mass.stride(2) == 1 else mass.mass.contiguous()
    if counts.numel():
        _quantise[row_blocks, heads](
            *(line, line.stride(0), line.stride(1), mass.blocks, mass.totals, keep * mass.totals.double()),
            *(_thresholds(line.device), flags, codes, counts, row_blocks, columns, NO_CAP),
            **configuration(columns),
        )
    offsets, kept, kept_codes = compact(flags, counts, codes)
    length = int(offsets[-1])
    return QuantisedMass(heads, mass.blocks, offsets, kept[:length], kept_codes[:length])


def mix_mass_triton(mass: QuantisedMass, weights: torch.Tensor, columns: int) -> BlockMass:
    """`mix_mass` on a GPU, or interpreted; the arguments are checked."""
    row_blocks, receivers = mass.blocks.numel(), weights.shape[1]
    mixed = weights.new_empty(receivers, row_blocks, columns)
    if mixed.numel():
        _mix[row_blocks, triton.cdiv(columns, TILE), triton.cdiv(receivers, RECEIVERS)](
            *(mass.offsets, mass.columns, mass.codes, weights, weights.stride(0), weights.stride(1)),
            *(mixed, row_blocks, columns, mass.heads, receivers),
            SENDERS=padded(mass.heads),
            RECEIVERS=RECEIVERS,
            TILE=TILE,
            STEPS=columns.bit_length(),
        )
    return BlockMass(mixed, mass.blocks, weights.new_ones(row_blocks))


@cache
def _thresholds(device: torch.device) -> torch.Tensor:
    return thresholds(device)


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that the launchers choose, for 128K tokens and up to 32 heads."""
    options = configuration(2048)
    warps = options.pop("num_warps")
    masses = {
        **dict.fromkeys(("mass", "totals", "least"), "*fp32"),
        **dict.fromkeys(("blocks", "counts"), "*i32"),
        "targets": "*fp64",
        "flags": "*i8",
        "codes": "*u8",
    }
    lists = {"offsets": "*i32", "columns": "*i32", "codes": "*u8", "weights": "*fp32", "mass": "*fp32"}
    return (
        CompileCase("quantise, 2048 columns", _quantise, masses, options, warps),
        *(
            CompileCase(
                f"mix, {senders} sender heads",
                _mix,
                lists,
                {"SENDERS": senders, "RECEIVERS": RECEIVERS, "TILE": TILE, "STEPS": 12},
                tensor_cores=True,
            )
            for senders in (16, 32)
        ),
    )
