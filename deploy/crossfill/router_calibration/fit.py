"""Fits a logistic model of each candidate's quality on the router's own inputs, its penalty chosen by cross-validation.

Features and standardisation are the router's code, so training and serving cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.linear_model import LogisticRegression

from router.decision.features import conversation_features
from router.decision.scorers.inputs import INPUT_NAMES, inputs_of, standardised
from router.decision.scorers.learned import Logistic
from router.request.generation import Turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from crossfill.router_calibration.data import ScoredPrompts

    Matrix = NDArray[np.float64]

Progress = Callable[[str, int, int], None]
"""Told the stage, what is done and of how much."""

# Inverse strengths of the L2 penalty, from nearly constant to nearly free.
PENALTIES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_FOLDS, _REPEATS = 5, 3


@dataclass(frozen=True, slots=True)
class Fitted:
    """The models of a ladder on common inputs, and the penalty that cross-validation chose for each."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    models: tuple[Logistic, ...]
    penalties: tuple[float, ...]

    def quality(self, inputs: Matrix) -> Matrix:
        """Predictions, [N, M], for `inputs`, [N, K]."""
        deviations = [standardised(row, self.mean, self.scale) for row in inputs.tolist()]
        return np.array([[model.quality(row) for model in self.models] for row in deviations])


def input_matrix(prompts: Sequence[str], progress: Progress) -> Matrix:
    """The router's inputs, [N, K], of each prompt as the only turn of a conversation."""
    rows = []
    for done, prompt in enumerate(prompts, start=1):
        rows.append(inputs_of(conversation_features([Turn("user", prompt)])))
        progress("reading the prompts", done, len(prompts))
    return np.array(rows).reshape(len(prompts), len(INPUT_NAMES))


def fit(data: ScoredPrompts, inputs: Matrix, seed: int, progress: Progress) -> tuple[Fitted, Matrix]:
    """The models fitted on all of `data`, and out-of-fold predictions, [N, M], by the penalties chosen for them.

    A penalty is chosen for the least cross-validated log loss, a proper score, so that qualities are calibrated.
    """
    mean, scale = inputs.mean(axis=0), inputs.std(axis=0)
    deviations = np.array([standardised(row, mean.tolist(), scale.tolist()) for row in inputs.tolist()])
    folds = list(_folds(len(inputs), seed))
    models, penalties, out_of_fold = [], [], []
    steps = len(PENALTIES) * len(data.ladder)
    for index in range(len(data.ladder)):
        target = data.scores[:, index]
        predictions = []
        for number, penalty in enumerate(PENALTIES, start=1):
            predictions.append(_cross_predict(deviations, target, penalty, folds))
            progress("cross-validation", index * len(PENALTIES) + number, steps)
        best = int(np.argmin([_log_loss(prediction, target) for prediction in predictions]))
        penalties.append(PENALTIES[best])
        models.append(_logistic(deviations, target, PENALTIES[best]))
        # One repeat, not their mean: averaged predictions would be steadier than those of one model on new queries.
        out_of_fold.append(predictions[best][0])
    fitted = Fitted(tuple(mean.tolist()), tuple(scale.tolist()), tuple(models), tuple(penalties))
    return fitted, np.stack(out_of_fold, axis=1)


def _folds(count: int, seed: int) -> Iterator[list[NDArray[np.int64]]]:
    generator = np.random.default_rng(seed)
    for _ in range(_REPEATS):
        yield np.array_split(generator.permutation(count), _FOLDS)


def _cross_predict(deviations: Matrix, target: Matrix, penalty: float, folds: list[list[NDArray[np.int64]]]) -> Matrix:
    """Predictions for each query by a model that has not seen it, [repeats, N]."""
    predicted = np.empty((len(folds), len(target)))
    for repeat, parts in enumerate(folds):
        for part in parts:
            seen = np.ones(len(target), bool)
            seen[part] = False
            model = _logistic(deviations[seen], target[seen], penalty)
            odds = model.intercept + deviations[part] @ np.array(model.coefficients)
            predicted[repeat, part] = 1 / (1 + np.exp(-odds))
    return predicted


def _logistic(deviations: Matrix, target: Matrix, penalty: float) -> Logistic:
    """A score between 0 and 1 counts as a success and a failure with weights that add up to one."""
    if target.min() == target.max() and target[0] in {0.0, 1.0}:
        # Nothing to tell apart: the rate alone, by Laplace's rule.
        rate = (target.sum() + 1) / (len(target) + 2)
        return Logistic(intercept=float(np.log(rate / (1 - rate))), coefficients=(0.0,) * len(INPUT_NAMES))
    rows = np.concatenate([deviations, deviations])
    labels = np.repeat([1, 0], len(target))
    weights = np.concatenate([target, 1 - target])
    used = weights > 0
    model = LogisticRegression(C=penalty, solver="newton-cholesky").fit(rows[used], labels[used], weights[used])
    return Logistic(intercept=float(model.intercept_[0]), coefficients=tuple(map(float, model.coef_[0])))


def _log_loss(predicted: Matrix, target: Matrix) -> float:
    clipped = np.clip(predicted, 1e-12, 1 - 1e-12)
    return float(-np.mean(target * np.log(clipped) + (1 - target) * np.log(1 - clipped)))
