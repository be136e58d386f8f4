"""Where a request's tokens stand in a paged KV cache."""

import torch

from crossfill_kernels.errors import ArgumentError

Slots = slice | torch.Tensor
"""Cache rows of positions 0 … T-1: a slice when consecutive (keys are then read in place), else int64 indices [T]."""


def as_slots(indices: torch.Tensor) -> Slots:
    """Turn cache indices into the form that `paged_attention` reads fastest.

    Args:
        indices: integer tensor [T], one cache row a position.

    Returns:
        A slice when the rows are consecutive, so that no key or value is copied; else the indices as int64.

    Raises:
        ArgumentError: `indices` is not a one-dimensional integer tensor.
    """
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("indices", f"want integers [T], got {indices.dtype} {list(indices.shape)}")
    length = indices.numel()
    if length == 0:
        return slice(0, 0)
    first = int(indices[0])
    # The comparison of the ends settles most scattered cases without reading the rest.
    if int(indices[-1]) - first == length - 1 and bool((indices.diff() == 1).all()):
        return slice(first, first + length)
    return indices.long()


def is_run(slots: slice) -> bool:
    """Whether a slice names its first row and the one after its last, and leaves none out."""
    return slots.start is not None and slots.stop is not None and slots.step in (None, 1) and slots.start <= slots.stop


def length_of(slots: Slots) -> int:
    """Number of positions that `slots` names."""
    return slots.stop - slots.start if isinstance(slots, slice) else slots.numel()
