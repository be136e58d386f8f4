from __future__ import annotations

import math
import random

import pytest

from engines.models.interval import (
    BLOCK_TOKENS,
    mean_interval,
    median_interval,
    perplexity_ratio,
    share_ratio,
    student_t,
    wilson,
)

LOSSES = [random.Random(7).uniform(0, 6) for _ in range(2048)]


def test_wilson_interval_of_known_counts() -> None:
    none, half, all_of_ten = wilson(0, 10), wilson(5, 10), wilson(10, 10)
    assert (none.low, none.high) == (0, pytest.approx(0.2775, abs=1e-4))
    assert (half.low, half.high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert (all_of_ten.low, all_of_ten.high) == (pytest.approx(0.7225, abs=1e-4), 1)


@pytest.mark.parametrize(("right", "of"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(right: int, of: int) -> None:
    with pytest.raises(ValueError, match="right <= of"):
        wilson(right, of)


@pytest.mark.parametrize(("both", "one", "other"), [(0.6, 0.05, 0.15), (0.4, 0.05, 0.05), (0.5, 0.2, 0.0)])
def test_interval_of_a_share_ratio_covers_the_truth_about_19_times_in_20(both: float, one: float, other: float) -> None:
    rng, truth, covered = random.Random(3), (both + one) / (both + other), 0
    for _ in range(1000):
        drawn = [rng.random() for _ in range(40)]
        mine = [value < both + one for value in drawn]
        theirs = [value < both or both + one <= value < both + one + other for value in drawn]
        ratio = share_ratio(mine, theirs)
        covered += ratio is not None and ratio.low <= truth <= ratio.high
    assert 930 <= covered <= 990


def test_interval_of_a_share_ratio_follows_the_published_steps() -> None:
    # Bonett and Price 2006 by hand. Both right 1, only the model 1, only the reference 7, neither 12; n* = 1 + 1 + 7.
    mine, theirs, n = 1 + 1, 1 + 7, 9
    a = 10**0.5 / (3 * 9) ** 0.5
    b, c = (8 / 11 / 3) ** 0.5, (2 / 11 / 9) ** 0.5
    assert (a, b, c) == pytest.approx((0.608581, 0.492366, 0.142134), abs=1e-6)
    z = 1.959964 * a / (b + c)
    assert z == pytest.approx(1.879900, abs=1e-6)
    # Wilson's limits, as the roots p of (x - n p)^2 = z^2 n p (1 - p).
    limits = []
    for x in (mine, theirs):
        two, one, zero = n * n + n * z * z, 2 * n * x + n * z * z, x * x
        root = (one * one - 4 * two * zero) ** 0.5
        limits.append(((one - root) / (2 * two), (one + root) / (2 * two)))
    assert limits[0] == pytest.approx((0.066306, 0.534780), abs=1e-6)
    assert limits[1] == pytest.approx((0.579565, 0.978915), abs=1e-6)
    answers = [(True, True), (True, False), *[(False, True)] * 7, *[(False, False)] * 12]
    ratio = share_ratio([one for one, _ in answers], [other for _, other in answers])
    assert ratio is not None
    assert ratio.value == 0.25
    assert (ratio.low, ratio.high) == pytest.approx((0.066306 / 0.978915, 0.534780 / 0.579565), abs=1e-5)


@pytest.mark.parametrize(
    ("degrees", "reach"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (30, 2.042), (120, 1.980), (10_000, 1.960)]
)
def test_student_t_has_the_values_of_the_tables(degrees: int, reach: float) -> None:
    assert student_t(degrees) == pytest.approx(reach, abs=6e-4)


def test_student_t_without_a_degree_of_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one degree"):
        student_t(0)


def test_share_ratio_of_a_model_without_right_answers_is_unknown() -> None:
    assert share_ratio([False, False], [True, False]) is None
    assert share_ratio([True, False], [False, False]) is None
    assert share_ratio([], []) is None


def test_perplexity_ratio_of_a_constant_difference_is_certain() -> None:
    ratio = perplexity_ratio([loss + math.log(1.25) for loss in LOSSES], LOSSES)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.25, 1.25, 1.25))


def test_interval_of_a_perplexity_ratio_covers_the_truth_about_19_times_in_20() -> None:
    rng, covered = random.Random(5), 0
    for _ in range(300):
        model = [loss + rng.gauss(0.02, 0.3) for loss in LOSSES]
        ratio = perplexity_ratio(model, LOSSES)
        covered += ratio.low <= math.exp(0.02) <= ratio.high
    assert 270 <= covered <= 296


def test_interval_from_ten_blocks_covers_the_truth_about_19_times_in_20() -> None:
    rng, covered, losses = random.Random(11), 0, LOSSES[: 10 * BLOCK_TOKENS]
    for _ in range(2000):
        shifts = [rng.gauss(0.02, 0.1) for _ in range(10)]
        ratio = perplexity_ratio([loss + shifts[place // BLOCK_TOKENS] for place, loss in enumerate(losses)], losses)
        covered += ratio.low <= math.exp(0.02) <= ratio.high
    # A normal interval would cover 1836 of 2000.
    assert 1870 <= covered <= 1930


def test_tokens_that_move_together_count_as_fewer() -> None:
    rng = random.Random(9)
    apart = [loss + rng.gauss(0, 0.3) for loss in LOSSES]
    shifts = [rng.gauss(0, 0.3) for _ in range(len(LOSSES) // BLOCK_TOKENS)]
    together = [loss + shifts[index // BLOCK_TOKENS] for index, loss in enumerate(LOSSES)]
    narrow, wide = perplexity_ratio(apart, LOSSES), perplexity_ratio(together, LOSSES)
    assert wide.high / wide.low > (narrow.high / narrow.low) ** 4


def test_losses_of_different_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="2047 and 2048 tokens"):
        perplexity_ratio(LOSSES[1:], LOSSES)
    with pytest.raises(ValueError, match="1 and 2 questions"):
        share_ratio([True], [True, False])
    with pytest.raises(ValueError, match="more than 64 tokens"):
        perplexity_ratio(LOSSES[:64], LOSSES[:64])


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (12, 2, 9), (25, 7, 17), (100, 39, 60)])
def test_interval_of_a_median_is_the_published_pair_of_order_statistics(count: int, low: int, high: int) -> None:
    # The sign test's table, ranks from 0; the order in which values come says nothing.
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    interval = median_interval(values)
    assert interval is not None
    assert (interval.low, interval.high) == (low, high)


def test_five_values_bound_no_median_with_95_percent() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None


@pytest.mark.parametrize("count", [6, 12, 40])
def test_interval_of_a_median_covers_the_truth_at_least_19_times_in_20(count: int) -> None:
    rng, covered = random.Random(4), 0
    for _ in range(1000):
        interval = median_interval([rng.expovariate(1) for _ in range(count)])
        covered += interval is not None and interval.low <= math.log(2) <= interval.high
    assert 935 <= covered <= 990


def test_an_interval_needs_two_values_and_is_as_wide_as_they_differ() -> None:
    with pytest.raises(ValueError, match="two values"):
        mean_interval([1.0])
    found = mean_interval([1.0, 2.0, 3.0])
    # Student's t of two degrees of freedom is 4.303.
    reach = 4.303 / 3**0.5
    assert [found.low, found.high] == pytest.approx([2 - reach, 2 + reach], abs=1e-3)
