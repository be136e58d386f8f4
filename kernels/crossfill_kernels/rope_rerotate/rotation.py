"""How far the keys of a segment turn, as sines and cosines."""

from dataclasses import dataclass
from typing import Literal

import torch

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.segments import SegmentRows

Layout = Literal["neox", "gptj"]
"""Which dimensions turn together: `neox` i and i + d_rot/2 (Llama, Qwen), `gptj` 2i and 2i + 1 (GPT-J, GLM)."""


@dataclass(frozen=True)
class Rotation:
    """Made once a forward pass by `rotation_by`, used in every layer.

    Attributes:
        cos, sin: contiguous float32 [T, d_rot/2], or [1, d_rot/2] for one rotation of all tokens.
        layout: which dimensions turn together.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout = "neox"

    @property
    def half(self) -> int:
        """Half of the rotated dimensions, d_rot/2."""
        return self.cos.shape[1]

    def check(self, source: SegmentRows) -> None:
        """Raise an ArgumentError unless this turns the keys of `source`."""
        for table in (self.cos, self.sin):
            if table.dtype != torch.float32 or table.shape != self.cos.shape or not table.is_contiguous():
                got = f"{table.dtype} {list(table.shape)}"
                raise ArgumentError("rotation", f"want contiguous float32 tables of one shape, got {got}")
        if self.cos.shape[0] not in (1, source.length):
            raise ArgumentError("rotation", f"{self.cos.shape[0]} rotations for {source.length} keys")
        if 2 * self.half > source.dim:
            raise ArgumentError("rotation", f"turns {2 * self.half} of {source.dim} dimensions")
        if self.cos.device != source.data.device:
            raise ArgumentError("rotation", f"want it on {source.data.device}, got {self.cos.device}")


def rotation_by(delta: int | torch.Tensor, inv_freq: torch.Tensor, *, layout: Layout = "neox") -> Rotation:
    """The rotation of keys that move `delta` positions.

    The angles are made in float64: a float32 angle of 100,000 positions is off by up to 4e-3.

    Args:
        delta: positions, one number for all keys or int64 [T] on the device of `inv_freq`.
        inv_freq: float32 [d_rot/2], the model's inverse frequencies, scaling included.
        layout: which dimensions turn together.

    Raises:
        ArgumentError: a shape, dtype or device does not fit, or the layout is unknown.
    """
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32 or inv_freq.numel() == 0:
        raise ArgumentError("inv_freq", f"want float32 [d_rot/2], got {inv_freq.dtype} {list(inv_freq.shape)}")
    if layout not in ("neox", "gptj"):
        raise ArgumentError("layout", f"want neox or gptj, got {layout}")
    if isinstance(delta, torch.Tensor):
        if delta.dim() != 1 or delta.dtype != torch.int64 or delta.device != inv_freq.device:
            got = f"{delta.dtype} {list(delta.shape)} on {delta.device}"
            raise ArgumentError("delta", f"want an int or int64 [T] on {inv_freq.device}, got {got}")
        angle = delta.double()[:, None] * inv_freq.double()
    else:
        angle = delta * inv_freq.double()[None]
    return Rotation(angle.cos().float(), angle.sin().float(), layout)
