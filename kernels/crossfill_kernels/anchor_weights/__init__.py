"""Weights of anchors by their distances, and how undecided they are (KVCMAS, § Match).

g = softmax(-d / T) over the anchors; the entropy -Σ g ln g / ln N is 0 when one anchor has all the weight and 1 when
all weigh the same. Distances of whole segments are of the order of ‖C‖, so that the plain softmax gives nearly
everything to one anchor; scaled distances do not depend on the size of the segment. N is about ten: plain torch on any
device.
"""

from typing import Literal

import torch

from crossfill_kernels.errors import ArgumentError

__all__ = ["Scale", "anchor_weights", "normalised_entropy"]

Scale = Literal["none", "median", "sqrt_dim"]
"""What distances are divided by: nothing (the paper), their median over the anchors, or √(numbers compared)."""


def anchor_weights(
    distances: torch.Tensor, *, temperature: float, scale: Scale = "none", numbers: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax over the anchors of minus the scaled distance.

    Args:
        distances: float32 [N], or [N, T] for weights of each token; not negative, N ≥ 1. An infinite distance gives the
            anchor no weight, unless all are infinite; they then weigh the same.
        temperature: above 0, in units of the scaled distance.
        scale: what distances are divided by.
        numbers: with `sqrt_dim`, how many numbers went into a distance (tokens compared × D): one for all anchors, or
            integers [N]; a distance then is a root mean square.

    Returns:
        float32 in the shape of `distances`; sums to 1 over the anchors.

    Raises:
        ArgumentError: a shape or dtype does not fit, a distance is negative or not a number (looked at on a CPU only),
            the temperature is not above 0, or `numbers` is missing or out of place.
    """
    _check(distances, temperature, scale, numbers)
    scaled = distances
    if scale == "median":
        middle = distances.median(dim=0, keepdim=True).values
        # Where most anchors equal the segment the median is 0: the others are then infinitely far.
        scaled = (distances / middle).where(distances > 0, 0.0)
    elif scale == "sqrt_dim":
        count = torch.as_tensor(numbers, dtype=torch.float32, device=distances.device)
        per_anchor = count.view(-1, *[1] * (distances.dim() - 1)) if count.dim() else count
        scaled = distances / per_anchor.clamp_min(1.0).sqrt()
    # An infinite distance over an infinite median is not a number.
    far = torch.where(distances.isinf() | scaled.isinf(), torch.finfo(torch.float32).max, scaled)
    return torch.softmax(-(far - far.amin(dim=0, keepdim=True)) / temperature, dim=0)


def normalised_entropy(weights: torch.Tensor) -> torch.Tensor:
    """-Σ g ln g / ln N over the anchors: 0 for one-hot weights (and for N = 1), 1 for uniform ones.

    Args:
        weights: float32 [N] or [N, T], on the simplex over the anchors.

    Returns:
        float32 [] or [T].

    Raises:
        ArgumentError: a shape or dtype does not fit.
    """
    if weights.dim() not in (1, 2) or weights.dtype != torch.float32 or weights.shape[0] == 0:
        raise ArgumentError("weights", f"want float32 [N] or [N, T], got {weights.dtype} {list(weights.shape)}")
    anchors = weights.shape[0]
    if anchors == 1:
        return torch.zeros(weights.shape[1:], device=weights.device)
    largest = torch.tensor(anchors, dtype=torch.float64).log().item()
    entropy: torch.Tensor = -torch.special.xlogy(weights, weights).double().sum(dim=0) / largest
    return entropy.clamp(0.0, 1.0).float()


def _check(distances: torch.Tensor, temperature: float, scale: str, numbers: int | torch.Tensor | None) -> None:
    if distances.dim() not in (1, 2) or distances.dtype != torch.float32 or distances.shape[0] == 0:
        raise ArgumentError("distances", f"want float32 [N] or [N, T], got {distances.dtype} {list(distances.shape)}")
    if not distances.is_cuda and not bool((distances >= 0).all()):
        raise ArgumentError("distances", "want distances that are not negative")
    if not 0 < temperature < float("inf"):
        raise ArgumentError("temperature", f"want a finite number above 0, got {temperature}")
    if scale not in ("none", "median", "sqrt_dim"):
        raise ArgumentError("scale", f"want none, median or sqrt_dim, got {scale}")
    if (numbers is not None) != (scale == "sqrt_dim"):
        raise ArgumentError("numbers", "sqrt_dim has it, the other scales do not")
    if isinstance(numbers, torch.Tensor) and numbers.shape not in ((), distances.shape[:1]):
        raise ArgumentError("numbers", f"want one or [{distances.shape[0]}], got {list(numbers.shape)}")
