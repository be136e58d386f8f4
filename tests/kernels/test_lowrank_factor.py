import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.lowrank_factor import lowrank_factor, lowrank_factor_reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(length, width, sigma, seed=0):
    kept = sigma.numel()
    u, v = torch.linalg.qr(normal(length, kept, seed=seed))[0], torch.linalg.qr(normal(width, kept, seed=seed + 1))[0]
    return (u * sigma) @ v.T


def best_error(matrix, rank):
    return torch.linalg.svdvals(matrix.double())[rank:].square().sum().sqrt()


def error_of(matrix, factors):
    return (matrix.double() - factors.left.double() @ factors.right.double()).norm()


@pytest.mark.parametrize(("length", "width"), [(96, 192), (192, 96), (1, 50), (50, 1), (64, 64)])
@pytest.mark.parametrize("rank", [1, 16, 60])
def test_gram_is_exact(length, width, rank):
    matrix = normal(length, width)
    factors = lowrank_factor(matrix, rank, method="gram")
    assert error_of(matrix, factors) <= best_error(matrix, rank) * (1 + 1e-5) + 1e-5
    sigma = torch.linalg.svdvals(matrix)[:rank]
    torch.testing.assert_close(factors.left.norm(dim=0)[: sigma.numel()], sigma, atol=1e-4, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(0, 60),
    width=st.integers(1, 60),
    rank=st.integers(1, 70),
    method=st.sampled_from(["auto", "gram", "randomised"]),
    seed=st.integers(0, 2**20),
)
def test_factors_of_any_shape_have_the_shape_asked_for(length, width, rank, method, seed):
    matrix = normal(length, width, seed=seed)
    factors = lowrank_factor(matrix, rank, method=method)
    assert factors.left.shape == (length, rank)
    assert factors.right.shape == (rank, width)
    # White noise is the worst case of the randomised way.
    slack = 1.0 if method == "gram" else 1.1
    assert error_of(matrix, factors) <= best_error(matrix, rank) * slack * (1 + 1e-5) + 1e-4
    torch.testing.assert_close(factors.error.double(), error_of(matrix, factors), atol=1e-4, rtol=1e-4)
    kept = min(rank, length, width)
    assert not factors.left[:, kept:].any()
    assert not factors.right[kept:].any()


@pytest.mark.parametrize("power", [1.0, 1.5])
@pytest.mark.parametrize(("length", "width"), [(300, 576), (512, 320)])
def test_randomised_is_within_four_thousandths_of_the_best(length, width, power):
    matrix = with_spectrum(length, width, torch.arange(1, 301).float() ** -power)
    excess = error_of(matrix, lowrank_factor(matrix, 32, method="randomised")) / best_error(matrix, 32)
    assert 1 - 1e-6 <= excess <= 1.004
    # The control: what oversampling and iterations buy.
    bare = lowrank_factor(matrix, 32, method="randomised", oversampling=0, iterations=0)
    assert error_of(matrix, bare) / best_error(matrix, 32) > 1.02


def test_factors_are_those_of_the_singular_value_decomposition():
    matrix = with_spectrum(80, 40, torch.arange(40, 0, -1).float())
    want = lowrank_factor_reference(matrix, 5)
    for method in ("gram", "randomised"):
        got = lowrank_factor(matrix, 5, method=method, iterations=20)
        sign = (got.right * want.right).sum(1).sign()
        torch.testing.assert_close(got.left * sign, want.left, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.right * sign[:, None], want.right, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.error, want.error, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got.right @ got.right.T, torch.eye(5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["gram", "randomised"])
@pytest.mark.parametrize(("length", "width"), [(90, 40), (40, 90)])
def test_a_rank_deficient_matrix_is_met_exactly_and_padded_with_zeros(length, width, method):
    matrix = with_spectrum(length, width, torch.tensor([5.0, 1.0, 0.01]))
    factors = lowrank_factor(matrix, 8, method=method)
    assert error_of(matrix, factors) <= 1e-5
    assert factors.error <= 1e-5
    assert (factors.left.norm(dim=0) > 1e-3).tolist() == [True] * 3 + [False] * 5
    torch.testing.assert_close(factors.right[:3] @ factors.right[:3].T, torch.eye(3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["auto", "gram", "randomised"])
@pytest.mark.parametrize("shape", [(20, 30), (0, 30), (20, 0)], ids=["zeros", "no-rows", "no-columns"])
def test_nothing_has_factors_of_zeros(shape, method):
    factors = lowrank_factor(torch.zeros(shape), 4, method=method)
    assert factors.left.shape == (shape[0], 4)
    assert factors.right.shape == (4, shape[1])
    assert not factors.left.any()
    assert not factors.right.any()
    assert factors.error == 0


@pytest.mark.parametrize("method", ["gram", "randomised"])
def test_a_single_row_is_its_own_factor(method):
    row = normal(1, 70)
    factors = lowrank_factor(row, 3, method=method)
    torch.testing.assert_close(factors.left @ factors.right, row, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(factors.left[0, 0].abs(), row.norm(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["gram", "randomised"])
def test_small_singular_values_beside_large_ones_survive(method):
    # In a float32 Gram matrix the second would drown in the rounding of the first.
    matrix = with_spectrum(60, 300, torch.tensor([1000.0, 0.03]))
    assert lowrank_factor(matrix, 2, method=method).error < 0.003
    assert lowrank_factor(matrix, 1, method=method).error.item() == pytest.approx(0.03, rel=0.02)


def test_the_same_input_gives_the_same_factors_unless_a_generator_is_given():
    matrix = normal(200, 150)
    first, second = (lowrank_factor(matrix, 4, method="randomised") for _ in range(2))
    assert torch.equal(first.left, second.left)
    other = lowrank_factor(matrix, 4, method="randomised", generator=torch.Generator().manual_seed(7))
    assert not torch.equal(first.left, other.left)


def test_auto_is_exact_where_that_is_cheap_and_randomised_where_both_sides_are_long():
    short, long = normal(40, 600), normal(300, 400)
    assert torch.equal(lowrank_factor(short, 4).left, lowrank_factor(short, 4, method="gram").left)
    assert torch.equal(lowrank_factor(long, 4).left, lowrank_factor(long, 4, method="randomised").left)
    assert torch.equal(lowrank_factor(long, 70).left, lowrank_factor(long, 70, method="gram").left)


def test_a_bfloat16_or_strided_matrix_is_read_as_it_is():
    narrow = normal(50, 80).bfloat16()
    wide = lowrank_factor(narrow.float(), 4)
    assert torch.equal(lowrank_factor(narrow, 4).left, wide.left)
    strided = narrow.float().T.contiguous().T
    torch.testing.assert_close(lowrank_factor(strided, 4).error, wide.error, atol=1e-5, rtol=1e-5)


def test_the_reference_can_be_forced():
    matrix = normal(30, 20)
    with dispatch.forced("reference"):
        assert torch.equal(lowrank_factor(matrix, 4).left, lowrank_factor_reference(matrix, 4).left)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"matrix": torch.zeros(3)}, "matrix"),
        ({"matrix": torch.zeros(3, 3).double()}, "matrix"),
        ({"matrix": torch.full((3, 3), float("nan"))}, "matrix"),
        ({"matrix": torch.full((3, 3), float("inf"))}, "matrix"),
        ({"rank": 0}, "rank"),
        ({"method": "svd"}, "method"),
        ({"oversampling": -1}, "oversampling"),
        ({"iterations": -1}, "iterations"),
    ],
)
def test_a_misfit_names_the_argument(change, argument):
    with pytest.raises(ArgumentError) as caught:
        lowrank_factor(**{"matrix": torch.ones(3, 3), "rank": 2, **change})
    assert caught.value.argument == argument
