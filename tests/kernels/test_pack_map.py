import dataclasses
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import MapStorage, index_of
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK, rows_at

# Not 1/√d, which an implementation might take by itself.
SCALE = 0.2
STORAGES = [torch.float32, torch.bfloat16, torch.uint8]


def random_index(case, density, seed=0, forced=True):
    columns = max(0, case.rows.last) // BLOCK + 1
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(case.query.shape[1], case.rows.block_count, columns, generator=generator) < density
    if forced:
        mask[:, :, 0] = True
        mask |= torch.arange(columns)[None, :] == case.rows.blocks[:, None]
    return index_of(mask, case.rows.blocks)


def poisoned(slots, dtype):
    """Storage that an op has to write before it means anything."""
    if dtype == torch.uint8:
        return MapStorage(torch.full((slots, 64, 64), 77, dtype=dtype), torch.full((slots, 64), float("nan")))
    return MapStorage(torch.full((slots, 64, 64), float("nan"), dtype=dtype))


def pack(case, index, dtype=torch.float32, seed=0, spare=5, **options):
    kept = int(index.offsets[-1])
    slot_ids = torch.randperm(kept + spare, generator=torch.Generator().manual_seed(seed))[:kept].int()
    storage = poisoned(kept + spare, dtype)
    return pack_map(
        case.query, case.keys, case.slots, case.rows, index, scale=SCALE, storage=storage, slot_ids=slot_ids, **options
    )


def lse_of(case):
    """Row log-sum-exp over all causal keys, float32 [n, H]."""
    return scores_of(case).logsumexp(dim=-1).t().float().contiguous()


def scores_of(case):
    heads = case.query.shape[1]
    keys = case.keys[case.slots].double().repeat_interleave(heads // case.keys.shape[1], dim=1)
    scores = SCALE * torch.einsum("nhd,thd->hnt", case.query.double(), keys)
    return scores.masked_fill(torch.arange(keys.shape[0]) > case.rows.positions[:, None], float("-inf"))


def unpacked(packed):
    """Stored blocks as float64 [m, 64, 64], entry by entry."""
    tiles = packed.storage.blocks[packed.slots.long()].double()
    if packed.storage.scales is None:
        return tiles
    return tiles * packed.storage.scales[packed.slots.long()].double()[..., None]


def dense_of(packed, rows, length):
    """The map as float64 [H, n, length], written out entry by entry."""
    dense = torch.zeros(packed.heads, rows.count, -(-length // BLOCK) * BLOCK, dtype=torch.float64)
    tiles = unpacked(packed)
    for i in range(rows.block_count):
        mine = slice(int(rows.starts[i]), int(rows.starts[i + 1]))
        for e in range(int(packed.offsets[i]), int(packed.offsets[i + 1])):
            column, head = divmod(int(packed.columns[e]), packed.heads)
            places = rows.positions[mine] - int(rows.blocks[i]) * BLOCK
            dense[head, mine, column * BLOCK : (column + 1) * BLOCK] = tiles[e, places]
    return dense[..., :length]


def assert_equals_reference(case, index, dtype, **options):
    got = pack(case, index, dtype, **options)
    with dispatch.forced("reference"):
        want = pack(case, index, torch.float32, **options)
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.columns, want.columns)
    assert torch.equal(got.slots, want.slots)
    values, expected = unpacked(got), unpacked(want)
    # bfloat16 keeps 8 bits of a probability; a byte counts steps of a 255th of its row's greatest.
    step = torch.zeros(()) if dtype == torch.float32 else expected / 256
    if dtype == torch.uint8:
        step = expected.amax(dim=-1, keepdim=True) / 255 / 2
    tolerance = 1e-2 if case.query.dtype == torch.bfloat16 else 1e-5
    assert not values.isnan().any()
    assert bool(((values - expected).abs() <= step + tolerance * (1 + expected)).all())


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("renormalise", [True, False], ids=["renormalised", "raw"])
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
def test_equals_reference(attention_case, positions, context, renormalise, dtype, storage):
    case = attention_case(positions, context, dtype=dtype, scattered=True)
    lse = None if renormalise else lse_of(case)
    assert_equals_reference(case, random_index(case, 0.4), storage, lse=lse, renormalise=renormalise)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("native_variant")
def test_equals_reference_for_any_shape(drawn_case, data):
    case = drawn_case(data, 400)
    index = random_index(case, data.draw(st.sampled_from([0.0, 0.3, 1.0])), forced=data.draw(st.booleans()))
    renormalise = data.draw(st.booleans())
    storage = data.draw(st.sampled_from(STORAGES))
    assert_equals_reference(case, index, storage, lse=lse_of(case), renormalise=renormalise)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_round_trip_to_dense_probabilities(attention_case, implementation):
    case = attention_case(range(300), 300)
    with dispatch.forced(implementation):
        packed = pack(case, random_index(case, 1.0))
    want = scores_of(case).softmax(dim=-1)
    torch.testing.assert_close(dense_of(packed, case.rows, 300), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.usefixtures("native_variant")
def test_renormalised_rows_sum_to_one_and_raw_rows_to_what_is_retained(attention_case, storage):
    case = attention_case(range(300), 300)
    index = random_index(case, 0.3)
    seen = index.mask(5).repeat_interleave(case.rows.starts.diff().long(), dim=1).repeat_interleave(64, dim=2)
    retained = (scores_of(case).softmax(dim=-1) * seen[..., :300]).sum(dim=-1)
    assert float(retained.min()) < 0.5
    # In bytes, probabilities below a 510th of the greatest of their row and block become nothing.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.uint8: 3e-2}[storage]
    for renormalise, want in ((True, torch.ones_like(retained)), (False, retained)):
        packed = pack(case, index, storage, lse=lse_of(case), renormalise=renormalise)
        sums = dense_of(packed, case.rows, 300).sum(dim=-1)
        torch.testing.assert_close(sums, want, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("native_variant")
def test_entries_stand_by_row_block_then_column_then_head(attention_case):
    case = attention_case(range(64, 300), 300)
    index = random_index(case, 0.4)
    packed, mask = pack(case, index), index.mask(5)
    for i in range(case.rows.block_count):
        want = [c * 6 + h for c in range(5) for h in range(6) if mask[h, i, c]]
        assert packed.columns[int(packed.offsets[i]) : int(packed.offsets[i + 1])].tolist() == want


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.usefixtures("native_variant")
def test_other_slots_are_left_alone(attention_case, storage):
    case = attention_case(range(200), 200)
    packed = pack(case, random_index(case, 0.3), storage)
    spare = torch.ones(packed.storage.blocks.shape[0], dtype=torch.bool)
    spare[packed.slots.long()] = False
    assert int(spare.sum()) == 5
    left = packed.storage.blocks[spare]
    assert bool((left == 77).all() if storage == torch.uint8 else left.isnan().all())
    if packed.storage.scales is not None:
        assert bool(packed.storage.scales[spare].isnan().all())
        assert not packed.storage.scales[~spare].isnan().any()


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.usefixtures("native_variant")
def test_a_row_without_kept_keys_is_zero(attention_case, storage):
    case = attention_case(range(130), 130)
    mask = torch.zeros(6, 3, 3, dtype=torch.bool)
    mask[:, 2, 2] = True
    packed = pack(case, index_of(mask, case.rows.blocks), storage)
    # Row block 2 has positions 128 and 129; the second half of head 0's block stays without rows.
    assert torch.equal(unpacked(packed)[:, 2:], torch.zeros(6, 62, 64, dtype=torch.float64))
    assert bool((unpacked(packed)[:, 0, 0] > 0.99).all())


@pytest.mark.usefixtures("native_variant")
def test_extreme_scores_keep_their_row_whole(attention_case):
    case = attention_case(range(200), 200)
    case.keys[case.slots][3] = 400.0 * case.query[199, 0]
    assert float(scores_of(case)[0, 199].max()) > 1000
    for storage in STORAGES:
        packed = pack(case, random_index(case, 0.5), storage)
        sums = dense_of(packed, case.rows, 200).sum(dim=-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=3e-2, rtol=0)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.usefixtures("native_variant")
def test_nan_is_not_hidden(attention_case, storage):
    case = attention_case(range(64), 64)
    case.query[9, 2] = float("nan")
    blocks = unpacked(pack(case, random_index(case, 1.0), storage))
    assert blocks[2, 9, :10].isnan().all()
    assert not blocks[2, :9].isnan().any()
    assert not blocks[1].isnan().any()


@pytest.mark.usefixtures("native_variant")
def test_a_sum_that_is_far_too_small_gives_no_negative_probability(attention_case):
    case = attention_case(range(64), 64)
    lse = lse_of(case) - 200.0
    packed = pack(case, random_index(case, 1.0), renormalise=False, lse=lse)
    assert (unpacked(packed) >= 0).all()


@pytest.mark.usefixtures("native_variant")
def test_query_and_lse_may_be_strided(attention_case):
    case = attention_case(range(100), 100)
    index, lse = random_index(case, 0.5), lse_of(case)
    wide = dataclasses.replace(case, query=torch.cat([case.query, case.query], dim=-1)[..., :64])
    assert not wide.query.is_contiguous()
    got = pack(wide, index, lse=lse.t().contiguous().t(), renormalise=False)
    want = pack(case, index, lse=lse, renormalise=False)
    assert torch.equal(unpacked(got), unpacked(want))


def test_an_index_may_be_longer_than_its_lists(attention_case):
    case = attention_case(range(100), 100)
    index = random_index(case, 0.5)
    longer = dataclasses.replace(index, columns=torch.cat([index.columns, torch.full((9,), -1, dtype=torch.int32)]))
    assert torch.equal(unpacked(pack(case, longer)), unpacked(pack(case, index)))


def test_no_rows_is_no_work(attention_case):
    case = attention_case([], 10)
    packed = pack(case, random_index(case, 1.0))
    assert packed.columns.numel() == 0
    assert packed.offsets.tolist() == [0]


def test_threads_at_once_write_the_same(attention_case):
    case = attention_case(range(300), 300)
    index = random_index(case, 0.4)
    want, got = unpacked(pack(case, index)), []
    workers = [threading.Thread(target=lambda: got.append(unpacked(pack(case, index)))) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 6
    assert all(torch.equal(tiles, want) for tiles in got)


def test_the_reference_serves_without_a_library(attention_case):
    case = attention_case(range(70), 70)
    before = dispatch.calls().get(("pack_map", "reference"), 0)
    with library.replaced(None):
        pack(case, random_index(case, 1.0))
    assert dispatch.calls()["pack_map", "reference"] == before + 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: {"query": a["query"][0]}, "query"),
        (lambda a: {"query": a["query"].double()}, "query"),
        (lambda a: {"query": a["query"][:, :5]}, "query"),
        (lambda a: {"query": a["query"].transpose(1, 2).contiguous().transpose(1, 2)}, "query"),
        (lambda a: {"key_cache": a["key_cache"].bfloat16()}, "key_cache"),
        (lambda a: {"key_cache": a["key_cache"][..., :32]}, "key_cache"),
        (lambda a: {"slots": slice(0, 99)}, "slots"),
        (lambda a: {"slots": slice(60, 160)}, "slots"),
        (lambda a: {"slots": torch.arange(100) - 1}, "slots"),
        (lambda a: {"slots": torch.arange(100).int()}, "slots"),
        (lambda a: {"rows": rows_at(range(99))}, "rows"),
        (lambda a: {"scale": float("nan")}, "scale"),
        (lambda a: {"index": index_of(torch.ones(5, 2, 2, dtype=torch.bool), a["rows"].blocks)}, "index"),
        (lambda a: {"index": index_of(torch.ones(6, 2, 2, dtype=torch.bool), a["rows"].blocks + 1)}, "index"),
        (lambda a: {"index": dataclasses.replace(a["index"], columns=a["index"].columns * 2)}, "columns"),
        (lambda a: {"index": dataclasses.replace(a["index"], columns=a["index"].columns.flip(0))}, "columns"),
        (lambda a: {"slot_ids": a["slot_ids"][:-1]}, "slot_ids"),
        (lambda a: {"slot_ids": a["slot_ids"].long()}, "slot_ids"),
        (lambda a: {"slot_ids": a["slot_ids"] - 1}, "slot_ids"),
        (lambda a: {"slot_ids": a["slot_ids"] + 9}, "slot_ids"),
        (lambda a: {"slot_ids": a["slot_ids"] // 2}, "slot_ids"),
        (lambda a: {"renormalise": False}, "lse"),
        (lambda a: {"lse": torch.zeros(6, 100)}, "lse"),
        (lambda a: {"lse": torch.zeros(100, 6).double()}, "lse"),
        (lambda a: {"storage": MapStorage(torch.zeros(20, 64, 64, device="meta"))}, "storage"),
    ],
)
def test_a_misfit_names_the_argument_before_anything_is_written(attention_case, change, argument):
    case = attention_case(range(100), 100)
    index = random_index(case, 1.0)
    kept = int(index.offsets[-1])
    arguments = {
        "query": case.query,
        "key_cache": case.keys,
        "slots": case.slots,
        "rows": case.rows,
        "index": index,
        "scale": SCALE,
        "storage": poisoned(kept + 2, torch.float32),
        "slot_ids": torch.arange(kept, dtype=torch.int32),
    }
    arguments |= change(arguments)
    with pytest.raises(ArgumentError) as caught:
        pack_map(**arguments)
    assert caught.value.argument == argument
    if not arguments["storage"].blocks.is_meta:
        assert bool(arguments["storage"].blocks.isnan().all())
