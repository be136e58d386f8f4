"""What the Triton kernels share: where rows and keys stand, products that keep float32 exact, one softmax step.

Matrix products of float32 use "tf32x3": three tensor-core products carry what one TF32 product (10 bits) drops, with an
error of about 1e-6. "ieee" is as exact, but runs outside the tensor cores. bfloat16 ignores the choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

LOG2_E = tl.constexpr(1.4426950408889634)
TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8"}
"""Triton's names of the dtypes that kernels take."""

COMPILED = (
    (torch.bfloat16, 128, False),
    (torch.bfloat16, 128, True),
    (torch.bfloat16, 64, True),
    (torch.bfloat16, 256, True),
    (torch.float32, 128, False),
    (torch.float32, 64, True),
)
"""(dtype, head dimension, paged) that attention kernels are compiled for without a GPU; the rest needs less."""

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cache_rows(slots, first, block, seen, BLOCK: tl.constexpr, PAGED: tl.constexpr):
    """Where the keys of a column block stand: a cache row and, from there, rows [BLOCK]; those that are `seen`.

    Consecutive rows are 32-bit steps from one 64-bit row, which saves a kernel a dozen registers.
    """
    lanes = tl.arange(0, BLOCK)
    if PAGED:
        base = tl.zeros([], tl.int64)
        rows = tl.load(slots + block * BLOCK + lanes, mask=seen, other=0)
    else:
        base = first.to(tl.int64) + block * BLOCK
        rows = lanes
    return base, rows


@triton.jit
def load_rows(pointer, rows, row_stride, seen, D: tl.constexpr, D_PADDED: tl.constexpr, COMPUTE: tl.constexpr):
    """Vectors [N, D_PADDED] at `rows`, zero where not `seen` and beyond D."""
    dims = tl.arange(0, D_PADDED)
    mask = seen[:, None]
    if D != D_PADDED:
        mask = mask & (dims < D)[None, :]
    tile = tl.load(pointer + rows[:, None] * row_stride + dims[None, :], mask=mask, other=0.0)
    return tile.to(COMPUTE)


@triton.jit
def store_rows(pointer, rows, row_stride, tile, seen, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Write vectors [N, D_PADDED] to `rows` where `seen`."""
    dims = tl.arange(0, D_PADDED)
    mask = seen[:, None]
    if D != D_PADDED:
        mask = mask & (dims < D)[None, :]
    at = pointer + rows[:, None] * row_stride + dims[None, :]
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def query_of(
    query, rows, query_row, present, D: tl.constexpr, D_PADDED: tl.constexpr, CHUNK: tl.constexpr, COMPUTE: tl.constexpr
):
    """The query rows [M, D_PADDED] for `scores`; nothing if those are computed in chunks."""
    if CHUNK == D_PADDED:  # noqa: SIM108  # in Triton the branches of a ternary need one type
        q = load_rows(query, rows, query_row, present, D, D_PADDED, COMPUTE)
    else:
        q = 0
    return q


@triton.jit
def scores(
    q,
    query,
    rows,
    query_row,
    present,
    keys,
    key_rows,
    key_row,
    seen,
    scale,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Scores [M, N] in powers of two of query `rows` and `key_rows`.

    float32 is multiplied in chunks of the head dimension: the parts that "tf32x3" makes of whole rows spill.
    """
    if CHUNK == D_PADDED:
        k = load_rows(keys, key_rows, key_row, seen, D, D_PADDED, COMPUTE)  # [N, D]
        score = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    else:
        score = tl.zeros([rows.shape[0], key_rows.shape[0]], tl.float32)
        for left in range(0, D_PADDED, CHUNK):
            dims = left + tl.arange(0, CHUNK)
            inside = (dims < D)[None, :]
            q_at = query + rows[:, None] * query_row + dims[None, :]
            k_at = keys + key_rows[:, None] * key_row + dims[None, :]
            q_part = tl.load(q_at, mask=present[:, None] & inside, other=0.0).to(COMPUTE)  # [M, CHUNK]
            k_part = tl.load(k_at, mask=seen[:, None] & inside, other=0.0).to(COMPUTE)  # [N, CHUNK]
            score = tl.dot(q_part, tl.trans(k_part), score, input_precision="tf32x3")
    return score * (scale * LOG2_E)


@triton.jit
def softmax_step(state, most, total, score, value):
    """Take one block of keys into a running softmax.

    state [M, D] and total [M] are relative to 2^most; score [M, N]; value [N, D]. Returns them renewed, and what the
    block itself adds to the total.
    """
    renewed = tl.maximum(most, tl.max(score, 1))
    share = tl.exp2(score - renewed[:, None])  # [M, N]
    added = tl.sum(share, 1)
    keep = tl.exp2(most - renewed)
    state = tl.dot(share.to(value.dtype), value, state * keep[:, None], input_precision="tf32x3")
    return state, renewed, total * keep + added, added


@triton.jit
def row_in_block(positions, starts, entry, block, BLOCK: tl.constexpr):
    """Which query row, int64 [BLOCK], stands at each place of a row block; -1 where none does."""
    lanes = tl.arange(0, BLOCK)
    start = tl.load(starts + entry)
    present = lanes < tl.load(starts + entry + 1) - start
    place = tl.load(positions + start + lanes, mask=present, other=-1) - block * BLOCK  # [BLOCK]
    found = (place[None, :] == lanes[:, None]) & present[None, :]  # [place, row]
    return tl.sum(tl.where(found, start + lanes[None, :] + 1, 0), 1).to(tl.int64) - 1


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts a 64 × 64 block of scores, and how it is launched.

    Attributes:
        keys: keys of a tile, a divisor of 64.
        chunk: head dimensions multiplied at once.
        num_warps, num_stages: launch options.
    """

    keys: int
    chunk: int
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict[str, int]:
        """The launch options by name."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiling_of(dtype: torch.dtype, d: int) -> Tiling:
    """The tiling of attention scores, chosen by what `triton_resources.py` says.

    bfloat16 at d 128 takes 4 warps and up to 255 registers without a spill, two programs beside each other; a third
    stage still fits twice into the shared memory of an H100. float32 spills with 32 keys, whole rows, or 4 warps;
    it does so at d 256 whatever the tiling (26 registers and more on an H100), and is merely slower for it.
    """
    if dtype == torch.bfloat16 and d > 128:
        return Tiling(keys=32, chunk=padded(d), num_warps=8, num_stages=2)
    if dtype == torch.bfloat16:
        return Tiling(keys=64, chunk=padded(d), num_warps=4, num_stages=3)
    return Tiling(keys=16, chunk=min(32, padded(d)), num_warps=8, num_stages=1)


def padded(d: int) -> int:
    """The head dimension as a size of a Triton tensor that a matrix product takes."""
    return max(16, 1 << (d - 1).bit_length())


def compute_dtype(tensor: torch.Tensor) -> tl.dtype:
    """What a kernel multiplies `tensor` in: its own dtype; float32 when interpreted, where bfloat16 goes wrong."""
    return tl.bfloat16 if tensor.is_cuda and tensor.dtype == torch.bfloat16 else tl.float32


def slot_arguments(slots: Slots, rows: Rows) -> tuple[torch.Tensor, int, bool]:
    """Pointer, first row and PAGED for `cache_rows`; an unused pointer is that of the positions, also int64."""
    if isinstance(slots, slice):
        return rows.positions, slots.start, False
    return slots, 0, True


@cache
def generation(device: torch.device) -> int:
    """Which of `compilation.CAPABILITIES` a device has to be configured as; the newest when interpreted."""
    if device.type != "cuda":
        return 90
    return 90 if torch.cuda.get_device_capability(device)[0] >= 9 else 80


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 when interpreted, so that work is split there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def pointer_types(
    dtype: torch.dtype,
    tensors: Sequence[str],
    *,
    fp32: Sequence[str] = (),
    i32: Sequence[str] = (),
    floats: Sequence[str] = (),
) -> dict[str, str]:
    """Triton types of a kernel's arguments for `CompileCase`: pointers by what they point to, and numbers `floats`."""
    return {
        **dict.fromkeys(tensors, f"*{TYPE_NAMES[dtype]}"),
        **dict.fromkeys(fp32, "*fp32"),
        **dict.fromkeys(floats, "fp32"),
        **dict.fromkeys(("blocks", "starts", *i32), "*i32"),
        **dict.fromkeys(("slots", "positions"), "*i64"),
    }
