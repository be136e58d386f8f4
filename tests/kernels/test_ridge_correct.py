import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.ridge_correct import RidgeMap, ridge_correct, ridge_correct_reference
from crossfill_kernels.rope_rerotate import rotation_by
from crossfill_kernels.slots import as_slots

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
HEADS, DIM = 3, 16
# What the map has beside its inner matrix: both bases, one of them, none.
FORMS = {"both": (True, True), "in": (True, False), "out": (False, True), "full": (False, False)}


def state_of(width=HEADS * DIM, rank_in=5, rank_out=7, form="both", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, size=1.0):
        return size * torch.randn(*shape, generator=generator) / shape[0] ** 0.5

    has_in, has_out = FORMS[form]
    inner = rank_in if has_in else width, rank_out if has_out else width
    basis_in = normal(width, inner[0]) if has_in else None
    basis_out = normal(inner[1], width) if has_out else None
    mean, bias = normal(width, size=width**0.5), normal(width, size=width**0.5)
    return RidgeMap(mean, normal(*inner), bias, basis_in, basis_out)


def source_of(length, heads=HEADS, dim=DIM, dtype=torch.float32, seed=1):
    return torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotation(length, dim=DIM):
    return rotation_by(torch.arange(length) * 3 + 50, 1.0 / 1e4 ** (torch.arange(0, dim, 2).float() / dim))


def run(source, state, **options):
    out = torch.full_like(source, float("nan"))
    ridge_correct(source, state, out=out, **options)
    return out


def assert_equals_reference(source, state, **options):
    tolerance = TOLERANCE[source.dtype]
    want = ridge_correct_reference(source, state, **options)
    torch.testing.assert_close(run(source, state, **options), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 1, 65])
def test_equals_reference(length, form, turned, dtype):
    turn = rotation(length) if turned else None
    assert_equals_reference(source_of(length, dtype=dtype), state_of(form=form), rotation=turn)


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(0, 80),
    heads=st.integers(1, 4),
    dim=st.sampled_from([2, 8, 20, 64]),
    ranks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    form=st.sampled_from(list(FORMS)),
    turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_equals_reference_for_any_shape(length, heads, dim, ranks, form, turned, dtype, seed):
    state = state_of(heads * dim, *ranks, form=form, seed=seed)
    turn = rotation(length, dim) if turned else None
    assert_equals_reference(source_of(length, heads, dim, dtype, seed), state, rotation=turn)


def test_a_channel_far_from_zero_costs_no_precision():
    state = state_of()
    mean = state.mean.clone()
    mean[3] = 40.0
    state = RidgeMap(mean, state.weights, state.bias, state.basis_in, state.basis_out)
    source = source_of(50)
    source[:, 0, 3] += 40.0
    assert_equals_reference(source, state)


def test_a_map_of_zeros_adds_its_bias_alone():
    state = state_of(form="full")
    still = RidgeMap(state.mean, torch.zeros_like(state.weights), state.bias)
    source = source_of(20)
    want = source + state.bias.view(HEADS, DIM)
    torch.testing.assert_close(run(source, still), want, atol=1e-6, rtol=1e-6)


def test_the_map_that_undoes_the_source_gives_the_target():
    source, target = source_of(20), torch.randn(HEADS * DIM)
    state = RidgeMap(torch.zeros(HEADS * DIM), -torch.eye(HEADS * DIM), target)
    torch.testing.assert_close(run(source, state), target.view(1, HEADS, DIM).expand(20, -1, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("form", ["both", "full"])
@pytest.mark.parametrize("scattered", [False, True])
def test_reads_and_writes_rows_of_a_cache(scattered, form, turned, dtype):
    generator = torch.Generator().manual_seed(5)
    cache, state = source_of(90, dtype=dtype), state_of(form=form)
    target = torch.full_like(cache, float("nan"))
    read = torch.randperm(90, generator=generator)[:40] if scattered else torch.arange(7, 47)
    write = torch.randperm(90, generator=generator)[:40] if scattered else torch.arange(50, 90)
    turn = rotation(40) if turned else None
    slots = {"source_slots": as_slots(read), "out_slots": as_slots(write)}
    ridge_correct(cache, state, out=target, rotation=turn, **slots)
    want = torch.full_like(cache, float("nan"))
    want[write] = ridge_correct_reference(cache[read], state, rotation=turn)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(target, want, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
def test_corrects_in_place(turned, form):
    source, state = source_of(40), state_of(form=form)
    turn = rotation(40) if turned else None
    want = run(source, state, rotation=turn)
    ridge_correct(source, state, out=source, rotation=turn)
    torch.testing.assert_close(source, want, atol=0, rtol=0)


def test_inputs_may_be_strided():
    pool, state = source_of(20, heads=2 * HEADS), state_of()
    source = pool[:, ::2]
    out = torch.full_like(pool, float("nan"))[:, 1::2]
    ridge_correct(source, state, out=out, rotation=rotation(20))
    want = run(source.contiguous(), state, rotation=rotation(20))
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_folding_a_map_changes_nothing_and_keeps_the_smaller_rank(form):
    state = state_of(rank_in=3, rank_out=6, form=form)
    folded = state.folded
    assert folded.down.shape[1] == {"both": 3, "in": 3, "out": 6, "full": HEADS * DIM}[form]
    other = state_of(rank_in=6, rank_out=3, form=form)
    assert other.folded.down.shape[1] == {"both": 3, "in": 6, "out": 3, "full": HEADS * DIM}[form]


def test_only_maps_of_a_low_rank_fit_the_gpu_kernel():
    assert state_of(200, 64, 100).fits_kernel
    assert not state_of(200, 65, 100).fits_kernel
    assert not state_of(form="full").fits_kernel


def test_the_reference_can_be_forced():
    before = dispatch.calls().get(("ridge_correct", "reference"), 0)
    with dispatch.forced("reference"):
        assert_equals_reference(source_of(20), state_of(), rotation=rotation(20))
    assert dispatch.calls()["ridge_correct", "reference"] == before + 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"source": torch.zeros(10, HEADS, DIM).double()}, "source"),
        ({"out": torch.zeros(9, HEADS, DIM)}, "out"),
        ({"out_slots": torch.arange(1, 11)}, "out_slots"),
        ({"source_slots": slice(0, 11)}, "source_slots"),
        ({"state": state_of(HEADS * DIM + 1)}, "state"),
        ({"rotation": rotation(9)}, "rotation"),
    ],
)
def test_a_misfit_names_the_argument_and_writes_nothing(change, argument):
    arguments = {"source": torch.ones(10, HEADS, DIM), "state": state_of(), "out": torch.zeros(10, HEADS, DIM)}
    arguments.update(change)
    with pytest.raises(ArgumentError) as caught:
        ridge_correct(**arguments)
    assert caught.value.argument == argument
    assert not arguments["out"].any()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"mean": torch.zeros(8).double()}, "mean"),
        ({"weights": torch.zeros(3)}, "weights"),
        ({"bias": torch.zeros(7)}, "bias"),
        ({"basis_in": torch.zeros(8, 4)}, "basis_in"),
        ({"basis_in": None}, "basis_in"),
        ({"basis_out": torch.zeros(3, 8)}, "basis_out"),
        ({"basis_out": None}, "basis_out"),
        ({"basis_out": torch.zeros(8, 2).T}, "basis_out"),
    ],
)
def test_a_map_whose_parts_do_not_fit_names_the_part(change, argument):
    fitting = {
        "mean": torch.zeros(8),
        "weights": torch.zeros(3, 2),
        "bias": torch.zeros(8),
        "basis_in": torch.zeros(8, 3),
        "basis_out": torch.zeros(2, 8),
    }
    RidgeMap(**fitting)
    with pytest.raises(ArgumentError) as caught:
        RidgeMap(**{**fitting, **change})
    assert caught.value.argument == argument


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_much_greater_than_what_varies_costs_no_digits(form):
    state = state_of(form=form)
    far = RidgeMap(state.mean + 300.0, state.weights, state.bias, state.basis_in, state.basis_out)
    source = 0.1 * source_of(40) + far.mean.view(HEADS, DIM)
    assert_equals_reference(source, far)
