"""Block masses as bytes: a code c stands for the fraction 2^((c - 255) / 16) of a row's mass."""

import functools
from dataclasses import dataclass

import torch

from crossfill_kernels.blocks import BlockIndex, check_device
from crossfill_kernels.errors import ArgumentError

STEPS = 16
"""Codes a factor of two: neighbours differ by 4.4 %, so that a code is within 2.2 % of what it stands for."""


@dataclass(frozen=True)
class QuantisedMass:
    """Block masses of H heads as fractions of a row's mass, head by head; blocks of little mass are left out.

    Attributes:
        heads: number of heads H.
        blocks: int32 [R], the row blocks, ascending.
        offsets: int32 [H·R + 1]; entry (h, i) owns `columns[offsets[h·R + i] : offsets[h·R + i + 1]]`, and the codes
            there.
        columns: int32 [m], ascending within an entry.
        codes: uint8 [m]; code c stands for 2^((c - 255) / 16).
    """

    heads: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    columns: torch.Tensor
    codes: torch.Tensor

    def __post_init__(self) -> None:
        # Lists of columns as an index has them, and a code for each.
        self._index()
        if self.codes.dtype != torch.uint8 or self.codes.shape != self.columns.shape or not self.codes.is_contiguous():
            raise ArgumentError(
                "codes", f"want contiguous uint8 {list(self.columns.shape)}, got {list(self.codes.shape)}"
            )
        check_device(self.blocks, codes=self.codes)

    def check_content(self, columns: int) -> None:
        """Read the lists themselves, as `BlockIndex.check_content` does.

        Args:
            columns: number of column blocks that they have to fit into.

        Raises:
            ArgumentError: offsets fall or do not end with the columns; a list does not ascend or leaves 0 … its row
                block; the row blocks do not ascend or leave 0 … columns - 1.
        """
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != self.columns.numel():
            raise ArgumentError("offsets", f"want them to rise from 0 to {self.columns.numel()}")
        if bool((self.blocks < 0).any()) or bool((self.blocks.diff() <= 0).any()):
            raise ArgumentError("blocks", "want ascending row blocks from 0 on")
        if self.blocks.numel() and int(self.blocks[-1]) >= columns:
            raise ArgumentError("columns", f"row block {int(self.blocks[-1])} in {columns} column blocks")
        self._index().check_content()

    def _index(self) -> BlockIndex:
        return BlockIndex(self.heads, self.blocks, self.offsets, self.columns)


@functools.cache
def fractions(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [256]: what each code stands for; made once, not to be written to."""
    return torch.exp2((torch.arange(256, dtype=torch.float64) - 255) / STEPS).float().to(device)


@functools.cache
def thresholds(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [256]: the least fraction that gets each code, half a step (in log) below what the code stands for.

    Compared with, not computed by a logarithm, so that every implementation gives the same codes.
    """
    return torch.exp2((torch.arange(256, dtype=torch.float64) - 255.5) / STEPS).float().to(device)
