"""Attention by mixed maps on a GPU: which kernel runs, in which configuration, over how many parts of a list."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.compilation import CompileCase
from crossfill_kernels.map_attention import triton_forms, triton_lists
from crossfill_kernels.map_attention.arguments import Form, packed_rows
from crossfill_kernels.map_attention.triton_lists import list_nonzero, list_runs
from crossfill_kernels.rows import BLOCK, Rows
from crossfill_kernels.slots import Slots
from crossfill_kernels.triton_parts import (
    TYPE_NAMES,
    compute_dtype,
    padded,
    pointer_types,
    processors,
    slot_arguments,
)

MOST_PARTS = 8
"""Parts of a list at most: each writes a float32 output of its own, which are added up in order."""

UNION_RATIO = 2.0
"""Positions that any sender head keeps, as a multiple of those that one keeps: 1.4 … 1.9 with nine heads of SmolLM2."""


@dataclass(frozen=True)
class _Plan:
    """A form's kernel, its programs for each row block, its constants beyond those of all forms, launch options."""

    programs: int
    constants: dict[str, object]
    launch: dict[str, int]


def map_attention_triton(
    packed: PackedMap,
    weights: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    out: torch.Tensor,
    form: Form = "auto",
) -> None:
    """`map_attention` on a GPU, or interpreted; the arguments are checked.

    `auto` is `mix` or `values_first`, by counts that the host knows: a choice by the weights, such as `sparse`, would
    have to wait for the GPU.
    """
    receivers, kv_heads, d = weights.shape[1], value_cache.shape[1], value_cache.shape[2]
    if packed.columns.numel() == 0:
        out.zero_()
        return
    chosen = _least_work(packed.heads, receivers, kv_heads, d) if form == "auto" else form
    plan = _plan(chosen, packed.heads, receivers, kv_heads, d, value_cache.dtype)
    parts = _parts(plan.programs * rows.block_count, packed.columns.numel() // packed.blocks.numel(), out.device)
    partial = out[None] if parts == 1 else out.new_empty(parts, *out.shape, dtype=torch.float32)
    lists, tail = _lists(chosen, packed, weights, kv_heads)
    pointer, first, paged = slot_arguments(slots, rows)
    storage = packed.storage
    getattr(triton_forms, chosen)[plan.programs, rows.block_count, parts](
        *(storage.blocks, storage.blocks if storage.scales is None else storage.scales),
        *(packed.columns, packed.slots, packed.offsets, packed_rows(packed, rows)),
        *(*lists, weights, weights.stride(0), weights.stride(1)),
        *(value_cache, value_cache.stride(0), value_cache.stride(1)),
        *(pointer, first, rows.positions, rows.blocks, rows.starts),
        *(partial, *partial.stride()[:3], *tail),
        PAGED=paged,
        CODES=storage.scales is not None,
        COMPUTE=compute_dtype(value_cache),
        **plan.constants,
        **plan.launch,
    )
    if parts > 1:
        # A sum over the first dimension has one order.
        out.copy_(partial.sum(dim=0))


def _least_work(senders: int, receivers: int, kv_heads: int, d: int) -> Form:
    """The form with fewer products, of a stored block and values or of a mixed block and values.

    With m stored blocks `values_first` does m · H_kv; `mix` does one for each of the H_R receiver heads and each of the
    m / H_S · UNION_RATIO positions, and in each a mixture over H_S of 64 columns, H_S / d of a product.
    """
    mixed = UNION_RATIO / senders * receivers * (1 + padded(senders) / d)
    return "values_first" if kv_heads < mixed else "mix"


def _lists(
    form: Form, packed: PackedMap, weights: torch.Tensor, kv_heads: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """What a form walks beside the entries, and its own last arguments."""
    if form == "sparse":
        return list_nonzero(packed, weights), (packed.columns.numel(), packed.blocks.numel())
    if form == "values_first":
        return (), ()
    if form == "mix":
        return list_runs(packed, LANES), (kv_heads,)
    return list_runs(packed, packed.heads), ()


def _parts(programs: int, entries: int, device: torch.device) -> int:
    """Parts of each list, so that about two programs a multiprocessor run, and no part is short."""
    wanted = triton.cdiv(2 * processors(device), programs)
    parts: int = min(wanted, MOST_PARTS, entries // 4)
    return max(1, parts)


def _plan(form: Form, senders: int, receivers: int, kv_heads: int, d: int, dtype: torch.dtype) -> _Plan:
    """The configuration of a form, chosen by what `triton_resources.py` says."""
    group = receivers // kv_heads
    small = dtype == torch.bfloat16
    constants: dict[str, object] = {"SENDERS": senders, "GROUP": group, "D": d, "BLOCK": BLOCK}
    # In bfloat16 4 warps spill: at d 128 10 registers in `paper` and 90 in `values_first`, in `mix` 6 with 40 heads. In
    # float32 8 do with 64 keys, and in `mix` on an A100 for a single KV head, whatever the tile.
    few = small and form != "mix" and (d <= 64 or (form == "sparse" and d <= 128))
    launch = {"num_warps": 4 if few else 8, "num_stages": 3 if small else 1}
    if form == "mix":
        group_padded = 1 << (group - 1).bit_length()
        kv_tile = min(8, max(1, MIXED_HEADS // group_padded), 1 << (kv_heads - 1).bit_length())
        if group_padded == 8:
            # One group alone would spill up to 41 registers on an A100, two do not; the second may be empty.
            kv_tile = 2
        rows = 8
        # Groups of 8 heads and more spill 15 … 34 registers with 64 dimensions.
        d_tile = min(64 if small and group_padded < 8 else 32, padded(d))
        constants |= {
            "LANES": LANES,
            "GROUP_PADDED": group_padded,
            "KV_TILE": kv_tile,
            "ROWS": rows,
            "D_TILE": d_tile,
        }
        programs = triton.cdiv(kv_heads, kv_tile) * (BLOCK // rows) * triton.cdiv(d, d_tile)
        return _Plan(programs, constants, launch)
    constants |= {"D_PADDED": padded(d), "KEYS": 64 if small else 16}
    if form == "paper":
        constants |= {"STAGES": 3}
    if form == "values_first":
        group_tile = min(2 if d <= 128 else 1, 1 << (group - 1).bit_length())
        return _Plan(kv_heads * triton.cdiv(group, group_tile), constants | {"GROUP_TILE": group_tile}, launch)
    return _Plan(receivers, constants, launch)


MIXED_HEADS = 16
"""Receiver heads that one program of `mix` serves."""

LANES = 16
"""Stored blocks of a position that `mix` mixes at once; with 64 it would need 197 KiB of shared memory."""


def compile_cases() -> tuple[CompileCase, ...]:
    """The configurations that the launcher chooses."""
    forms: tuple[Form, ...] = ("paper", "mix", "values_first", "sparse")
    bfloat16, float32, uint8 = torch.bfloat16, torch.float32, torch.uint8
    tensors = (
        (bfloat16, 128, bfloat16, False),
        (bfloat16, 128, uint8, True),
        (bfloat16, 64, uint8, False),
        (bfloat16, 256, uint8, True),
        (float32, 128, float32, True),
        (float32, 64, uint8, True),
    )
    return (
        *triton_lists.compile_cases(),
        *(_case(form, 16, dtype, d, stored, paged=paged) for form in forms for dtype, d, stored, paged in tensors),
        *(_case("mix", heads, bfloat16, 128, stored, paged=True) for heads in (32, 40) for stored in (bfloat16, uint8)),
    )


def _case(form: Form, heads: int, dtype: torch.dtype, d: int, stored: torch.dtype, *, paged: bool) -> CompileCase:
    plan, name = _plan(form, heads, heads, 8, d, dtype), TYPE_NAMES[dtype]
    lists = ("columns", "stored_at", "offsets", "firsts", "counts", "lists", "blocks")
    pointers = pointer_types(dtype, ("value_cache", "out"), fp32=("scales", "weights"), i32=lists)
    own = {"PAGED": paged, "CODES": stored == torch.uint8, "COMPUTE": tl.str_to_ty(name, None)}
    return CompileCase(
        name=f"{form}, {heads} heads, d {d}, {TYPE_NAMES[stored]} · {name}, {'paged' if paged else 'consecutive'}",
        kernel=getattr(triton_forms, form),
        signature=pointers | {"stored": f"*{TYPE_NAMES[stored]}", "places": "*i64"},
        constants=plan.constants | own,
        tensor_cores=True,
        num_warps=plan.launch["num_warps"],
        num_stages=plan.launch["num_stages"],
    )
