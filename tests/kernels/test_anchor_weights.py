import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels.anchor_weights import anchor_weights, normalised_entropy
from crossfill_kernels.errors import ArgumentError


def distances(*shape, seed=0):
    return 10 + 5 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    anchors=st.integers(1, 12),
    length=st.integers(0, 9),
    size=st.sampled_from([1e-6, 1.0, 1e6, 1e30]),
    temperature=st.sampled_from([1e-3, 1.0, 50.0]),
    scale=st.sampled_from(["none", "median", "sqrt_dim"]),
    seed=st.integers(0, 2**20),
)
def test_weights_sum_to_one_and_fall_with_distance(anchors, length, size, temperature, scale, seed):
    far = distances(*((anchors, length) if length else (anchors,)), seed=seed) * size
    numbers = 100 if scale == "sqrt_dim" else None
    weights = anchor_weights(far, temperature=temperature, scale=scale, numbers=numbers)
    torch.testing.assert_close(weights.sum(0), torch.ones(far.shape[1:]), atol=1e-5, rtol=1e-5)
    assert (weights >= 0).all()
    assert (weights.gather(0, far.argsort(0)).diff(dim=0) <= 1e-6).all()


def test_weights_are_the_softmax_of_minus_the_distance():
    far = torch.tensor([1.0, 2.0, 4.0])
    want = torch.tensor([math.exp(-d / 3) for d in (1, 2, 4)])
    torch.testing.assert_close(anchor_weights(far, temperature=3.0), want / want.sum())
    by_median = torch.tensor([math.exp(-d / 2 / 3) for d in (1, 2, 4)])
    torch.testing.assert_close(anchor_weights(far, temperature=3.0, scale="median"), by_median / by_median.sum())
    by_size = torch.tensor([math.exp(-d / math.sqrt(9) / 3) for d in (1, 2, 4)])
    got = anchor_weights(far, temperature=3.0, scale="sqrt_dim", numbers=9)
    torch.testing.assert_close(got, by_size / by_size.sum())


def test_numbers_may_differ_between_anchors():
    got = anchor_weights(torch.tensor([2.0, 4.0]), temperature=1.0, scale="sqrt_dim", numbers=torch.tensor([16, 64]))
    torch.testing.assert_close(got, torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("scale", ["median", "sqrt_dim"])
def test_scaled_weights_do_not_depend_on_the_size_of_the_segment_where_plain_ones_do(scale):
    one_token, many = distances(8), distances(8) * math.sqrt(1000)
    few = anchor_weights(one_token, temperature=0.2, scale=scale, numbers=200 if scale == "sqrt_dim" else None)
    more = anchor_weights(many, temperature=0.2, scale=scale, numbers=200_000 if scale == "sqrt_dim" else None)
    torch.testing.assert_close(few, more, atol=1e-5, rtol=1e-4)
    assert normalised_entropy(few) > 0.5
    # The control: the paper's softmax of raw distances is nearly one-hot.
    assert normalised_entropy(anchor_weights(many, temperature=0.2)) < 0.01


def test_each_token_has_weights_of_its_own():
    far = distances(4, 3)
    together = anchor_weights(far, temperature=1.0, scale="median")
    apart = [anchor_weights(far[:, t], temperature=1.0, scale="median") for t in range(3)]
    torch.testing.assert_close(together, torch.stack(apart, dim=1))


def test_an_anchor_at_an_infinite_distance_has_no_weight():
    far = torch.tensor([1.0, float("inf"), 1.0])
    for scale in ("none", "median"):
        assert anchor_weights(far, temperature=1.0, scale=scale).tolist() == [0.5, 0.0, 0.5]
    nowhere = torch.full((4,), float("inf"))
    for scale in ("none", "median"):
        assert anchor_weights(nowhere, temperature=1.0, scale=scale).tolist() == [0.25] * 4


def test_identical_anchors_share_the_weight_when_the_median_is_zero():
    far = torch.tensor([0.0, 3.0, 0.0])
    assert anchor_weights(far, temperature=1.0, scale="median").tolist() == [0.5, 0.0, 0.5]
    assert anchor_weights(torch.zeros(2), temperature=1.0, scale="median").tolist() == [0.5, 0.5]


@pytest.mark.parametrize("anchors", [1, 2, 10])
def test_the_gate_is_zero_for_one_hot_weights(anchors):
    assert normalised_entropy(torch.eye(anchors)[0]) == 0
    assert (normalised_entropy(torch.eye(anchors)) == 0).all()


@pytest.mark.parametrize("anchors", [2, 3, 10])
def test_the_gate_is_one_for_uniform_weights(anchors):
    assert normalised_entropy(torch.full((anchors,), 1 / anchors)).item() == pytest.approx(1.0, abs=1e-6)


def test_two_of_four_anchors_are_half_undecided():
    assert normalised_entropy(torch.tensor([0.5, 0.5, 0.0, 0.0])).item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"distances": torch.zeros(0)}, "distances"),
        ({"distances": torch.zeros(3).double()}, "distances"),
        ({"distances": torch.tensor([1.0, -1.0])}, "distances"),
        ({"distances": torch.tensor([1.0, float("nan")])}, "distances"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"scale": "mean"}, "scale"),
        ({"scale": "sqrt_dim"}, "numbers"),
        ({"numbers": 3}, "numbers"),
        ({"scale": "sqrt_dim", "numbers": torch.ones(3)}, "numbers"),
    ],
)
def test_a_misfit_names_the_argument(change, argument):
    arguments = {"distances": torch.ones(2), "temperature": 1.0, **change}
    with pytest.raises(ArgumentError) as caught:
        anchor_weights(**arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize("weights", [torch.zeros(0), torch.zeros(2, 2, 2), torch.ones(2).double()])
def test_entropy_wants_float32_weights(weights):
    with pytest.raises(ArgumentError, match="weights"):
        normalised_entropy(weights)
