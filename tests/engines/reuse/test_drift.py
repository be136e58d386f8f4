"""What two next-token distributions differ by, and when many such differences are too much."""

import math

import pytest
import torch

from engines.reuse.drift import Comparison, DriftWindow, _student, compare


def logits(*shares):
    return torch.tensor([math.log(share) for share in shares], dtype=torch.float32)


def test_divergence_is_of_the_guided_distribution_from_the_dense_one_in_nats():
    found = compare(logits(0.5, 0.3, 0.2), logits(0.05, 0.9, 0.05) + 5)
    by_hand = 0.5 * math.log(0.5 / 0.05) + 0.3 * math.log(0.3 / 0.9) + 0.2 * math.log(0.2 / 0.05)
    assert found.divergence == pytest.approx(by_hand, rel=1e-5)
    assert not found.agrees
    other_way = compare(logits(0.05, 0.9, 0.05), logits(0.5, 0.3, 0.2))
    assert abs(other_way.divergence - by_hand) > 0.1


def test_the_same_distribution_has_no_divergence():
    same = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    assert compare(same, same + 3) == Comparison(pytest.approx(0, abs=1e-9), agrees=True)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_without_a_dense_distribution_there_is_no_comparison(broken):
    bad = torch.tensor([1.0, broken, 0.0])
    assert compare(bad, torch.zeros(3)) is None
    assert compare(bad, bad) is None


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_guided_distribution_is_far_away(broken):
    found = compare(torch.zeros(3), torch.tensor([1.0, broken, 0.0]))
    assert found == Comparison(pytest.approx(math.log(3)), agrees=False)


def test_what_both_rule_out_adds_nothing():
    out = torch.tensor([float("-inf")])
    dense, guided = logits(0.7, 0.3), logits(0.6, 0.4)
    found = compare(torch.cat([dense, out]), torch.cat([guided, out]))
    assert found.divergence == pytest.approx(compare(dense, guided).divergence)


def verdicts(limit, divergences, size=8):
    window = DriftWindow(limit, size)
    return [window.add(Comparison(one, one < 1)) for one in divergences]


def test_there_is_no_verdict_before_the_window_is_full():
    found = verdicts(0.1, [1.0] * 9)
    assert found[:7] == [None] * 7
    assert [one.drifted for one in found[7:]] == [True, True]


def test_the_interval_counts_and_not_the_mean():
    """Two windows of one mean above the limit: one of equal values, one whose mean comes from a single value."""
    steady, single = [0.2] * 8, [0.0] * 7 + [1.6]
    assert verdicts(0.1, steady)[-1].drifted
    far = verdicts(0.1, single)[-1]
    assert far.mean == pytest.approx(0.2)
    assert far.low < 0 < far.mean
    assert not far.drifted
    assert far.agreement == 7 / 8


def test_a_mean_below_the_limit_never_trips():
    assert not verdicts(0.1, [0.09] * 8)[-1].drifted


def test_only_the_last_comparisons_count():
    found = verdicts(0.1, [0.2] * 8 + [0.0] * 8)
    assert found[7].drifted
    assert not found[-1].drifted
    assert found[-1].mean == 0


@pytest.mark.parametrize(("degrees", "quantile"), [(7, 1.8946), (15, 1.7531), (31, 1.6955), (999, 1.6464)])
def test_students_quantiles_are_those_of_tables(degrees, quantile):
    assert _student(degrees) == pytest.approx(quantile, abs=0.004)
