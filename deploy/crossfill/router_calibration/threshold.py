"""The threshold that gives the strongest model a wanted share of queries, the noise of the policy counted in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

# Gauss-Hermite: for two models the error is below 1e-14.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_STEPS = 60


def expected_choice(quality: Matrix, tau: float, sigma: float) -> Matrix:
    """The chance of each model of the ladder for each query, [N, M], over the noise of `router.decision.policy`.

    Model m wins iff q_m - m·tau + eps_m is the largest, so its chance is E[prod_j Phi((s_m - s_j) / sigma + z)] with
    s = q - m·tau and z ~ N(0, 1). For two models that is Phi((q_L - q_S - tau) / (sigma sqrt 2)).
    """
    standing = quality - tau * np.arange(quality.shape[1])
    if sigma == 0:
        # argmax takes the first of equals: a tie goes to the weaker model, as in the policy.
        chosen: Matrix = np.eye(quality.shape[1])[standing.argmax(axis=1)]
        return chosen
    return np.stack([_chance(standing, model, sigma) for model in range(quality.shape[1])], axis=1)


def _chance(standing: Matrix, model: int, sigma: float) -> Matrix:
    others = np.delete(standing, model, axis=1)
    leads = (standing[:, [model]] - others) / sigma
    beats_all = ndtr(leads[:, :, None] + _NODES).prod(axis=1)
    chance: Matrix = beats_all @ _WEIGHTS / _WEIGHTS.sum()
    return chance


def solve_tau(quality: Matrix, share: float, sigma: float) -> float:
    """The tau, one number for all neighbours, that sends a mean `share` of the queries to the strongest model.

    Raising tau never wins it a query, so bisection finds it; of a sharp threshold (sigma 0) the nearest from above.
    """
    low = -1.0 - 10 * sigma + float(quality.min() - quality.max())
    high = 1.0 + 10 * sigma + float(quality.max() - quality.min())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if float(expected_choice(quality, middle, sigma)[:, -1].mean()) > share:
            low = middle
        else:
            high = middle
    return high
