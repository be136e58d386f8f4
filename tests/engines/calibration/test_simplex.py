"""Mixtures of heads: as good as the optimum that scipy finds, and what was mixed is found again."""

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from engines.calibration.simplex import fit_squares, fit_total_variation, squared_errors, total_variations
from engines.errors import CalibrationFitError


def heads(generator, count, entries, *, attention):
    """Rows as of attention (few large entries), or any."""
    if attention:
        return generator.dirichlet(np.full(20, 0.3), size=(count, entries // 20)).reshape(count, -1)
    return generator.random((count, entries))


def on_simplex(weights):
    return bool((weights >= 0).all()) and np.allclose(weights.sum(axis=0), 1, atol=1e-9)


def quadratic(gram, cross, weights):
    return 0.5 * weights @ gram @ weights - cross @ weights


def least_squares(gram, cross):
    """By sequential quadratic programming, from two starts."""
    count = len(gram)
    sums = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(count)}
    starts = [np.full(count, 1 / count), np.eye(count)[0]]
    found = [
        minimize(
            lambda w: quadratic(gram, cross, w),
            start,
            jac=lambda w: gram @ w - cross,
            bounds=[(0, 1)] * count,
            constraints=[sums],
            method="SLSQP",
            options={"maxiter": 2000, "ftol": 1e-15},
        )
        for start in starts
    ]
    return min(one.fun for one in found)


def least_variation(sources, target):
    """By linear programming: the least half sum of absolute errors, as a share of the target's sum."""
    count, entries = sources.shape
    above = np.block([[-sources.T, -np.eye(entries)], [sources.T, -np.eye(entries)]])
    sums = np.r_[np.ones(count), np.zeros(entries)]
    found = linprog(
        np.r_[np.zeros(count), np.ones(entries)],
        A_ub=above,
        b_ub=np.r_[-target, target],
        A_eq=[sums],
        b_eq=[1],
        bounds=[(0, None)] * (count + entries),
    )
    return found.fun / 2 / target.sum()


CASES = [
    (count, entries, attention, twin)
    for count in (2, 9, 16, 32)
    for entries in (20, 200)
    for attention in (True, False)
    for twin in (True, False)
]


def case(count, entries, attention, twin):
    generator = np.random.default_rng(count * entries + attention)
    sources = heads(generator, count, entries, attention=attention)
    if twin:
        sources[1] = sources[0] + 1e-7 * generator.random(sources.shape[1])
    targets = generator.dirichlet(np.full(count, 0.2), 3) @ sources + 0.05 * generator.random((3, sources.shape[1]))
    return sources, targets


@pytest.mark.parametrize("given", CASES, ids=str)
def test_squares_are_as_small_as_a_quadratic_program_makes_them(given):
    sources, targets = case(*given)
    gram, cross = sources @ sources.T, sources @ targets.T
    found = fit_squares(gram, cross)
    assert on_simplex(found)
    scale = max(np.abs(gram).max(), np.abs(cross).max())
    for column in range(3):
        least = least_squares(gram, cross[:, column])
        assert quadratic(gram, cross[:, column], found[:, column]) <= least + 1e-6 * scale
        # Two heads that are all but one do as well in any mixture.
        uniform = np.full(len(gram), 1 / len(gram))
        assert (
            given == (2, given[1], given[2], True) or quadratic(gram, cross[:, column], uniform) > least + 1e-6 * scale
        )


@pytest.mark.parametrize("given", CASES, ids=str)
def test_variation_is_as_small_as_a_linear_program_makes_it(given):
    sources, targets = case(*given)
    found = fit_total_variation(sources, targets)
    assert on_simplex(found)
    reached = total_variations(sources, targets, found)
    least = np.array([least_variation(sources, target) for target in targets])
    assert (reached <= least + 1e-4).all()
    squares = fit_squares(sources @ sources.T, sources @ targets.T)
    assert (reached <= total_variations(sources, targets, squares) + 1e-12).all()


def test_squares_alone_do_not_reach_the_least_variation():
    # A few entries that no mixture explains draw squares towards them, and variation not.
    generator = np.random.default_rng(5)
    sources = heads(generator, 9, 200, attention=True)
    targets = generator.dirichlet(np.full(9, 0.2), 3) @ sources
    targets[:, :5] += 1.0
    squares = fit_squares(sources @ sources.T, sources @ targets.T)
    reached = total_variations(sources, targets, fit_total_variation(sources, targets))
    assert (reached < total_variations(sources, targets, squares) - 1e-3).all()


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_planted_mixture_is_found(noise):
    generator = np.random.default_rng(1)
    sources = heads(generator, 9, 2000, attention=True)
    planted = np.zeros((9, 3))
    planted[[1, 4], 0], planted[7, 1], planted[[0, 2, 3], 2] = (0.3, 0.7), 1.0, (0.2, 0.5, 0.3)
    targets = planted.T @ sources + noise * generator.standard_normal((3, 2000))
    for found in (fit_squares(sources @ sources.T, sources @ targets.T), fit_total_variation(sources, targets)):
        assert np.allclose(found, planted, atol=1e-5 if not noise else 2e-2)
    if not noise:
        assert ((fit_squares(sources @ sources.T, sources @ targets.T) > 0) == (planted > 0)).all()


@pytest.mark.parametrize("order", [list(range(9)), [3, 1, 0, 2, 8, 7, 6, 5, 4]], ids=["equal", "permuted"])
def test_equal_heads_are_found_one_by_one(order):
    sources = heads(np.random.default_rng(2), 9, 400, attention=True)
    targets = sources[order]
    for found in (fit_squares(sources @ sources.T, sources @ targets.T), fit_total_variation(sources, targets)):
        assert np.allclose(found, np.eye(9)[:, order], atol=1e-9)
        assert np.allclose(total_variations(sources, targets, found), 0, atol=1e-9)
    assert total_variations(sources, targets[::-1], found).max() > 0.1


def test_errors_by_moments_are_those_of_the_entries():
    generator = np.random.default_rng(3)
    sources, targets = heads(generator, 4, 100, attention=False), generator.random((2, 100))
    weights = generator.dirichlet(np.ones(4), 2).T
    want = np.square(targets - weights.T @ sources).sum(axis=1)
    power = np.square(targets).sum(axis=1)
    assert np.allclose(squared_errors(sources @ sources.T, sources @ targets.T, power, weights), want)


def test_a_target_of_nothing_has_no_variation():
    found = total_variations(np.ones((2, 3)), np.zeros((1, 3)), np.full((2, 1), 0.5))
    assert found.tolist() == [0.0]


def test_entries_in_several_parts_are_all_counted(monkeypatch):
    sources, targets = case(9, 200, True, False)
    whole = fit_total_variation(sources, targets)
    monkeypatch.setattr("engines.calibration.simplex._ENTRIES", 7)
    parts, variation = fit_total_variation(sources, targets), total_variations(sources, targets, whole)
    assert np.allclose(total_variations(sources, targets, parts), variation, atol=1e-4)
    assert np.allclose(variation, np.abs(targets - whole.T @ sources).sum(axis=1) / 2 / targets.sum(axis=1))


@pytest.mark.parametrize(
    ("gram", "cross", "said"),
    [
        (np.ones((0, 0)), np.ones((0, 1)), "want"),
        (np.ones((2, 3)), np.ones((2, 1)), "want"),
        (np.eye(2), np.ones((3, 1)), "want"),
        (np.eye(2), np.ones(2), "want"),
        (np.full((2, 2), np.nan), np.ones((2, 1)), "finite"),
        (np.eye(2), np.full((2, 1), np.inf), "finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(gram, cross, said):
    with pytest.raises(CalibrationFitError, match=said):
        fit_squares(gram, cross)


def test_sources_and_targets_of_different_entries_are_refused():
    with pytest.raises(CalibrationFitError, match="want"):
        fit_total_variation(np.ones((2, 3)), np.ones((1, 4)))


def test_what_does_not_converge_is_said(monkeypatch):
    sources, targets = case(32, 200, False, False)
    monkeypatch.setattr("engines.calibration.simplex._MOST_STEPS", 3)
    with pytest.raises(CalibrationFitError, match="not found in 3 steps"):
        fit_squares(sources @ sources.T, sources @ targets.T)
