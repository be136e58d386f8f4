import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, index_of
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.guided_attention import guided_attention, guided_attention_reference
from crossfill_kernels.native import library
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import BLOCK, rows_at

# Not 1/√d, which an implementation might take by itself.
SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random_index(case, density, seed=0, forced=True):
    columns = max(0, case.rows.last) // BLOCK + 1
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(case.query.shape[1], case.rows.block_count, columns, generator=generator) < density
    if forced:
        mask[:, :, 0] = True
        mask |= torch.arange(columns)[None, :] == case.rows.blocks[:, None]
    return index_of(mask, case.rows.blocks)


def run(case, index):
    out = case.empty_out()
    guided_attention(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE, out=out)
    return out


def assert_equals_reference(case, index):
    want = guided_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(run(case, index), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(
    ("positions", "context"),
    [
        (range(1), 1),
        (range(200), 200),
        (range(130, 300), 300),
        (range(64, 128), 500),
        ([0, 5, 63, 64, 130, 131, 400], 430),
    ],
    ids=["one-token", "whole", "chunk", "one-block", "compacted"],
)
@pytest.mark.usefixtures("native_variant")
def test_equals_reference(attention_case, positions, context, scattered, dtype):
    case = attention_case(positions, context, dtype=dtype, scattered=scattered)
    assert_equals_reference(case, random_index(case, 0.4))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("native_variant")
def test_equals_reference_for_any_shape(drawn_case, data):
    case = drawn_case(data, 400)
    forced = data.draw(st.booleans())
    assert_equals_reference(case, random_index(case, data.draw(st.sampled_from([0.0, 0.3, 1.0])), forced=forced))


@pytest.mark.usefixtures("native_variant")
def test_every_block_kept_is_exact_attention(attention_case):
    case = attention_case(range(70, 330), 330)
    want = paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)
    kept = random_index(case, 1.0)
    torch.testing.assert_close(run(case, kept), want, atol=1e-5, rtol=1e-5)
    # The control: with blocks left out it is not.
    assert not torch.allclose(run(case, random_index(case, 0.0)), want, atol=1e-2)


@pytest.mark.usefixtures("native_variant")
def test_a_row_without_kept_keys_gives_zeros(attention_case):
    case = attention_case(range(150), 150)
    index = random_index(case, 0.0, forced=False)
    assert torch.equal(run(case, index), torch.zeros_like(case.query))


@pytest.mark.usefixtures("native_variant")
def test_what_is_not_kept_is_not_read(attention_case):
    case = attention_case(range(300), 300)
    index = random_index(case, 0.0)
    before = run(case, index)
    case.keys[case.slots][64:128] = float("nan")
    case.values[case.slots][64:128] = float("nan")
    after = run(case, index)
    blocks = case.rows.positions // BLOCK
    assert torch.equal(before[blocks != 1], after[blocks != 1])
    assert after[blocks == 1].isnan().any()


@pytest.mark.usefixtures("native_variant")
def test_query_and_out_may_be_strided(attention_case):
    case = attention_case(range(100), 100)
    index = random_index(case, 0.5)
    wide = torch.cat([case.query, case.query], dim=-1)[..., :64]
    out = torch.full((100, 12, 64), float("nan"))[:, ::2]
    assert not wide.is_contiguous()
    guided_attention(wide, case.keys, case.values, case.slots, case.rows, index, scale=SCALE, out=out)
    assert torch.equal(out, run(case, index))


@pytest.mark.usefixtures("native_variant")
def test_nan_is_not_hidden(attention_case):
    case = attention_case(range(100), 100)
    case.query[70, 2] = float("nan")
    index = random_index(case, 1.0)
    want = guided_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE)
    out = run(case, index)
    assert out[70, 2].isnan().all()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_several_threads_get_what_one_gets(attention_case):
    cases = [attention_case(range(500), 500, seed=seed) for seed in range(4)]
    want = [run(case, random_index(case, 0.5)) for case in cases]
    wrong = []

    def work(case, expected):
        index = random_index(case, 0.5)
        wrong.extend(case for _ in range(20) if not torch.equal(run(case, index), expected))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(cases, want, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.usefixtures("native_variant")
def test_the_number_of_openmp_threads_changes_nothing(attention_case):
    case = attention_case(range(300), 300)
    index = random_index(case, 0.5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(case, index)
        torch.set_num_threads(4)
        assert torch.equal(run(case, index), alone)
    finally:
        torch.set_num_threads(before)


def test_serves_natively_and_by_reference_without_the_library(attention_case):
    case = attention_case(range(80), 80)
    index = random_index(case, 0.5)
    for variant, implementation in (("generic", "native"), (None, "reference")):
        before = dispatch.calls().get(("guided_attention", implementation), 0)
        with library.replaced(variant):
            assert_equals_reference(case, index)
        assert dispatch.calls()["guided_attention", implementation] == before + 1


def blocks(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: a | {"query": a["query"][0]}, "query"),
        (lambda a: a | {"query": a["query"].double()}, "query"),
        (lambda a: a | {"query": a["query"].transpose(1, 2)}, "query"),
        (lambda a: a | {"query": a["query"][:, :5], "out": a["out"][:, :5]}, "query"),
        (lambda a: a | {"key_cache": a["key_cache"][..., :32]}, "key_cache"),
        (lambda a: a | {"key_cache": a["key_cache"].bfloat16()}, "key_cache"),
        (lambda a: a | {"value_cache": a["value_cache"][:, :1]}, "value_cache"),
        (lambda a: a | {"slots": slice(0, 100)}, "slots"),
        (lambda a: a | {"slots": slice(100, 300)}, "slots"),
        (lambda a: a | {"slots": torch.arange(200, dtype=torch.int32)}, "slots"),
        (lambda a: a | {"slots": torch.arange(200) + 50}, "slots"),
        (lambda a: a | {"slots": torch.arange(200) - 1}, "slots"),
        (lambda a: a | {"slots": torch.arange(200, device="meta")}, "slots"),
        (lambda a: a | {"slots": slice(0, 200, 2)}, "slots"),
        (lambda a: a | {"slots": slice(None, 200)}, "slots"),
        (lambda a: a | {"rows": rows_at(range(100))}, "rows"),
        (lambda a: a | {"index": BlockIndex(3, blocks(0, 1, 2, 3), blocks(*[0] * 13), blocks())}, "index"),
        (lambda a: a | {"index": BlockIndex(6, blocks(0, 1, 2), blocks(*[0] * 19), blocks())}, "index"),
        (lambda a: a | {"index": BlockIndex(6, blocks(0, 1, 2, 4), blocks(*[0] * 25), blocks())}, "index"),
        (lambda a: a | {"index": BlockIndex(6, blocks(0, 1, 2, 3), blocks(*[0] * 24, 1), blocks(4))}, "columns"),
        (lambda a: a | {"scale": float("nan")}, "scale"),
        (lambda a: a | {"scale": 1e39}, "scale"),
        (lambda a: a | {"out": a["out"][:1].expand(200, -1, -1)}, "out"),
        (lambda a: a | {"out": a["out"][:1]}, "out"),
        (lambda a: a | {"out": a["out"].bfloat16()}, "out"),
    ],
)
def test_a_misfit_names_the_argument(attention_case, change, argument):
    case = attention_case(range(200), 200)
    arguments = {
        "query": case.query,
        "key_cache": case.keys,
        "value_cache": case.values,
        "slots": case.slots,
        "rows": case.rows,
        "index": random_index(case, 0.5),
        "scale": SCALE,
        "out": case.empty_out(),
    }
    changed = change(arguments)
    with pytest.raises(ArgumentError) as caught:
        guided_attention(**changed)
    assert caught.value.argument == argument
    assert changed["out"].isnan().all()
