"""Layer alignment: as cheap as the cheapest ordered map, and the suffixes where nothing speaks for another."""

import itertools

import numpy as np
import pytest

from engines.calibration.alignment import align, align_ordered, cost_of
from engines.errors import CalibrationFitError
from engines.reuse.settings import align_suffix


def is_ordered(layers):
    return all(one <= other for one, other in itertools.pairwise(layers))


@pytest.mark.parametrize("seed", range(20))
def test_no_ordered_map_is_cheaper(seed):
    generator = np.random.default_rng(seed)
    cost, guided = generator.random((4, 5)), range(seed % 2, 4 - seed % 3 // 2)
    found = align_ordered(cost, guided)
    assert is_ordered(found)
    maps = itertools.combinations_with_replacement(range(5), 4)
    least = min(cost_of(cost, one, guided) for one in maps)
    assert cost_of(cost, found, guided) == pytest.approx(least)
    # The free choice of each layer is cheaper, where it is not ordered.
    free = [int(one) for one in cost.argmin(axis=1)]
    assert cost_of(cost, free, guided) <= least


def test_left_out_layers_are_found():
    kept = [0, 1, 2, 6, 7, 8, 9, 11]
    cost = np.array([[min(1.0, 0.1 + 0.3 * abs(sender - own)) for sender in range(12)] for own in kept])
    better, other = align(cost, range(3, 7))
    assert (better.name, better.layers[3:7]) == ("ordered", (6, 7, 8, 9))
    assert is_ordered(better.layers)
    assert other.layers == align_suffix(8, 12)
    assert better.cost < other.cost


@pytest.mark.parametrize(("receiver", "sender"), [(4, 6), (6, 6), (6, 4)])
def test_where_all_costs_are_equal_suffixes_are_taken(receiver, sender):
    better, other = align(np.ones((receiver, sender)), range(1, receiver - 1))
    assert better.name == "suffix"
    assert better.layers == align_suffix(receiver, sender)
    assert other.layers[1:-1] == better.layers[1:-1]


def test_layers_that_are_not_guided_stay_in_order():
    cost = np.full((6, 6), 1.0)
    cost[2, 1] = cost[4, 1] = 0.0
    found = align_ordered(cost, [2, 4])
    assert (found[2], found[4]) == (1, 1)
    assert is_ordered(found)


@pytest.mark.parametrize(
    ("cost", "guided", "said"),
    [
        (np.ones((0, 3)), [0], "nothing to align"),
        (np.ones((3, 3)), [], "nothing to align"),
        (np.ones((3, 3)), [2, 1], "ascending"),
        (np.ones((3, 3)), [3], "among 3"),
        (np.array([[1.0, np.nan]]), [0], "finite"),
    ],
)
def test_what_cannot_be_aligned_is_refused(cost, guided, said):
    with pytest.raises(CalibrationFitError, match=said):
        align_ordered(cost, guided)
