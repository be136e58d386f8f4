import dataclasses
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import MapStorage, PackedMap, index_of
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.map_attention import FORMS, map_attention, map_attention_reference
from crossfill_kernels.native import library
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import BLOCK, rows_at

SCALE = 0.2
STORAGES = [torch.float32, torch.bfloat16, torch.uint8]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random_map(blocks, senders, density, storage=torch.float32, seed=0, forced=False):
    """A random map of row blocks: rows sum to about 1, nothing above the diagonal, unused slots poisoned."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1
    mask = torch.rand(senders, len(blocks), columns, generator=generator) < density
    if forced:
        mask |= torch.arange(columns) == numbers[:, None]
    lists = index_of(mask, numbers).mask(columns)
    entries = lists.permute(1, 2, 0).nonzero()  # [m, 3]: place of the row block, column, head
    offsets = torch.zeros(len(blocks) + 1, dtype=torch.int32)
    offsets[1:] = lists.sum(dim=(0, 2)).cumsum(0)
    count = entries.shape[0]
    slots = torch.randperm(count + 3, generator=generator)[:count].int()
    tiles = torch.rand(count, 64, 64, generator=generator) / (32 * columns * max(density, 0.1))
    diagonal = entries[:, 1] == numbers[entries[:, 0]]
    tiles = torch.where(diagonal[:, None, None], tiles.tril(), tiles)
    stored = MapStorage(torch.full((count + 3, 64, 64), float("nan")))
    if storage == torch.uint8:
        stored = MapStorage(
            torch.full((count + 3, 64, 64), 77, dtype=storage), torch.full((count + 3, 64), float("nan"))
        )
        stored.scales[slots.long()] = tiles.amax(dim=-1) / 255
        tiles = (tiles / tiles.amax(dim=-1, keepdim=True).clamp(min=1e-9) * 255).round()
    elif storage == torch.bfloat16:
        stored = MapStorage(stored.blocks.bfloat16())
    stored.blocks[slots.long()] = tiles.to(storage)
    return PackedMap(senders, numbers, offsets, (entries[:, 1] * senders + entries[:, 2]).int(), slots, stored)


def random_weights(senders, receivers, nonzero=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(senders, receivers, generator=generator)
    return weights * (torch.rand(senders, receivers, generator=generator) < nonzero) / senders


def run(case, packed, weights, form="auto"):
    out = torch.full((case.rows.count, weights.shape[1], case.values.shape[2]), float("nan"), dtype=case.values.dtype)
    map_attention(packed, weights, case.values, case.slots, case.rows, out=out, form=form)
    return out


def assert_equals_reference(case, packed, weights, form="auto"):
    want = map_attention_reference(packed, weights, case.values, case.slots, case.rows)
    tolerance = TOLERANCE[case.values.dtype]
    torch.testing.assert_close(run(case, packed, weights, form), want, atol=tolerance, rtol=tolerance)


def pack_all(case, storage=torch.float32, mask=None):
    """The map of the case itself; all causal blocks, or those of a mask."""
    columns, heads = case.rows.last // BLOCK + 1, case.query.shape[1]
    mask = torch.ones(heads, case.rows.block_count, columns, dtype=torch.bool) if mask is None else mask
    index = index_of(mask, case.rows.blocks)
    kept = int(index.offsets[-1])
    scales = torch.full((kept, 64), float("nan")) if storage == torch.uint8 else None
    return pack_map(
        case.query,
        case.keys,
        case.slots,
        case.rows,
        index,
        scale=SCALE,
        storage=MapStorage(torch.zeros(kept, 64, 64, dtype=storage), scales),
        slot_ids=torch.randperm(kept, generator=torch.Generator().manual_seed(0)).int(),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
def test_equals_reference(attention_case, positions, context, dtype, storage, form):
    case = attention_case(positions, context, kv_heads=3, dtype=dtype, scattered=storage == torch.uint8)
    packed = random_map(case.rows.blocks.tolist(), 5, 0.5, storage)
    assert_equals_reference(case, packed, random_weights(5, 6, 0.6), form)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("native_variant")
def test_equals_reference_for_any_shape(attention_case, data):
    context = data.draw(st.integers(1, 400))
    positions = sorted(data.draw(st.sets(st.integers(0, context - 1), max_size=90)))
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 3, 8]))
    seed = data.draw(st.integers(0, 2**20))
    case = attention_case(
        positions,
        context,
        kv_heads=kv_heads,
        heads=kv_heads,
        dim=data.draw(st.sampled_from([1, 7, 32, 64, 80, 96])),
        scattered=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=seed,
    )
    # The map may have row blocks that are not asked for.
    blocks = sorted(set(case.rows.blocks.tolist()) | data.draw(st.sets(st.integers(0, 6), max_size=3)))
    senders = data.draw(st.integers(1, 7))
    packed = random_map(
        blocks, senders, data.draw(st.sampled_from([0.0, 0.3, 1.0])), data.draw(st.sampled_from(STORAGES))
    )
    weights = random_weights(senders, kv_heads * group, data.draw(st.sampled_from([0.0, 0.3, 1.0])), seed)
    assert_equals_reference(case, packed, weights, data.draw(st.sampled_from(FORMS)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positions", [range(300), range(70, 300), range(3, 300, 7)], ids=["whole", "chunk", "gaps"])
@pytest.mark.usefixtures("native_variant")
def test_the_own_map_with_one_hot_weights_is_exact_attention(attention_case, positions, form):
    case = attention_case(positions, 300)
    packed = pack_all(case)
    want = paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)
    torch.testing.assert_close(run(case, packed, torch.eye(6), form), want, atol=1e-5, rtol=1e-5)
    # The control: another head's map gives something else.
    assert not torch.allclose(run(case, packed, torch.eye(6).roll(1, 0), form), want, atol=1e-2)


@pytest.mark.usefixtures("native_variant")
def test_bfloat16_queries_and_values_keep_exact_attention_within_their_tolerance(attention_case):
    case = attention_case(range(200), 200, dtype=torch.bfloat16)
    want = paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)
    torch.testing.assert_close(run(case, pack_all(case), torch.eye(6)), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("storage", "bound"), [(torch.uint8, 6e-3), (torch.bfloat16, 1.7e-3)], ids=["uint8", "bfloat16"]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("native_variant")
def test_what_small_storage_costs(attention_case, storage, bound, form):
    case = attention_case(range(512), 512)
    weights = random_weights(6, 6)
    whole = run(case, pack_all(case), weights, form)
    error = (run(case, pack_all(case, storage), weights, form) - whole).norm() / whole.norm()
    # The control: it is not stored as float32.
    assert 1e-5 < float(error) < bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("native_variant")
def test_values_of_blocks_that_nobody_kept_are_not_read(attention_case, form):
    case = attention_case(range(300), 300)
    packed = random_map([0, 1, 2, 3, 4], 5, 1.0)
    column = packed.columns // 5
    keep = column != 1
    rows = torch.repeat_interleave(torch.arange(5), packed.offsets.diff().long())[keep]
    offsets = torch.zeros(6, dtype=torch.int32)
    offsets[1:] = rows.bincount(minlength=5).cumsum(0)
    packed = dataclasses.replace(packed, offsets=offsets, columns=packed.columns[keep], slots=packed.slots[keep])
    before = run(case, packed, random_weights(5, 6), form)
    case.values[case.slots][64:128] = float("nan")
    assert torch.equal(run(case, packed, random_weights(5, 6), form), before)
    case.values[case.slots][128:192] = float("nan")
    assert run(case, packed, random_weights(5, 6), form).isnan().any()


@pytest.mark.parametrize("form", ["auto", "mix", "values_first", "sparse"])
@pytest.mark.usefixtures("native_variant")
def test_values_that_only_a_head_of_no_weight_kept_are_not_read(attention_case, form):
    case = attention_case(range(64, 128), 128)
    mask = torch.zeros(6, 1, 2, dtype=torch.bool)
    mask[0, 0, 0] = mask[1, 0, 1] = True
    packed = pack_all(case, mask=mask)
    weights = torch.zeros(6, 4)
    weights[1] = 1.0
    case.values[case.slots][:64] = float("nan")
    assert not run(case, packed, weights, form).isnan().any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("native_variant")
def test_a_row_block_without_entries_gives_zeros(attention_case, form):
    case = attention_case(range(130), 130)
    packed = random_map([0, 1, 2], 4, 0.0)
    assert torch.equal(run(case, packed, random_weights(4, 6), form), torch.zeros(130, 6, 64))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("native_variant")
def test_values_and_out_may_be_strided(attention_case, form):
    case = attention_case(range(100), 100)
    packed, weights = random_map([0, 1], 4, 0.7), random_weights(4, 6)
    # Rows a multiple of 1 KiB apart, and starts that no vector is aligned to.
    for width, first in ((256, 0), (67, 3)):
        wide = torch.full((case.values.shape[0], 2, width), float("nan"))
        wide[..., first : first + 64] = case.values
        out = torch.full((100, 12, 64), float("nan"))[:, ::2]
        map_attention(packed, weights, wide[..., first : first + 64], case.slots, case.rows, out=out, form=form)
        torch.testing.assert_close(out, run(case, packed, weights, form), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("native_variant")
def test_weights_may_be_strided(attention_case):
    case = attention_case(range(100), 100)
    packed, weights = random_map([0, 1], 4, 0.7), random_weights(4, 6)
    assert torch.equal(run(case, packed, weights.t().contiguous().t()), run(case, packed, weights))


def test_no_rows_is_no_work(attention_case):
    case = attention_case([], 10)
    assert run(case, random_map([], 4, 1.0), random_weights(4, 6)).shape == (0, 6, 64)


@pytest.mark.parametrize("form", FORMS)
def test_threads_at_once_give_the_same(attention_case, form):
    case = attention_case(range(300), 300)
    packed, weights = random_map([0, 1, 2, 3, 4], 5, 0.5), random_weights(5, 6, 0.6)
    want, got = run(case, packed, weights, form), []
    workers = [threading.Thread(target=lambda: got.append(run(case, packed, weights, form))) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 6
    assert all(torch.equal(out, want) for out in got)


def test_the_reference_serves_without_a_library(attention_case):
    case = attention_case(range(70), 70)
    packed, weights = random_map([0, 1], 5, 0.5), random_weights(5, 6)
    before = dispatch.calls().get(("map_attention", "reference"), 0)
    with library.replaced(None):
        assert_equals_reference(case, packed, weights)
    assert dispatch.calls()["map_attention", "reference"] == before + 1


def with_map(**fields):
    return lambda a: {"packed": dataclasses.replace(a["packed"], **{k: f(a["packed"]) for k, f in fields.items()})}


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: {"form": "fast"}, "form"),
        (lambda a: {"value_cache": a["value_cache"][0]}, "value_cache"),
        (lambda a: {"value_cache": a["value_cache"].double()}, "value_cache"),
        (lambda a: {"value_cache": a["value_cache"][..., ::2], "out": a["out"][..., :32]}, "value_cache"),
        (lambda a: {"weights": a["weights"][:3]}, "weights"),
        (lambda a: {"weights": a["weights"].double()}, "weights"),
        (lambda a: {"weights": a["weights"] - 1}, "weights"),
        (lambda a: {"weights": a["weights"] * float("inf")}, "weights"),
        (lambda a: {"weights": a["weights"].index_fill(0, torch.tensor([1]), float("nan"))}, "weights"),
        (lambda a: {"weights": a["weights"][:, :5]}, "weights"),
        (lambda a: {"out": a["out"][:5]}, "out"),
        (lambda a: {"out": a["out"].bfloat16()}, "out"),
        (lambda a: {"out": a["out"].repeat(1, 1, 2)[..., ::2]}, "out"),
        (lambda a: {"slots": slice(0, 99)}, "slots"),
        (lambda a: {"slots": slice(60, 160)}, "slots"),
        (lambda a: {"slots": torch.arange(100) - 1}, "slots"),
        (lambda a: {"rows": rows_at(range(120, 220)), "slots": slice(0, 130)}, "slots"),
        (lambda a: {"rows": rows_at(range(28, 128)), "packed": random_map([0, 2], 4, 1.0)}, "slots"),
        (lambda a: {"packed": random_map([0, 2], 4, 1.0)}, "rows"),
        (lambda a: {"packed": random_map([], 4, 1.0)}, "rows"),
        (with_map(offsets=lambda p: p.offsets.flip(0)), "packed"),
        (with_map(offsets=lambda p: p.offsets - p.offsets.sign()), "packed"),
        (with_map(columns=lambda p: p.columns.flip(0)), "packed"),
        (with_map(columns=lambda p: p.columns - 1), "packed"),
        (with_map(columns=lambda p: p.columns + 4), "packed"),
        (with_map(slots=lambda p: p.slots - 5), "packed"),
        (with_map(slots=lambda p: p.slots + 9), "packed"),
    ],
)
def test_a_misfit_names_the_argument_before_anything_is_written(attention_case, change, argument):
    case = attention_case(range(100), 100)
    arguments = {
        "packed": random_map([0, 1], 4, 1.0),
        "weights": random_weights(4, 6),
        "value_cache": case.values,
        "slots": case.slots,
        "rows": case.rows,
        "out": torch.full((100, 6, 64), float("nan")),
    }
    arguments |= change(arguments)
    with pytest.raises(ArgumentError) as caught:
        map_attention(**arguments)
    assert caught.value.argument == argument
    assert bool(arguments["out"].isnan().all())
