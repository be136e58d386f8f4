"""What is kept of an attention map, by blocks of 64 × 64: masses, an index of kept blocks, packed probabilities.

Column block j holds positions 64·j … 64·j + 63, as row block b does. A row block's diagonal is the column block of its
own number; no block to the right of it is ever kept.
"""

from dataclasses import dataclass

import torch

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.rows import BLOCK


@dataclass(frozen=True)
class BlockMass:
    """Attention mass of every (head, row block, column block).

    Attributes:
        mass: float32 [H, R, C], sum over a row block's rows of the probability that falls into a column block; over
            C it sums to `totals`. Zero above the diagonal.
        blocks: int32 [R], the row blocks, ascending.
        totals: float32 [R], what a row block's masses sum to if none was left out: the number of its rows.
    """

    mass: torch.Tensor
    blocks: torch.Tensor
    totals: torch.Tensor

    def __post_init__(self) -> None:
        if self.mass.dim() != 3 or self.mass.dtype != torch.float32:
            raise ArgumentError("mass", f"want float32 [H, R, C], got {self.mass.dtype} {list(self.mass.shape)}")
        check_blocks(self.blocks, self.mass.shape[1])
        if self.totals.dtype != torch.float32 or self.totals.shape != self.blocks.shape:
            raise ArgumentError("totals", f"want float32 [{self.mass.shape[1]}], got {list(self.totals.shape)}")
        check_device(self.mass, blocks=self.blocks, totals=self.totals)


@dataclass(frozen=True)
class BlockIndex:
    """The kept column blocks of every (head, row block), head by head.

    Attributes:
        heads: number of heads H.
        blocks: int32 [R], the row blocks, ascending.
        offsets: int32 [H·R + 1]; entry (h, i) owns `columns[offsets[h·R + i] : offsets[h·R + i + 1]]`.
        columns: int32, ascending within an entry, none beyond the row block's own number. May be longer than
            `offsets[-1]` (a GPU then need not tell the host how much it kept).
    """

    heads: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    columns: torch.Tensor

    def __post_init__(self) -> None:
        check_blocks(self.blocks, self.blocks.numel())
        entries = self.heads * self.blocks.numel()
        for name, tensor, length in (("offsets", self.offsets, entries + 1), ("columns", self.columns, None)):
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ArgumentError(name, f"want contiguous int32 [n], got {tensor.dtype} {list(tensor.shape)}")
            if length is not None and tensor.numel() != length:
                raise ArgumentError(name, f"want {length} entries for {entries} lists, got {tensor.numel()}")
        check_device(self.blocks, offsets=self.offsets, columns=self.columns)

    def to(self, device: torch.device | str) -> "BlockIndex":
        """The same index, with its tensors on `device`."""
        return BlockIndex(self.heads, self.blocks.to(device), self.offsets.to(device), self.columns.to(device))

    def check_content(self) -> None:
        """Read the lists themselves. A GPU has to wait for this, so its kernels leave it to whoever made the index.

        Raises:
            ArgumentError: offsets fall or run beyond `columns`; a list does not ascend or leaves [0, diagonal].
        """
        offsets, columns = self.offsets.to("cpu", torch.int64), self.columns.to("cpu", torch.int64)
        lengths = offsets.diff()
        if int(offsets[0]) != 0 or bool((lengths < 0).any()) or int(offsets[-1]) > columns.numel():
            raise ArgumentError("offsets", f"want them to rise from 0 to at most {columns.numel()}")
        columns = columns[: int(offsets[-1])]
        entry = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        diagonal = self.blocks.to("cpu", torch.int64).repeat(self.heads)[entry]
        if bool(((columns < 0) | (columns > diagonal)).any()):
            raise ArgumentError("columns", "a column block lies outside 0 … its row block")
        if bool(((columns.diff() <= 0) & (entry.diff() == 0)).any()):
            raise ArgumentError("columns", "the column blocks of a list do not ascend")

    def mask(self, column_blocks: int) -> torch.Tensor:
        """The index as booleans [H, R, column_blocks]; on the device of the index."""
        lengths = self.offsets.diff().long()
        entry = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        flat = torch.zeros(lengths.numel(), column_blocks, dtype=torch.bool, device=lengths.device)
        flat[entry, self.columns[: entry.numel()].long()] = True
        return flat.view(self.heads, self.blocks.numel(), column_blocks)


def index_of(mask: torch.Tensor, blocks: torch.Tensor) -> BlockIndex:
    """The compact index of a mask of kept blocks.

    Args:
        mask: bool [H, R, C]; what lies beyond the diagonal is dropped.
        blocks: int32 [R], the row blocks, ascending.

    Raises:
        ArgumentError: shapes or dtypes do not fit.
    """
    if mask.dim() != 3 or mask.dtype != torch.bool:
        raise ArgumentError("mask", f"want bool [H, R, C], got {mask.dtype} {list(mask.shape)}")
    check_blocks(blocks, mask.shape[1])
    causal = torch.arange(mask.shape[2], device=mask.device)[None, :] <= blocks[:, None]
    kept = (mask & causal).flatten(0, 1)
    offsets = torch.zeros(kept.shape[0] + 1, dtype=torch.int32, device=mask.device)
    offsets[1:] = kept.sum(dim=1).cumsum(0)
    return BlockIndex(mask.shape[0], blocks, offsets, kept.nonzero()[:, 1].int().contiguous())


@dataclass(frozen=True)
class MapStorage:
    """Slots of 64 × 64 probabilities, the kernels' view of a block pool.

    Attributes:
        blocks: [S, 64, 64] (rows, columns), float32, bfloat16 or uint8.
        scales: float32 [S, 64], with uint8 only: the probability that code 1 stands for, a row of a slot.
    """

    blocks: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.uint8)
        if self.blocks.dim() != 3 or self.blocks.shape[1:] != (BLOCK, BLOCK) or self.blocks.dtype not in dtypes:
            raise ArgumentError(
                "blocks",
                f"want float32, bfloat16 or uint8 [S, 64, 64], got {self.blocks.dtype} {list(self.blocks.shape)}",
            )
        if not self.blocks.is_contiguous():
            raise ArgumentError("blocks", "want contiguous slots")
        if (self.scales is not None) != (self.blocks.dtype == torch.uint8):
            raise ArgumentError("scales", "uint8 slots have scales, others none")
        if self.scales is not None and (
            self.scales.shape != self.blocks.shape[:2]
            or self.scales.dtype != torch.float32
            or not self.scales.is_contiguous()
        ):
            raise ArgumentError("scales", f"want contiguous float32 {list(self.blocks.shape[:2])}")
        if self.scales is not None:
            check_device(self.blocks, scales=self.scales)


@dataclass(frozen=True)
class PackedMap:
    """Kept probabilities of one layer in BSR, all heads of a row block together (MapFlow, Algorithm 1).

    Attributes:
        heads: number of sender heads H_S.
        blocks: int32 [R], the row blocks, ascending.
        offsets: int32 [R + 1]; row block i owns entries `offsets[i]` … `offsets[i + 1] - 1`.
        columns: int32 [m], column block · H_S + head, ascending within a row block.
        slots: int32 [m], the entry's slot of `storage`.
        storage: the slots.
    """

    heads: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    storage: MapStorage

    def __post_init__(self) -> None:
        check_blocks(self.blocks, self.blocks.numel())
        for name, tensor in (("offsets", self.offsets), ("columns", self.columns), ("slots", self.slots)):
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ArgumentError(name, f"want contiguous int32 [n], got {tensor.dtype} {list(tensor.shape)}")
        if self.offsets.numel() != self.blocks.numel() + 1:
            raise ArgumentError("offsets", f"want {self.blocks.numel() + 1}, got {self.offsets.numel()}")
        if self.slots.shape != self.columns.shape:
            raise ArgumentError("slots", f"want one an entry {list(self.columns.shape)}, got {list(self.slots.shape)}")
        lists = {"offsets": self.offsets, "columns": self.columns, "slots": self.slots}
        check_device(self.blocks, **lists, storage=self.storage.blocks)


def check_device(first: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise an ArgumentError unless the others are where the first is."""
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ArgumentError(name, f"on {tensor.device}, its partners on {first.device}")


def check_blocks(blocks: torch.Tensor, count: int) -> None:
    """Raise an ArgumentError unless `blocks` is contiguous int32 [count]."""
    if blocks.dtype != torch.int32 or blocks.shape != (count,) or not blocks.is_contiguous():
        raise ArgumentError("blocks", f"want contiguous int32 [{count}], got {blocks.dtype} {list(blocks.shape)}")
