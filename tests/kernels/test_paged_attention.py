import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library
from crossfill_kernels.paged_attention import as_slots, paged_attention, paged_attention_reference
from crossfill_kernels.rows import rows_at

# Not 1/√d, which torch would take by itself.
SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=["native", "torch"])
def implementation(request):
    """The C++, and torch's kernel, which serves where only the narrow variant of the C++ could."""
    with dispatch.forced(request.param):
        yield request.param


def run(case, scale=SCALE):
    out = case.empty_out()
    paged_attention(case.query, case.keys, case.values, case.slots, case.rows, scale=scale, out=out)
    return out


def reference(case, scale=SCALE):
    return paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=scale)


def assert_equals_reference(case):
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(run(case), reference(case), atol=tolerance, rtol=tolerance)


def newest(rows, context):
    return range(context - rows, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 200), (2, 130), (65, 65), (64, 129), (33, 257)])
@pytest.mark.usefixtures("implementation")
def test_equals_reference(attention_case, rows, context, scattered, dtype):
    assert_equals_reference(
        attention_case(newest(rows, context), context, heads=9, kv_heads=3, dtype=dtype, scattered=scattered)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 200), (2, 130), (65, 65), (33, 257)])
@pytest.mark.usefixtures("native_variant")
def test_every_variant_equals_reference(attention_case, rows, context, dtype):
    with dispatch.forced("native"):
        assert_equals_reference(
            attention_case(newest(rows, context), context, heads=9, kv_heads=3, dtype=dtype, scattered=True)
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("implementation")
def test_equals_reference_for_any_shape(attention_case, data):
    rows, prefix = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 150))
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 3, 5, 12]))
    assert_equals_reference(
        attention_case(
            newest(rows, rows + prefix),
            rows + prefix,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            dim=data.draw(st.sampled_from([1, 8, 32, 64, 80, 96, 128])),
            scattered=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 2**20)),
        )
    )


@pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.usefixtures("implementation")
def test_one_row_of_any_number_of_heads(attention_case, share, dim):
    case = attention_case(
        newest(1, 150), 150, heads=2 * share, kv_heads=2, dim=dim, dtype=torch.bfloat16, scattered=True
    )
    assert_equals_reference(case)


@pytest.mark.parametrize("positions", [[0, 7, 64, 99], [99], [3], range(20, 90)], ids=str)
@pytest.mark.usefixtures("native_variant")
def test_rows_may_stand_anywhere(attention_case, positions):
    assert_equals_reference(attention_case(positions, 120, scattered=True))


def test_reference_equals_textbook_attention(attention_case):
    case = attention_case(range(7), 7, heads=3, kv_heads=3, dim=16)
    for head in range(3):
        k, v = case.keys[case.slots][:, head], case.values[case.slots][:, head]
        for row in range(7):
            weights = torch.softmax((k[: row + 1] @ case.query[row, head]) / 4.0, dim=0)
            got = reference(case, scale=0.25)[row, head]
            torch.testing.assert_close(got, weights @ v[: row + 1], atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_a_chunk_equals_the_same_rows_of_the_whole_prompt(attention_case):
    case = attention_case(range(150), 150, scattered=True)
    out = torch.full_like(case.query[100:], float("nan"))
    chunk = case.query[100:], case.keys, case.values, case.slots, rows_at(range(100, 150))
    paged_attention(*chunk, scale=SCALE, out=out)
    torch.testing.assert_close(out, run(case)[100:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [40, 1], ids=["extend", "decode"])
@pytest.mark.usefixtures("implementation")
def test_a_row_does_not_see_later_keys(attention_case, rows):
    case = attention_case(newest(rows, 100), 101)
    narrowed = paged_attention, slice(case.slots.start, case.slots.start + 100)
    out = case.empty_out()
    narrowed[0](case.query, case.keys, case.values, narrowed[1], case.rows, scale=SCALE, out=out)
    case.keys[case.slots.start + 99] = 100.0
    again = case.empty_out()
    narrowed[0](case.query, case.keys, case.values, narrowed[1], case.rows, scale=SCALE, out=again)
    assert torch.equal(out[:-1], again[:-1])
    assert not torch.allclose(out[-1], again[-1])


@pytest.mark.parametrize("rows", [4, 1], ids=["extend", "decode"])
@pytest.mark.usefixtures("implementation")
def test_extreme_scores_survive(attention_case, rows):
    case = attention_case(newest(rows, 80), 80)
    case.keys[case.slots.start] = 60.0 * case.query[0, 0]
    assert_equals_reference(case)


@pytest.mark.parametrize("rows", [4, 1], ids=["extend", "decode"])
@pytest.mark.usefixtures("implementation")
def test_nan_is_not_hidden(attention_case, rows):
    case = attention_case(newest(rows, 80), 80)
    case.query[-1, 2] = float("nan")
    out = run(case)
    assert out[-1, 2].isnan().all()
    assert not out[-1, 3].isnan().any()


@pytest.mark.usefixtures("implementation")
def test_no_rows_is_no_work(attention_case):
    assert run(attention_case([], 10)).shape == (0, 6, 64)


@pytest.mark.usefixtures("implementation")
def test_query_may_be_strided(attention_case):
    case = attention_case(newest(20, 50), 50)
    wide = torch.cat([case.query, case.query], dim=-1)[..., :64]
    out = case.empty_out()
    assert not wide.is_contiguous()
    paged_attention(wide, case.keys, case.values, case.slots, case.rows, scale=SCALE, out=out)
    assert torch.equal(out, run(case))


@pytest.mark.parametrize(
    ("variant", "positions", "implementation"),
    [
        ("generic", range(20, 80), "torch"),
        ("generic", range(20, 70), "native"),
        (None, range(20, 80), "torch"),
        (None, range(20, 70), "reference"),
    ],
    ids=["narrow", "narrow-gaps", "none", "none-gaps"],
)
def test_torch_serves_newest_rows_where_no_fast_variant_does(attention_case, variant, positions, implementation):
    before = dispatch.calls().get(("paged_attention", implementation), 0)
    with library.replaced(variant):
        assert_equals_reference(attention_case(positions, 80))
    assert dispatch.calls()["paged_attention", implementation] == before + 1


def test_consecutive_rows_are_read_in_place():
    assert as_slots(torch.arange(3, 9, dtype=torch.int32)) == slice(3, 9)
    assert as_slots(torch.tensor([], dtype=torch.int64)) == slice(0, 0)
    # Ends that fit a run while the middle does not.
    scattered = as_slots(torch.tensor([3, 7, 5]))
    assert isinstance(scattered, torch.Tensor)
    assert scattered.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: a | {"query": a["query"][0]}, "query"),
        (lambda a: a | {"key_cache": a["key_cache"][..., :32]}, "key_cache"),
        (lambda a: a | {"value_cache": a["value_cache"][:, :1]}, "value_cache"),
        (lambda a: a | {"query": a["query"][:, :5], "out": a["out"][:, :5]}, "query"),
        (lambda a: a | {"key_cache": a["key_cache"].double()}, "key_cache"),
        (lambda a: a | {"out": a["out"][:1]}, "out"),
        (lambda a: a | {"slots": slice(0, 3)}, "slots"),
    ],
    ids=["query-rank", "key-dim", "value-shape", "head-group", "key-dtype", "out-shape", "short-slots"],
)
def test_a_misfit_names_the_argument(attention_case, change, argument):
    case = attention_case(newest(4, 10), 10)
    arguments = {
        "query": case.query,
        "key_cache": case.keys,
        "value_cache": case.values,
        "slots": case.slots,
        "rows": case.rows,
        "out": case.empty_out(),
    }
    with pytest.raises(ArgumentError) as caught:
        paged_attention(**change(arguments), scale=0.1)
    assert caught.value.argument == argument


def test_slots_must_be_integers():
    with pytest.raises(ArgumentError, match="indices"):
        as_slots(torch.zeros(3))
