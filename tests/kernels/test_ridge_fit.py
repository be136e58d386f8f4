import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels.errors import ArgumentError, SingularFitError
from crossfill_kernels.ridge_correct import ridge_correct_reference
from crossfill_kernels.ridge_fit import RidgeMap, RidgeSums, ridge_fit_reference

WIDTH = 12


def rows_of(count, width=WIDTH, seed=0, noise=0.1):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = normal(count, width) + 3 * normal(width)
    return x, x @ normal(width, width) / width + normal(width) + noise * normal(count, width)


def fitted(x, y, ridge, rank=None, **bases):
    sums = RidgeSums(x.shape[1], **bases)
    sums.add(x, y)
    return sums.solve(ridge, rank=rank)


def matrix_of(state):
    weights = state.weights.double()
    for basis, side in ((state.basis_in, 0), (state.basis_out, 1)):
        if basis is not None:
            weights = basis.double() @ weights if side == 0 else weights @ basis.double()
    return weights


def loss_of(state, x, y, ridge):
    weights = matrix_of(state)
    residual = y.double() - state.bias.double() - (x.double() - state.mean.double()) @ weights
    return residual.square().sum() + ridge * weights.square().sum()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    width=st.integers(1, 10),
    ridge=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**20),
)
def test_equals_least_squares(count, width, ridge, seed):
    x, y = rows_of(count, width, seed)
    got, want = fitted(x, y, ridge), ridge_fit_reference(x, y, ridge)
    for name in ("mean", "weights", "bias"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-6, rtol=1e-6)


def test_equals_least_squares_without_a_ridge():
    x, y = rows_of(50)
    torch.testing.assert_close(fitted(x, y, 0).weights, ridge_fit_reference(x, y, 0).weights, atol=1e-6, rtol=1e-6)


def test_equals_numpy_with_a_column_of_ones():
    import numpy

    x, y = rows_of(50)
    wanted = numpy.linalg.lstsq(numpy.c_[x.double(), numpy.ones(50)], y.double().numpy(), rcond=None)[0]
    state = fitted(x, y, 0)
    numpy.testing.assert_allclose(state.weights, wanted[:-1], atol=1e-6)
    numpy.testing.assert_allclose(state.bias - state.mean @ state.weights, wanted[-1], atol=1e-5)


def test_an_exactly_linear_correction_is_learned_exactly():
    x, y = rows_of(48, noise=0.0)
    state = fitted(x[:40], y[:40], 0)
    torch.testing.assert_close(ridge_correct_reference(x[40:], state), (x + y)[40:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_the_order_and_split_of_the_rows_do_not_matter(ridge):
    x, y = rows_of(70)
    once = fitted(x, y, ridge, rank=3)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    parts = [RidgeSums(WIDTH) for _ in range(3)]
    for part, rows in zip(parts, order.split([1, 40, 29]), strict=True):
        for chunk in rows.split(7):
            part.add(x[chunk], y[chunk])
    parts[2].merge(parts[0])
    parts[2].merge(parts[1])
    assert parts[2].rows == 70
    assert parts[1].rows == 40
    split = parts[2].solve(ridge, rank=3)
    torch.testing.assert_close(matrix_of(split), matrix_of(once), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(split.bias, once.bias, atol=1e-6, rtol=1e-6)


def test_no_rows_change_nothing():
    x, y = rows_of(30)
    sums = RidgeSums(WIDTH)
    sums.add(x, y)
    before = sums.solve(1.0).weights
    sums.add(x[:0], y[:0])
    sums.merge(RidgeSums(WIDTH))
    assert torch.equal(sums.solve(1.0).weights, before)


@pytest.mark.parametrize("rank", [1, 3, 11])
def test_a_rank_gives_the_best_map_of_that_rank(rank):
    x, y = rows_of(60)
    x, ridge = x * torch.arange(1, WIDTH + 1), 0.5
    state, full = fitted(x, y, ridge, rank=rank), fitted(x, y, ridge)
    assert torch.linalg.matrix_rank(matrix_of(state)) == rank
    assert state.weights.shape == (WIDTH, rank)
    best = loss_of(state, x, y, ridge)
    # The control: the full map with its least singular values cut, which does not know where x varies.
    u, s, vh = torch.linalg.svd(matrix_of(full))
    cut = RidgeMap(full.mean, ((u[:, :rank] * s[:rank]) @ vh[:rank]).float().contiguous(), full.bias)
    assert loss_of(full, x, y, ridge) < best < loss_of(cut, x, y, ridge)
    # No small step away from it gains anything.
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        step = [1e-3 * torch.randn(t.shape, generator=generator) for t in (state.weights, state.basis_out)]
        near = RidgeMap(state.mean, state.weights + step[0], state.bias, None, state.basis_out + step[1])
        assert loss_of(near, x, y, ridge) >= best * (1 - 1e-9)


def test_a_rank_beyond_the_maps_own_changes_nothing():
    x, y = rows_of(60)
    assert torch.equal(fitted(x, y, 1.0, rank=WIDTH).weights, fitted(x, y, 1.0).weights)


def test_bases_restrict_what_is_seen_and_what_is_explained():
    x, y = rows_of(60)
    basis_in = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(2))
    basis_out = torch.linalg.qr(torch.randn(WIDTH, 5, generator=torch.Generator().manual_seed(3)))[0].T.contiguous()
    state = fitted(x, y, 0.3, basis_in=basis_in, basis_out=basis_out)
    seen, explained = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    seen, explained = seen @ basis_in.double(), explained @ basis_out.double().T
    damped = seen.T @ seen + 0.3 * torch.eye(4)
    torch.testing.assert_close(
        state.weights.double(), torch.linalg.solve(damped, seen.T @ explained), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(state.bias, y.mean(0), atol=1e-6, rtol=1e-5)
    low = fitted(x, y, 0.3, rank=2, basis_in=basis_in, basis_out=basis_out)
    assert low.weights.shape == (4, 2)
    assert low.basis_out.shape == (2, WIDTH)


def test_bfloat16_rows_are_read_as_they_are():
    x, y = (t.bfloat16() for t in rows_of(40))
    assert torch.equal(fitted(x, y, 1.0).weights, fitted(x.float(), y.float(), 1.0).weights)


def test_nothing_is_fitted_to_no_rows():
    with pytest.raises(SingularFitError, match="no rows"):
        RidgeSums(WIDTH).solve(1.0)


@pytest.mark.parametrize("count", [1, WIDTH])
def test_too_few_rows_want_a_ridge(count):
    x, y = rows_of(count)
    with pytest.raises(SingularFitError, match=f"{count} rows for {WIDTH} directions"):
        fitted(x, y, 0)
    assert fitted(x, y, 1.0).weights.isfinite().all()


@pytest.mark.parametrize("ridge", [0.0, 1e-14])
def test_rows_that_vary_in_too_few_directions_want_a_ridge(ridge):
    x, y = rows_of(60)
    x[:, 5] = x[:, 4] - 2 * x[:, 3]
    with pytest.raises(SingularFitError, match="ridge above"):
        fitted(x.double().float(), y, ridge)
    assert fitted(x, y, 1e-3).weights.isfinite().all()


def test_one_row_teaches_its_bias_alone():
    x, y = rows_of(1)
    state = fitted(x, y, 1.0)
    torch.testing.assert_close(state.bias, y[0])
    assert state.weights.abs().max() < 1e-10


@pytest.mark.parametrize(
    ("x", "y", "argument"),
    [
        (torch.zeros(3, 11), torch.zeros(3, 12), "source"),
        (torch.zeros(3, 12).double(), torch.zeros(3, 12), "source"),
        (torch.full((3, 12), float("nan")), torch.zeros(3, 12), "source"),
        (torch.zeros(3, 12), torch.zeros(2, 12), "target_delta"),
        (torch.zeros(3, 12), torch.full((3, 12), float("inf")), "target_delta"),
    ],
)
def test_rows_that_do_not_fit_leave_the_sums_as_they_were(x, y, argument):
    sums = RidgeSums(WIDTH)
    sums.add(*rows_of(30))
    before = sums.solve(1.0).weights
    with pytest.raises(ArgumentError) as caught:
        sums.add(x, y)
    assert caught.value.argument == argument
    assert sums.rows == 30
    assert torch.equal(sums.solve(1.0).weights, before)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: RidgeSums(0), "width"),
        (lambda: RidgeSums(4, basis_in=torch.zeros(3, 2)), "basis_in"),
        (lambda: RidgeSums(4, basis_out=torch.zeros(4, 2)), "basis_out"),
        (lambda: RidgeSums(4, basis_out=2 * torch.eye(4)), "basis_out"),
        (lambda: RidgeSums(4).merge(RidgeSums(5)), "other"),
        (lambda: RidgeSums(4).merge(RidgeSums(4, basis_in=torch.eye(4))), "other"),
        (lambda: RidgeSums(4).solve(-1.0), "ridge"),
        (lambda: RidgeSums(4).solve(float("nan")), "ridge"),
        (lambda: RidgeSums(4).solve(1.0, rank=0), "rank"),
    ],
)
def test_a_misfit_names_the_argument(call, argument):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
