"""The maths of the fit, from all rows at once."""

import torch

from crossfill_kernels.ridge_correct.ridge_map import RidgeMap


def ridge_fit_reference(source: torch.Tensor, target_delta: torch.Tensor, ridge: float) -> RidgeMap:
    """The full-rank map that minimises Σ ‖y - f(x)‖² + ridge · ‖M‖_F² over M and the bias.

    With centred rows this is ordinary least squares on [X; √ridge · I] and [Y; 0].

    Args:
        source: x, [n, D].
        target_delta: y, [n, D].
        ridge: not negative.

    Returns:
        The map, computed in float64.
    """
    x, y = source.double(), target_delta.double()
    mean, bias = x.mean(dim=0), y.mean(dim=0)
    width = x.shape[1]
    damping = ridge**0.5 * torch.eye(width, dtype=torch.float64)
    rows = torch.cat([x - mean, damping])
    wanted = torch.cat([y - bias, torch.zeros(width, width, dtype=torch.float64)])
    weights = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    return RidgeMap(mean.float(), weights.float().contiguous(), bias.float())
