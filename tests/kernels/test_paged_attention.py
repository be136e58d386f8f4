import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.paged_attention import as_slots, paged_attention, paged_attention_reference

# Not 1/√d, which torch would take by itself.
SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(rows, context, heads=9, kv_heads=3, dim=64, dtype=torch.float32, scattered=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    capacity = context + 37
    keys = torch.randn(capacity, kv_heads, dim, generator=generator).to(dtype)
    values = torch.randn(capacity, kv_heads, dim, generator=generator).to(dtype)
    query = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    indices = torch.randperm(capacity, generator=generator)[:context] if scattered else torch.arange(5, 5 + context)
    return query, keys, values, as_slots(indices)


def run(query, keys, values, slots):
    out = torch.full_like(query, float("nan"))
    paged_attention(query, keys, values, slots, scale=SCALE, out=out)
    return out


def assert_equals_reference(query, keys, values, slots):
    want = paged_attention_reference(query, keys, values, slots, scale=SCALE)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(run(query, keys, values, slots), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 200), (2, 130), (65, 65), (64, 129), (33, 257)])
def test_equals_reference(rows, context, scattered, dtype):
    assert_equals_reference(*case(rows, context, dtype=dtype, scattered=scattered))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    prefix=st.integers(0, 90),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([8, 32, 64, 80]),
    scattered=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_reference_for_any_shape(rows, prefix, kv_heads, group, dim, scattered, seed):
    assert_equals_reference(*case(rows, rows + prefix, kv_heads * group, kv_heads, dim, scattered=scattered, seed=seed))


def test_reference_equals_textbook_attention():
    query, keys, values, slots = case(7, 7, heads=3, kv_heads=3, dim=16)
    for head in range(3):
        k, v = keys[slots][:, head], values[slots][:, head]
        for row in range(7):
            weights = torch.softmax((k[: row + 1] @ query[row, head]) / 4.0, dim=0)
            got = paged_attention_reference(query, keys, values, slots, scale=0.25)[row, head]
            torch.testing.assert_close(got, weights @ v[: row + 1], atol=1e-6, rtol=1e-5)


def test_a_chunk_equals_the_same_rows_of_the_whole_prompt():
    query, keys, values, slots = case(150, 150, scattered=True)
    whole = run(query, keys, values, slots)
    torch.testing.assert_close(run(query[100:], keys, values, slots), whole[100:], atol=1e-5, rtol=1e-5)


def test_a_row_does_not_see_later_keys():
    query, keys, values, slots = case(40, 100)
    before = run(query, keys, values, slots)
    keys[slots.stop - 1] = 100.0
    after = run(query, keys, values, slots)
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


def test_merge_survives_extreme_scores():
    query, keys, values, slots = case(4, 80)
    keys[slots.start] = 60.0 * query[0, 0]
    assert_equals_reference(query, keys, values, slots)


def test_no_rows_is_no_work():
    query, keys, values, slots = case(0, 10)
    assert run(query, keys, values, slots).shape == (0, 9, 64)


def test_query_may_be_strided():
    query, keys, values, slots = case(20, 50)
    wide = torch.cat([query, query], dim=-1)[..., :64]
    assert not wide.is_contiguous()
    assert torch.equal(run(wide, keys, values, slots), run(query, keys, values, slots))


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
        (lambda q, k, v, s, o: (q[0], k, v, s, o), "query"),
        (lambda q, k, v, s, o: (q, k[..., :32], v, s, o), "key_cache"),
        (lambda q, k, v, s, o: (q, k, v[:, :1], s, o), "value_cache"),
        (lambda q, k, v, s, o: (q[:, :8], k, v, s, o[:, :8]), "query"),
        (lambda q, k, v, s, o: (q, k.double(), v, s, o), "key_cache"),
        (lambda q, k, v, s, o: (q, k, v, s, o[:1]), "out"),
        (lambda q, k, v, s, o: (q, k, v, slice(0, 3), o), "slots"),
    ],
    ids=["query-rank", "key-dim", "value-shape", "head-group", "key-dtype", "out-shape", "short-slots"],
)
def test_a_misfit_names_the_argument(change, argument):
    query, keys, values, slots = case(4, 10)
    q, k, v, s, o = change(query, keys, values, slots, torch.empty_like(query))
    with pytest.raises(ArgumentError) as caught:
        paged_attention(q, k, v, s, scale=0.1, out=o)
    assert caught.value.argument == argument


def test_slots_must_be_integers():
    with pytest.raises(ArgumentError, match="indices"):
        as_slots(torch.zeros(3))
