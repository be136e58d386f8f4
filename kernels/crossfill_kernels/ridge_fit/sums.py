"""The sums that a ridge fit needs of its rows, and the fit."""

import torch

from crossfill_kernels.arguments import FLOATS
from crossfill_kernels.errors import ArgumentError, SingularFitError
from crossfill_kernels.ridge_correct.ridge_map import RidgeMap

# Directions that vary less than this share of the strongest, per direction, are rounding of the sums.
_NOISE = 4 * torch.finfo(torch.float64).eps


class RidgeSums:
    """Streamed normal equations of f(x) = (x - mean) P M Q + bias.

    Attributes:
        rows: rows seen so far, n.
    """

    def __init__(
        self,
        width: int,
        *,
        basis_in: torch.Tensor | None = None,
        basis_out: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Sums of no rows.

        Args:
            width: numbers a row, D.
            basis_in: P, float32 [D, r_in], the part of x that the map looks at; None: all of it.
            basis_out: Q, float32 [r_out, D] with orthonormal rows, the part of y that it explains (the bias is of all
                of it); None: all of it.
            device: where the sums are; rows have to be there.

        Raises:
            ArgumentError: a basis does not fit, or the rows of `basis_out` are not orthonormal.
        """
        if width < 1:
            raise ArgumentError("width", f"want at least 1, got {width}")
        self._width = width
        self._basis_in = _basis("basis_in", basis_in, 0, width, device)
        self._basis_out = _basis("basis_out", basis_out, 1, width, device)
        if self._basis_out is not None:
            q = self._basis_out.double()
            if not torch.allclose(q @ q.mT, torch.eye(q.shape[0], dtype=q.dtype, device=q.device), atol=1e-4):
                raise ArgumentError("basis_out", "want orthonormal rows")
        sides = (
            width if self._basis_in is None else self._basis_in.shape[1],
            width if self._basis_out is None else self._basis_out.shape[0],
        )
        self.rows = 0
        self._x = torch.zeros(width, dtype=torch.float64, device=device)
        self._y = torch.zeros(width, dtype=torch.float64, device=device)
        self._xx = torch.zeros(sides[0], sides[0], dtype=torch.float64, device=device)
        self._xy = torch.zeros(sides, dtype=torch.float64, device=device)

    def add(self, source: torch.Tensor, target_delta: torch.Tensor) -> None:
        """Add the rows of a segment.

        Args:
            source: x, the aligned source, float32 or bfloat16 [T, D]; T may be 0.
            target_delta: y, what the target adds to it, [T, D].

        Raises:
            ArgumentError: a shape, dtype or device does not fit, or a number is not finite; the sums stay as they were.
        """
        for name, tensor in (("source", source), ("target_delta", target_delta)):
            if tensor.dim() != 2 or tensor.shape[1] != self._width or tensor.dtype not in FLOATS:
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise ArgumentError(name, f"want float32 or bfloat16 [T, {self._width}], got {got}")
            if tensor.device != self._x.device:
                raise ArgumentError(name, f"want it on {self._x.device}, got {tensor.device}")
            # One bad row would spoil the sums for good, so this is worth the wait for a GPU.
            if not bool(tensor.isfinite().all()):
                raise ArgumentError(name, "want finite numbers")
        if source.shape != target_delta.shape:
            raise ArgumentError("target_delta", f"want {source.shape[0]} rows, got {target_delta.shape[0]}")
        x, y = source.double(), target_delta.double()
        self.rows += x.shape[0]
        self._x += x.sum(dim=0)
        self._y += y.sum(dim=0)
        seen, explained = self._inner(x), self._outer(y)
        self._xx.addmm_(seen.mT, seen)
        self._xy.addmm_(seen.mT, explained)

    def merge(self, other: "RidgeSums") -> None:
        """Add the rows that `other` has seen; it stays as it is.

        Raises:
            ArgumentError: `other` has another width or device, or other bases.
        """
        if other._width != self._width or other._x.device != self._x.device:
            raise ArgumentError("other", f"want sums of width {self._width} on {self._x.device}")
        for basis, its in ((self._basis_in, other._basis_in), (self._basis_out, other._basis_out)):
            if basis is not its and (basis is None or its is None or not torch.equal(basis, its)):
                raise ArgumentError("other", "want sums in the same bases")
        self.rows += other.rows
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine.add_(theirs)

    def solve(self, ridge: float, *, rank: int | None = None) -> RidgeMap:
        """The map that minimises Σ ‖y Qᵀ - (x - mean) P M‖² + ridge · ‖M‖_F², with mean and bias those of the rows.

        Args:
            ridge: not negative, in units of the sum of squares of x: it weighs less with every row.
            rank: the best map whose M has at most this rank (reduced-rank ridge regression, Mukherjee and Zhu 2011);
                None: any.

        Raises:
            ArgumentError: `ridge` is negative or not finite, or `rank` is below 1.
            SingularFitError: there are too few rows, or x varies in too few directions, for a fit with so little ridge.
        """
        if not 0 <= ridge < float("inf"):
            raise ArgumentError("ridge", f"want a finite number from 0 on, got {ridge}")
        if rank is not None and rank < 1:
            raise ArgumentError("rank", f"want at least 1, got {rank}")
        if self.rows == 0:
            raise SingularFitError("no rows were added yet")
        mean, bias = self._x / self.rows, self._y / self.rows
        seen, explained = self._inner(mean), self._outer(bias)
        cross = self._xy - self.rows * torch.outer(seen, explained)
        variation, directions = torch.linalg.eigh(self._xx - self.rows * torch.outer(seen, seen))
        self._check_determined(variation, ridge)
        damped = variation.clamp_min(0.0) + ridge
        weights = directions @ ((directions.mT @ cross) / damped[:, None])  # [r_in, r_out]
        basis_out = self._basis_out
        if rank is not None and rank < min(weights.shape):
            # What the map explains, direction by direction of y.
            leading = torch.linalg.eigh(cross.mT @ weights)[1][:, -rank:]  # [r_out, rank]
            weights = weights @ leading
            basis_out = (leading.mT if basis_out is None else leading.mT @ basis_out.double()).float().contiguous()
        return RidgeMap(mean.float(), weights.float().contiguous(), bias.float(), self._basis_in, basis_out)

    def _check_determined(self, variation: torch.Tensor, ridge: float) -> None:
        size = variation.numel()
        if ridge == 0 and self.rows <= size:
            raise SingularFitError(f"{self.rows} rows for {size} directions; add rows, or give a ridge above 0")
        # Of the sums before the mean is taken off, which round first.
        noise = _NOISE * size * float(torch.linalg.matrix_norm(self._xx, 2))
        if float(variation[0]) + ridge <= noise:
            problem = f"x does not vary in all of its {size} directions"
            raise SingularFitError(f"{problem}; give a ridge above {noise:.1e}, or a smaller basis_in")

    def _sums(self) -> tuple[torch.Tensor, ...]:
        return self._x, self._y, self._xx, self._xy

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._basis_in is None else x @ self._basis_in.double()

    def _outer(self, y: torch.Tensor) -> torch.Tensor:
        return y if self._basis_out is None else y @ self._basis_out.double().mT


def _basis(
    name: str, basis: torch.Tensor | None, side: int, width: int, device: torch.device | str
) -> torch.Tensor | None:
    if basis is None:
        return None
    if basis.dim() != 2 or basis.dtype != torch.float32 or basis.shape[side] != width or basis.numel() == 0:
        raise ArgumentError(name, f"want float32 with {width} on side {side}, got {basis.dtype} {list(basis.shape)}")
    return basis.to(device).contiguous()
