"""A ridge map, and the form in which it is applied."""

from dataclasses import dataclass
from functools import cached_property

import torch

from crossfill_kernels.errors import ArgumentError

KERNEL_RANK = 64
"""Greatest inner rank of the fused GPU kernel; float32 spills at 128."""


@dataclass(frozen=True)
class Folded:
    """f(x) = (x - mean) · down · up + bias; without `up`, (x - mean) · down + bias.

    Attributes:
        down: float32 [D, k].
        up: float32 [k, D], or None (k = D).
    """

    down: torch.Tensor
    up: torch.Tensor | None


@dataclass(frozen=True)
class RidgeMap:
    """f(x) = (x - mean) P M Q + bias on rows of D numbers; tensors contiguous float32 on one device.

    Attributes:
        mean: [D].
        weights: M, [r_in, r_out].
        bias: [D].
        basis_in: P, [D, r_in]; None: the identity (r_in = D).
        basis_out: Q, [r_out, D]; None: the identity (r_out = D).
    """

    mean: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    basis_in: torch.Tensor | None = None
    basis_out: torch.Tensor | None = None

    def __post_init__(self) -> None:
        width = self.mean.numel()
        inner = self.weights.shape if self.weights.dim() == 2 else (-1, -1)
        wanted: tuple[tuple[str, torch.Tensor | None, tuple[int, ...]], ...] = (
            ("mean", self.mean, (width,)),
            ("weights", self.weights, (*inner,)),
            ("bias", self.bias, (width,)),
            ("basis_in", self.basis_in, (width, inner[0])),
            ("basis_out", self.basis_out, (inner[1], width)),
        )
        for name, tensor, shape in wanted:
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise ArgumentError(name, f"want contiguous float32 {list(shape)}, got {got}")
            if tensor.device != self.mean.device:
                raise ArgumentError(name, f"want it on {self.mean.device}, got {tensor.device}")
        for name, basis, side in (("basis_in", self.basis_in, inner[0]), ("basis_out", self.basis_out, inner[1])):
            if basis is None and side != width:
                raise ArgumentError(name, f"without it weights have {width} on that side, got {list(inner)}")

    @cached_property
    def folded(self) -> Folded:
        """The form with the fewest products; made once, in float64."""
        weights = self.weights.double()
        down, up = weights, None
        if self.basis_in is None and self.basis_out is not None:
            up = self.basis_out.double()
        elif self.basis_in is not None:
            down, up = self.basis_in.double(), weights
            if self.basis_out is not None:
                narrow_out = weights.shape[1] <= weights.shape[0]
                other = self.basis_out.double()
                down, up = (down @ weights, other) if narrow_out else (down, weights @ other)
        return Folded(down.float().contiguous(), None if up is None else up.float().contiguous())

    @property
    def fits_kernel(self) -> bool:
        """Whether the fused GPU kernel can apply it."""
        return self.folded.up is not None and self.folded.up.shape[0] <= KERNEL_RANK

    def to(self, device: torch.device | str) -> "RidgeMap":
        """The same map, with its tensors on `device`."""
        bases = (basis if basis is None else basis.to(device) for basis in (self.basis_in, self.basis_out))
        return RidgeMap(self.mean.to(device), self.weights.to(device), self.bias.to(device), *bases)
