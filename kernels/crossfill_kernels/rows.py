"""Which positions of a request the query rows of a call stand at, and the row blocks they fall into."""

from dataclasses import dataclass

import torch

from crossfill_kernels.errors import ArgumentError

BLOCK = 64
"""Rows and columns of a block of an attention map; also the tokens of a page in the store."""


@dataclass(frozen=True)
class Rows:
    """Positions of a call's query rows, in ascending order, with gaps where rows were left out.

    Made once a forward pass by `rows_at`, used in every layer.

    Attributes:
        positions: int64 [n], strictly ascending.
        blocks: int32 [R], the row blocks that hold a row, ascending: block b has positions 64·b … 64·b + 63.
        starts: int32 [R + 1]; the rows of `blocks[i]` are `starts[i]` … `starts[i + 1] - 1`.
        last: the greatest position, -1 without rows; kept on the host so that checks need no device.
    """

    positions: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    last: int

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("positions", self.positions, torch.int64),
            ("blocks", self.blocks, torch.int32),
            ("starts", self.starts, torch.int32),
        ):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ArgumentError(name, f"want contiguous {dtype} [n], got {tensor.dtype} {list(tensor.shape)}")
            if tensor.device != self.positions.device:
                raise ArgumentError(name, f"on {tensor.device}, positions on {self.positions.device}")
        if self.starts.numel() != self.blocks.numel() + 1:
            raise ArgumentError("starts", f"want {self.blocks.numel() + 1}, got {self.starts.numel()}")

    @property
    def count(self) -> int:
        """Number of rows n."""
        return self.positions.numel()

    @property
    def block_count(self) -> int:
        """Number of row blocks R."""
        return self.blocks.numel()

    def to(self, device: torch.device | str) -> "Rows":
        """The same rows, with their tensors on `device`."""
        return Rows(self.positions.to(device), self.blocks.to(device), self.starts.to(device), self.last)


def rows_at(positions: torch.Tensor | range) -> Rows:
    """Group query rows by row block; the only way to make `Rows` by hand.

    Args:
        positions: integers [n], strictly ascending and not negative; n may be 0.

    Returns:
        The rows, with tensors on the device of `positions` (CPU for a range).

    Raises:
        ArgumentError: the positions are no one-dimensional integers, are negative, or do not ascend.
    """
    if isinstance(positions, range):
        positions = torch.tensor(positions, dtype=torch.int64)
    if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("positions", f"want integers [n], got {positions.dtype} {list(positions.shape)}")
    # A copy: the caller may go on to change its own.
    host = positions.to("cpu", torch.int64, copy=True).contiguous()
    if host.numel() and (int(host[0]) < 0 or not bool((host.diff() > 0).all())):
        raise ArgumentError("positions", "want strictly ascending positions from 0 on")
    blocks, counts = torch.unique_consecutive(host // BLOCK, return_counts=True)
    starts = torch.zeros(blocks.numel() + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    last = int(host[-1]) if host.numel() else -1
    return Rows(host, blocks.int(), starts, last).to(positions.device)


def newest_rows(count: int, context: int) -> Rows:
    """The newest `count` rows of a request of `context` tokens: what a chunk of a prefill, or a decode, computes.

    As `rows_at` of their range, without its search for gaps: a decode makes one for each request at each step.
    """
    first = context - count
    if count <= 0 or first < 0:
        return rows_at(range(first, context))
    low, high = first // BLOCK, (context - 1) // BLOCK
    blocks = torch.arange(low, high + 1, dtype=torch.int32)
    starts = (torch.arange(low, high + 2, dtype=torch.int32) * BLOCK - first).clamp(0, count)
    return Rows(torch.arange(first, context), blocks, starts, context - 1)
