"""The one check of the arguments of `map_attention`."""

from typing import Literal, get_args

import torch

from crossfill_kernels.arguments import FLOATS, check_slots, check_weights
from crossfill_kernels.blocks import PackedMap
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots

Form = Literal["auto", "paper", "mix", "values_first", "sparse"]
FORMS: tuple[Form, ...] = get_args(Form)
"""Orders in which the same work can be done."""


def check(
    packed: PackedMap,
    weights: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    *,
    out: torch.Tensor,
    form: str,
) -> None:
    """Raise an ArgumentError that names the first argument of `map_attention` that does not fit."""
    if form not in FORMS:
        raise ArgumentError("form", f"want one of {', '.join(FORMS)}, got {form!r}")
    if value_cache.dim() != 3 or value_cache.dtype not in FLOATS or 0 in value_cache.shape[1:]:
        shape = list(value_cache.shape)
        raise ArgumentError("value_cache", f"want float32 or bfloat16 [rows, H_kv, d], got {value_cache.dtype} {shape}")
    check_weights(weights, packed.heads, value_cache.device)
    kv_heads = value_cache.shape[1]
    if weights.shape[1] % kv_heads:
        raise ArgumentError("weights", f"{weights.shape[1]} receiver heads are no multiple of {kv_heads} KV heads")
    wanted = (rows.count, weights.shape[1], value_cache.shape[2])
    if out.shape != wanted or out.dtype != value_cache.dtype or out.device != value_cache.device:
        raise ArgumentError("out", f"want {value_cache.dtype} {list(wanted)}, got {out.dtype} {list(out.shape)}")
    for name, tensor in (("value_cache", value_cache), ("out", out)):
        if tensor.stride(2) != 1:
            raise ArgumentError(name, f"want unit stride in the last dimension, got strides {tensor.stride()}")
    check_slots(slots, value_cache.shape[0], rows)
    if packed.storage.blocks.device != value_cache.device:
        raise ArgumentError("packed", f"want it on {value_cache.device}, got {packed.storage.blocks.device}")
    if not value_cache.is_cuda:
        _check_packed(packed, rows)


def packed_rows(packed: PackedMap, rows: Rows) -> torch.Tensor:
    """int64 [R]: which row block of `packed` each row block of `rows` is."""
    return torch.searchsorted(packed.blocks, rows.blocks)


def _check_packed(packed: PackedMap, rows: Rows) -> None:
    """Read the lists of the map; for the CPU, where that waits for nothing."""
    found = packed_rows(packed, rows)
    if packed.blocks.numel() == 0:
        missing = rows.block_count > 0
    else:
        missing = not torch.equal(packed.blocks[found.clamp(max=packed.blocks.numel() - 1)], rows.blocks)
    if missing:
        raise ArgumentError("rows", "a row block is not in the packed map")
    lengths = packed.offsets.diff().long()
    if int(packed.offsets[0]) != 0 or bool((lengths < 0).any()) or int(packed.offsets[-1]) != packed.columns.numel():
        raise ArgumentError("packed", f"want offsets that rise from 0 to {packed.columns.numel()}")
    if packed.columns.numel() == 0:
        return
    row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    if bool(((packed.columns.diff() <= 0) & (row.diff() == 0)).any()):
        raise ArgumentError("packed", "the columns of a row block do not ascend")
    limit = (packed.blocks[row] + 1) * packed.heads
    if bool(((packed.columns < 0) | (packed.columns >= limit)).any()):
        raise ArgumentError("packed", "a column block lies outside 0 … its row block")
    count = packed.storage.blocks.shape[0]
    if not 0 <= int(packed.slots.min()) <= int(packed.slots.max()) < count:
        raise ArgumentError("packed", f"a slot leaves the storage of {count} slots")
