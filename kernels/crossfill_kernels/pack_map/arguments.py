"""The one check of the arguments of `pack_map`."""

import torch

from crossfill_kernels.arguments import check_cache, check_index, check_query, check_scale, check_slots
from crossfill_kernels.blocks import BlockIndex, MapStorage
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import Rows
from crossfill_kernels.slots import Slots


def check(  # noqa: PLR0913  # the arguments of the op
    query: torch.Tensor,
    key_cache: torch.Tensor,
    slots: Slots,
    rows: Rows,
    index: BlockIndex,
    *,
    scale: float,
    storage: MapStorage,
    slot_ids: torch.Tensor,
    lse: torch.Tensor | None,
    renormalise: bool,
) -> None:
    """Raise an ArgumentError that names the first argument of `pack_map` that does not fit."""
    check_query(query, rows)
    check_cache("key_cache", key_cache, query)
    check_slots(slots, key_cache.shape[0], rows)
    check_scale(scale)
    check_index(index, rows, query)
    if storage.blocks.device != query.device:
        raise ArgumentError("storage", f"on {storage.blocks.device}, query on {query.device}")
    _check_slot_ids(slot_ids, index, storage)
    if lse is None and not renormalise:
        raise ArgumentError("lse", "needed for probabilities that are not renormalised")
    if lse is not None and (lse.shape != query.shape[:2] or lse.dtype != torch.float32 or lse.device != query.device):
        raise ArgumentError("lse", f"want float32 {list(query.shape[:2])}, got {lse.dtype} {list(lse.shape)}")


def _check_slot_ids(slot_ids: torch.Tensor, index: BlockIndex, storage: MapStorage) -> None:
    if slot_ids.dtype != torch.int32 or slot_ids.dim() != 1 or not slot_ids.is_contiguous():
        raise ArgumentError("slot_ids", f"want contiguous int32 [m], got {slot_ids.dtype} {list(slot_ids.shape)}")
    if slot_ids.device != storage.blocks.device:
        raise ArgumentError("slot_ids", f"want it on {storage.blocks.device}, got {slot_ids.device}")
    if slot_ids.is_cuda:
        return
    kept = int(index.offsets[-1])
    if slot_ids.numel() != kept:
        raise ArgumentError("slot_ids", f"want one for each of the {kept} kept blocks, got {slot_ids.numel()}")
    if kept and not 0 <= int(slot_ids.min()) <= int(slot_ids.max()) < storage.blocks.shape[0]:
        raise ArgumentError("slot_ids", f"a slot leaves the storage of {storage.blocks.shape[0]} slots")
    if torch.unique(slot_ids).numel() != kept:
        raise ArgumentError("slot_ids", "a slot is named twice")
