"""Which candidate is taken, from figures that are made up."""

import pytest

from engines.calibration.choice import Bounds, best_rule, first_that_recalls, nearest, rank
from engines.calibration.gate import Limits
from engines.calibration.groups import GROUPS, combinations, groups_of, single_changes
from engines.calibration.trial import Candidate, Rule, Tried

BOUNDS = Bounds(Limits(divergence=0.01, agreement=0.95, density=0.7))


def tried(divergence, agreement=0.99, density=0.5):
    return Tried([divergence, divergence], [agreement, agreement], [density, density])


def candidate(top_p, first=1):
    return Candidate(first, Rule.FITTED, top_p)


def test_those_within_bounds_are_ranked_by_what_they_leave_out():
    found = {
        candidate(0.8): tried(0.0036, density=0.2),
        candidate(0.9): tried(0.0034, density=0.4),
        candidate(0.9, first=3): tried(0.003, density=0.39),
        candidate(0.95): tried(0.002, density=0.5),
        candidate(0.96): tried(0.002, agreement=0.965, density=0.45),
        candidate(0.99): tried(0.001, density=0.75),
    }
    # A third of the limit of divergence, three fifths of that of disagreement, and all of that of density.
    assert rank(found, BOUNDS, 8) == [candidate(0.9), candidate(0.95), candidate(0.9, first=3)]
    assert nearest(found) == candidate(0.99)


def test_rules_are_compared_where_they_are_equally_dense():
    """At equal top-p the fitted rule diverges less, as it keeps more; at equal density the other does."""
    fitted = {Candidate(1, Rule.FITTED, top_p): of for top_p, of in ((0.8, (0.008, 0.4)), (0.9, (0.002, 0.6)))}
    trained = {Candidate(1, Rule.TRAINED, top_p): of for top_p, of in ((0.8, (0.009, 0.3)), (0.9, (0.0025, 0.5)))}
    found = {one: tried(divergence, density=density) for one, (divergence, density) in (fitted | trained).items()}
    assert best_rule(found) is Rule.TRAINED
    trained = {Candidate(1, Rule.TRAINED, top_p): of for top_p, of in ((0.8, (0.016, 0.3)), (0.9, (0.005, 0.5)))}
    found = {one: tried(divergence, density=density) for one, (divergence, density) in (fitted | trained).items()}
    assert best_rule(found) is Rule.FITTED
    assert best_rule({candidate(0.9): tried(0.0)}) is Rule.FITTED


@pytest.mark.parametrize("first", range(6))
def test_the_first_that_recalls_is_found_by_halves(first):
    ranked = [candidate(0.5 + number / 100) for number in range(6)]
    asked, told = [], []

    def recalls(one):
        asked.append(one)
        return ranked.index(one) >= first

    found = first_that_recalls(ranked, recalls, lambda done, total: told.append((done, total)))
    assert found == ranked[min(first, 5)]
    assert len(asked) <= 3
    assert told[-1] == (3, 3)


def test_groups_are_of_layers_side_by_side():
    assert groups_of(range(1, 11)) == [range(1, 3), range(3, 6), range(6, 8), range(8, 11)]
    assert groups_of([4, 5]) == [[4], [5]]
    assert len(groups_of(range(30))) == GROUPS


def test_a_single_change_is_of_one_group_and_another_top_p():
    found = single_changes(candidate(0.9), range(1, 9), (0.8, 0.9, 0.95))
    assert len(found) == 8
    assert found[1, 0.8].layer_top_p == ((3, 0.8), (4, 0.8))
    assert all(one.top_p == 0.9 for one in found.values())


def test_changes_are_combined_as_far_as_the_sum_of_what_they_cost_is_within_bounds():
    chosen, guided = candidate(0.9), range(1, 5)
    singles = {
        (0, 0.8): tried(0.003, density=0.45),
        (1, 0.8): tried(0.0035, density=0.4),
        (2, 0.8): tried(0.009, density=0.3),
        (3, 0.95): tried(0.001, density=0.55),
    }
    found = combinations(chosen, tried(0.002), singles, guided, Bounds(Limits(divergence=0.015)))
    assert found[0].layer_top_p == ((1, 0.8), (2, 0.8))
    # More mass in one group pays for less in others, if that leaves out more in all.
    assert ((1, 0.8), (2, 0.8), (4, 0.95)) in [one.layer_top_p for one in found]
    assert not any(layer == 3 for one in found for layer, _ in one.layer_top_p)
    assert len(found) <= 4


def test_nothing_is_combined_where_nothing_may_be_left_out():
    singles = {(0, 0.8): tried(0.009, density=0.4), (0, 0.95): tried(0.001, density=0.6)}
    assert combinations(candidate(0.9), tried(0.002), singles, range(1, 5), BOUNDS) == []
