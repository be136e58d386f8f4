import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.block_mass import (
    block_mass,
    block_mass_reference,
    block_mass_sampled,
    block_mass_sampled_reference,
)
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library
from crossfill_kernels.rows import rows_at

SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def run(case):
    out, lse = case.empty_out(), torch.full(case.query.shape[:2], float("nan"))
    mass = block_mass(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE, out=out, lse=lse)
    return out, mass, lse


def sampled(case, stride=8):
    return block_mass_sampled(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=stride)


def assert_equals_reference(case):
    want_out, want, want_lse = block_mass_reference(
        case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE
    )
    out, mass, lse = run(case)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out, want_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert_close_masses(mass, want)


def assert_close_masses(mass, want):
    # The inputs are exact and sums are in float32 whatever the dtype.
    torch.testing.assert_close(mass.mass, want.mass, atol=1e-5, rtol=1e-5)
    assert torch.equal(mass.blocks, want.blocks)
    assert torch.equal(mass.totals, want.totals)


POSITIONS = pytest.mark.parametrize(
    ("positions", "context"),
    [
        (range(1), 1),
        (range(200), 200),
        (range(130, 300), 300),
        (range(64, 128), 500),
        (range(100, 101), 101),
        ([0, 5, 63, 64, 130, 131, 400], 430),
    ],
    ids=["one-token", "whole", "chunk", "one-block", "decode", "compacted"],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@POSITIONS
@pytest.mark.usefixtures("native_variant")
def test_equals_reference(attention_case, positions, context, scattered, dtype):
    assert_equals_reference(attention_case(positions, context, dtype=dtype, scattered=scattered))


@pytest.mark.parametrize("stride", [1, 5, 8, 64])
@POSITIONS
@pytest.mark.usefixtures("native_variant")
def test_sampled_equals_reference(attention_case, positions, context, stride):
    case = attention_case(positions, context, scattered=True)
    want = block_mass_sampled_reference(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=stride)
    assert_close_masses(sampled(case, stride), want)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("native_variant")
def test_equals_reference_for_any_shape(drawn_case, data):
    case = drawn_case(data, 700)
    assert_equals_reference(case)
    stride = data.draw(st.integers(1, 64))
    want = block_mass_sampled_reference(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=stride)
    assert_close_masses(sampled(case, stride), want)


@pytest.mark.usefixtures("native_variant")
def test_masses_sum_to_the_number_of_rows(attention_case):
    case = attention_case([*range(100), *range(130, 150), 700], 701)
    _, mass, _ = run(case)
    assert mass.totals.tolist() == [64.0, 36.0, 20.0, 1.0]
    torch.testing.assert_close(mass.mass.sum(dim=2), mass.totals.expand(6, -1), atol=1e-4, rtol=0)
    some = sampled(case)
    assert some.totals.tolist() == [8.0, 5.0, 3.0, 1.0]
    torch.testing.assert_close(some.mass.sum(dim=2), some.totals.expand(6, -1), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("native_variant")
def test_nothing_lies_above_the_diagonal(attention_case):
    case = attention_case(range(400), 400)
    above = torch.ones(7, 7).triu(1).bool()
    for mass in (run(case)[1], sampled(case)):
        assert (mass.mass[:, above] == 0).all()
        assert (mass.mass[:, ~above] > 0).all()


@pytest.mark.usefixtures("native_variant")
def test_masses_survive_scores_that_leave_one_block(attention_case):
    case = attention_case(range(200), 200)
    case.keys[case.slots][70] = 60.0 * case.query[199, 0]
    assert_equals_reference(case)


@pytest.mark.usefixtures("native_variant")
def test_no_rows_have_no_masses(attention_case):
    case = attention_case([], 10)
    _, mass, _ = run(case)
    assert mass.mass.shape == (6, 0, 0)
    assert sampled(case).mass.shape == (6, 0, 0)


def test_lse_is_optional(attention_case):
    case = attention_case(range(90), 90)
    out = case.empty_out()
    block_mass(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE, out=out)
    assert torch.equal(out, run(case)[0])


def test_serves_natively_and_by_reference_without_the_library(attention_case):
    case = attention_case(range(80), 80)
    for variant, implementation in (("generic", "native"), (None, "reference")):
        before = dispatch.calls()
        with library.replaced(variant):
            assert_equals_reference(case)
            sampled(case)
        for op in ("block_mass", "block_mass_sampled"):
            assert dispatch.calls()[op, implementation] == before.get((op, implementation), 0) + 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"query": torch.zeros(80, 6)}, "query"),
        ({"key_cache": torch.zeros(200, 4, 64)}, "query"),
        ({"value_cache": torch.zeros(10, 2, 64)}, "value_cache"),
        ({"slots": slice(0, 79)}, "slots"),
        ({"rows": rows_at(range(79))}, "rows"),
        ({"out": torch.zeros(80, 6, 32)}, "out"),
        ({"lse": torch.zeros(80, 5)}, "lse"),
        ({"lse": torch.zeros(80, 6).double()}, "lse"),
        ({"scale": float("inf")}, "scale"),
    ],
    ids=["query", "head-group", "values", "slots", "rows", "out", "lse-shape", "lse-dtype", "scale"],
)
def test_a_misfit_names_the_argument(attention_case, change, argument):
    case = attention_case(range(80), 80)
    arguments = {
        "query": case.query,
        "key_cache": case.keys,
        "value_cache": case.values,
        "slots": case.slots,
        "rows": case.rows,
        "scale": SCALE,
        "out": case.empty_out(),
    }
    with pytest.raises(ArgumentError) as caught:
        block_mass(**(arguments | change))
    assert caught.value.argument == argument


@pytest.mark.parametrize("stride", [0, 65, -1])
def test_a_stride_stays_within_a_block(attention_case, stride):
    with pytest.raises(ArgumentError, match="stride"):
        sampled(attention_case(range(80), 80), stride)
