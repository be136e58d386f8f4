"""Mixtures of heads: weights that are at least 0 and sum to 1, fitted by squared error and by total variation.

MapFlow, § Calibration: a receiver's map is approximated by a mixture of the sender's, head by head. Squared errors need
nothing but moments (`engines.calibration.moments`); total variation, half the sum of absolute errors, is fitted by
reweighting them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engines.errors import CalibrationFitError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

# Of the objective's own scale: what the best weights could be better by, at most.
GAP = 1e-9
# Weights below this are tried without.
_DUST = 1e-4
_MOST_STEPS = 20_000
# Entries of which products are formed at once.
_ENTRIES = 2**15
_ROUNDS = 60
# An error of this share of the target is rounding.
_EXACT = 1e-12
# Smoothing of |x| as a share of the mean absolute error: from the first round to the last.
_SMOOTH_FROM, _SMOOTH_TO = 1.0, 1e-5


def fit_squares(gram: Floats, cross: Floats, start: Floats | None = None) -> Floats:
    """Weights [K, N] of the least ½wᵀGw - bᵀw on the simplex, for each column b of `cross` [K, N]; zeros are zeros.

    Args:
        gram: [K, K], symmetric and positive semidefinite; it may be singular.
        cross: [K, N].
        start: [K, N], on the simplex; uniform without it.

    Raises:
        CalibrationFitError: shapes do not fit, a number is not finite, or the best weights were not reached.
    """
    _check(gram, cross)
    weights = np.full_like(cross, 1 / len(gram)) if start is None else start.copy()
    for column in range(cross.shape[1]):
        weights[:, column] = _pairwise(gram, cross[:, column], weights[:, column])
    return weights


def _pairwise(gram: Floats, cross: Floats, weights: Floats) -> Floats:
    """Pairwise Frank-Wolfe (Lacoste-Julien 2015), exact steps: from the worst head with weight to the best one."""
    scale = max(float(np.abs(gram).max()), float(np.abs(cross).max()), np.finfo(np.float64).tiny)
    slope = gram @ weights - cross
    for step in range(_MOST_STEPS):
        best = int(np.argmin(slope))
        used = np.flatnonzero(weights)
        worst = int(used[np.argmax(slope[used])])
        # The gap bounds how far the objective is from its least value.
        if weights @ slope - slope[best] <= GAP * scale:
            return _without_dust(gram, cross, weights, GAP * scale)
        downhill = slope[worst] - slope[best]
        curve = gram[best, best] - 2 * gram[best, worst] + gram[worst, worst]
        whole = weights[worst]
        part = whole if curve * whole <= downhill else downhill / curve
        weights[best] += part
        weights[worst] = 0.0 if part == whole else whole - part
        slope += part * (gram[:, best] - gram[:, worst])
        if step % 100 == 99:
            # Rounding adds up.
            weights /= weights.sum()
            slope = gram @ weights - cross
            weights = _settled(gram, cross, weights)
            slope = gram @ weights - cross
    raise CalibrationFitError(f"weights of {len(gram)} heads were not found in {_MOST_STEPS} steps")


def _without_dust(gram: Floats, cross: Floats, weights: Floats, gap: float) -> Floats:
    """The best weights of the heads that count, if all others do better without weight; else `weights`."""
    counting = np.where(weights > _DUST, weights, 0.0)
    settled = _settled(gram, cross, counting / counting.sum())
    slope = gram @ settled - cross
    return settled if settled @ slope - slope.min() <= gap else weights


def _settled(gram: Floats, cross: Floats, weights: Floats) -> Floats:
    """The best weights of the heads that have weight, if those are a mixture: where steps zigzag, this ends it."""
    used = np.flatnonzero(weights > 0)
    size = len(used)
    system = np.ones((size + 1, size + 1))
    system[:size, :size], system[size, size] = gram[np.ix_(used, used)], 0.0
    found = np.linalg.lstsq(system, np.append(cross[used], 1.0), rcond=None)[0][:size]
    if (found < 0).any() or abs(found.sum() - 1) > 1e-9:
        return weights
    settled = np.zeros_like(weights)
    settled[used] = found / found.sum()
    return settled


def squared_errors(gram: Floats, cross: Floats, power: Floats, weights: Floats) -> Floats:
    """Sum of squared errors [N] of weights [K, N], from moments; `power` [N] is that of no mixture at all."""
    found = np.einsum("kn,kl,ln->n", weights, gram, weights) - 2 * np.einsum("kn,kn->n", cross, weights) + power
    # Nothing but rounding makes it less.
    return np.asarray(np.maximum(found, 0.0))


def total_variations(sources: Floats, targets: Floats, weights: Floats) -> Floats:
    """Half the sum of absolute errors [N] of weights [K, N] as a share of each target's own sum.

    Args:
        sources: [K, M].
        targets: [N, M], at least 0.
    """
    found = np.zeros(len(targets))
    for start in range(0, targets.shape[1], _ENTRIES):
        part = slice(start, start + _ENTRIES)
        found += np.abs(targets[:, part] - weights.T @ sources[:, part]).sum(axis=1)
    whole = targets.sum(axis=1)
    return np.asarray(np.divide(found / 2, whole, out=np.zeros_like(found), where=whole > 0))


def fit_total_variation(sources: Floats, targets: Floats, start: Floats | None = None) -> Floats:
    """Weights [K, N] of the least total variation from each target, by iteratively reweighted squares.

    Args:
        sources: [K, M], one row a head of the sender.
        targets: [N, M], one row a head of the receiver.
        start: [K, N]; by default the weights of the least squared error. The result is never worse.

    Raises:
        CalibrationFitError: as `fit_squares`.
    """
    if sources.ndim != 2 or targets.ndim != 2 or sources.shape[1] != targets.shape[1] or not sources.size:
        raise CalibrationFitError(f"want [K, M] and [N, M], got {list(sources.shape)} and {list(targets.shape)}")
    weights = fit_squares(sources @ sources.T, sources @ targets.T) if start is None else start.copy()
    for row, target in enumerate(targets):
        weights[:, row] = _reweighted(sources, target, weights[:, row])
    return weights


def _reweighted(sources: Floats, target: Floats, weights: Floats) -> Floats:
    best, least = weights, float(np.abs(target - weights @ sources).sum())
    if least <= _EXACT * float(np.abs(target).sum()):
        return best
    mean = least / len(target)
    for smooth in np.geomspace(_SMOOTH_FROM, _SMOOTH_TO, _ROUNDS) * mean:
        gram, cross = _weighted_moments(sources, target, weights, float(smooth))
        weights = fit_squares(gram, cross[:, None], weights[:, None])[:, 0]
        error = float(np.abs(target - weights @ sources).sum())
        if error < least:
            best, least = weights, error
    return best


def _weighted_moments(sources: Floats, target: Floats, weights: Floats, smooth: float) -> tuple[Floats, Floats]:
    """Moments in which an entry counts by one over its smoothed absolute error."""
    gram, cross = np.zeros((len(sources), len(sources))), np.zeros(len(sources))
    for start in range(0, len(target), _ENTRIES):
        part = slice(start, start + _ENTRIES)
        own = sources[:, part]
        error = target[part] - weights @ own
        weighted = own / np.sqrt(error * error + smooth * smooth)
        gram += weighted @ own.T
        cross += weighted @ target[part]
    return gram, cross


def _check(gram: Floats, cross: Floats) -> None:
    heads = len(gram)
    if not heads or gram.shape != (heads, heads) or cross.ndim != 2 or len(cross) != heads:
        raise CalibrationFitError(f"want [K, K] and [K, N], got {list(gram.shape)} and {list(cross.shape)}")
    if not (np.isfinite(gram).all() and np.isfinite(cross).all()):
        raise CalibrationFitError("moments have numbers that are not finite")
