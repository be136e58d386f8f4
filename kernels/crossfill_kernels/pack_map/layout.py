"""From an index head by head to entries of all heads, row block by row block (MapFlow's BSR layout)."""

from dataclasses import dataclass

import torch

from crossfill_kernels.blocks import BlockIndex


@dataclass(frozen=True)
class Layout:
    """The entries of a packed map.

    Attributes:
        offsets: int32 [R + 1]; row block i owns entries `offsets[i]` … `offsets[i + 1] - 1`.
        columns: int32 [m], column block · H + head, ascending within a row block.
        order: int64 [m]; entry e is number `order[e]` in the columns of the index.
    """

    offsets: torch.Tensor
    columns: torch.Tensor
    order: torch.Tensor


def lay_out(index: BlockIndex, entries: int) -> Layout:
    """Put the kept blocks of an index in the order of a packed map.

    Args:
        index: the kept blocks.
        entries: how many there are, m; given, so that no GPU has to be waited for.
    """
    row_blocks, device = index.blocks.numel(), index.offsets.device
    if entries == 0 or row_blocks == 0:
        empty = torch.zeros(0, dtype=torch.int32, device=device)
        return Layout(torch.zeros(row_blocks + 1, dtype=torch.int32, device=device), empty, empty.long())
    lengths = index.offsets.diff().long()
    lists = torch.arange(lengths.numel(), device=device)
    entry = torch.repeat_interleave(lists, lengths, output_size=entries)
    head, row = entry // row_blocks, entry % row_blocks
    column = index.columns[:entries].long() * index.heads + head
    # No column reaches 2^32, so that the row block decides first.
    order = ((row << 32) | column).argsort()
    offsets = torch.zeros(row_blocks + 1, dtype=torch.int32, device=device)
    offsets[1:] = lengths.view(index.heads, row_blocks).sum(dim=0).cumsum(0)
    return Layout(offsets, column[order].int(), order)
