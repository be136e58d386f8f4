"""The whole of a calibration: split, fit, solve tau, and judge once on the held-out queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crossfill.router_calibration import metrics
from crossfill.router_calibration.data import split
from crossfill.router_calibration.fit import fit, input_matrix
from crossfill.router_calibration.threshold import expected_choice, solve_tau

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from crossfill.router_calibration.data import DataFile, ScoredPrompts
    from crossfill.router_calibration.fit import Fitted, Progress
    from crossfill.router_calibration.metrics import Calibration, Interval, QualityCurve

    Matrix = NDArray[np.float64]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the operator asks for; tau is solved for `target_large_share` at the noise `sigma`."""

    target_large_share: float = 0.3
    sigma: float = 0.1
    holdout: float = 0.3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """How well one model's quality is predicted on held-out queries."""

    name: str
    mean_score: float
    mean_predicted: float
    auc: float | None
    brier: float
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure with the 95 % interval from resampled queries; None where it has no meaning."""

    value: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """How good routing between the weakest and the strongest model is on held-out queries.

    `shares` are the expected shares of the models at tau, noise included; `recovered` is the PGR there.
    """

    curve: QualityCurve
    oracle: QualityCurve
    apgr: Measured
    cpt50: Measured
    cpt80: Measured
    shares: tuple[float, ...]
    large_share: Measured
    recovered: Measured
    apgr_cross_validated: float | None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A fitted scorer, its threshold and what it was measured to do; `quality` is predicted for `held_out`, [N, M]."""

    data: DataFile
    wanted: Wanted
    trained_on: int
    held_out: ScoredPrompts
    quality: Matrix
    fitted: Fitted
    tau: float
    models: tuple[ModelFigures, ...]
    routing: RoutingFigures


def calibrate(data: DataFile, wanted: Wanted, progress: Progress) -> Calibrated:
    """Fit and solve on the training part, then judge on the held-out part; raises CalibrationError.

    Tau is solved on out-of-fold predictions: those of a model on its own training queries are spread wider than on new
    ones, and would give another share.
    """
    training, held_out = split(data.prompts, wanted.holdout, wanted.seed)
    inputs = input_matrix((*training.prompts, *held_out.prompts), progress)
    seen, unseen = inputs[: len(training.prompts)], inputs[len(training.prompts) :]
    fitted, out_of_fold = fit(training, seen, wanted.seed, progress)
    tau = round(solve_tau(out_of_fold, wanted.target_large_share, wanted.sigma), 6)
    quality = fitted.quality(unseen)
    routing = _judge_routing(held_out, quality, tau, wanted, _curve(training.scores, out_of_fold).apgr, progress)
    models = tuple(
        _judge_model(name, quality[:, index], held_out.scores[:, index]) for index, name in enumerate(held_out.ladder)
    )
    return Calibrated(data, wanted, len(training.prompts), held_out, quality, fitted, tau, models, routing)


def _judge_model(name: str, predicted: NDArray[np.float64], score: NDArray[np.float64]) -> ModelFigures:
    return ModelFigures(
        name,
        float(score.mean()),
        float(predicted.mean()),
        metrics.auc(predicted, score),
        metrics.brier(predicted, score),
        metrics.calibration(predicted, score),
    )


def _judge_routing(
    held_out: ScoredPrompts,
    quality: Matrix,
    tau: float,
    wanted: Wanted,
    apgr_cross_validated: float | None,
    progress: Progress,
) -> RoutingFigures:
    choice = expected_choice(quality, tau, wanted.sigma)
    weak, strong = held_out.scores[:, 0], held_out.scores[:, -1]
    reached = (choice * held_out.scores).sum(axis=1)
    figures: dict[str, Callable[[NDArray[np.int64]], float | None]] = {
        "apgr": lambda rows: _curve(held_out.scores[rows], quality[rows]).apgr,
        "cpt50": lambda rows: _curve(held_out.scores[rows], quality[rows]).share_for(0.5),
        "cpt80": lambda rows: _curve(held_out.scores[rows], quality[rows]).share_for(0.8),
        "large_share": lambda rows: float(choice[rows, -1].mean()),
        "recovered": lambda rows: _recovered(reached[rows], weak[rows], strong[rows]),
    }
    measured = _measure(figures, len(quality), wanted.seed, progress)
    return RoutingFigures(
        curve=_curve(held_out.scores, quality),
        oracle=metrics.quality_curve(strong - weak, weak, strong),
        shares=tuple(choice.mean(axis=0).tolist()),
        apgr_cross_validated=apgr_cross_validated,
        **measured,
    )


def _curve(scores: Matrix, quality: Matrix) -> QualityCurve:
    return metrics.quality_curve(quality[:, -1] - quality[:, 0], scores[:, 0], scores[:, -1])


def _recovered(reached: NDArray[np.float64], weak: NDArray[np.float64], strong: NDArray[np.float64]) -> float | None:
    gap = float(strong.mean() - weak.mean())
    return float(reached.mean() - weak.mean()) / gap if gap > 0 else None


def _measure(
    figures: dict[str, Callable[[NDArray[np.int64]], float | None]], count: int, seed: int, progress: Progress
) -> dict[str, Measured]:
    generator = np.random.default_rng(seed)
    resampled: dict[str, list[float]] = {name: [] for name in figures}
    for done in range(1, _RESAMPLES + 1):
        rows = generator.integers(0, count, count)
        for name, figure in figures.items():
            # A resample in which the strong model is no better has no gap to recover.
            if (value := figure(rows)) is not None:
                resampled[name].append(value)
        progress("resampling", done, _RESAMPLES)
    everything = np.arange(count)
    return {name: Measured(figure(everything), metrics.interval(resampled[name])) for name, figure in figures.items()}
