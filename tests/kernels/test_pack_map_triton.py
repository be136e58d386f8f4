import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, MapStorage, index_of
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.rows import BLOCK

SCALE = 0.2
STORAGES = [torch.float32, torch.bfloat16, torch.uint8]


def random_index(case, density, forced=True):
    columns = max(0, case.rows.last) // BLOCK + 1
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(case.query.shape[1], case.rows.block_count, columns, generator=generator) < density
    if forced:
        mask[:, :, 0] = True
        mask |= torch.arange(columns)[None, :] == case.rows.blocks.cpu()[:, None]
    return index_of(mask.to(case.query.device), case.rows.blocks)


def pack(case, index, storage, implementation, **options):
    """Pack into poisoned slots, five of which stay unused."""
    kept, device = int(index.offsets[-1]), case.query.device
    slot_ids = torch.randperm(kept + 5, generator=torch.Generator().manual_seed(0))[:kept].int().to(device)
    if storage == torch.uint8:
        slots = MapStorage(
            torch.full((kept + 5, 64, 64), 77, dtype=storage, device=device),
            torch.full((kept + 5, 64), float("nan"), device=device),
        )
    else:
        slots = MapStorage(torch.full((kept + 5, 64, 64), float("nan"), dtype=storage, device=device))
    with dispatch.forced(implementation):
        return pack_map(
            *(case.query, case.keys, case.slots, case.rows, index),
            scale=SCALE,
            storage=slots,
            slot_ids=slot_ids,
            **options,
        )


def lse_of(case):
    """Row log-sum-exp over all causal keys, float32 [n, H]."""
    keys = case.keys[case.slots].double().repeat_interleave(case.query.shape[1] // case.keys.shape[1], dim=1)
    scores = SCALE * torch.einsum("nhd,thd->hnt", case.query.double(), keys)
    hidden = torch.arange(keys.shape[0], device=keys.device) > case.rows.positions[:, None]
    return scores.masked_fill(hidden, float("-inf")).logsumexp(dim=-1).t().float().contiguous()


def unpacked(packed):
    """Stored blocks as float64 [m, 64, 64], entry by entry."""
    tiles = packed.storage.blocks[packed.slots.long()].double()
    if packed.storage.scales is None:
        return tiles
    return tiles * packed.storage.scales[packed.slots.long()].double()[..., None]


def assert_equals_reference(case, index, storage, **options):
    got = pack(case, index, storage, "triton", **options)
    want = pack(case, index, torch.float32, "reference", **options)
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.columns, want.columns)
    assert torch.equal(got.slots, want.slots)
    values, expected = unpacked(got), unpacked(want)
    # bfloat16 keeps 8 bits of a probability; a byte counts steps of a 255th of its row's greatest.
    step = torch.zeros_like(expected) if storage == torch.float32 else expected / 128
    if storage == torch.uint8:
        step = expected.amax(dim=-1, keepdim=True) / 255 / 2
    tolerance = 1e-2 if case.query.dtype == torch.bfloat16 else 1e-5
    assert not values.isnan().any()
    assert bool(((values - expected).abs() <= step + tolerance * (1 + expected)).all())


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("renormalise", [True, False], ids=["renormalised", "raw"])
@pytest.mark.parametrize(
    ("positions", "context", "dtype"),
    [
        (range(1), 1, torch.float32),
        (range(70, 150), 150, torch.float32),
        ([0, 5, 63, 64, 130, 131, 190], 195, torch.float32),
        (range(30, 130), 130, torch.bfloat16),
    ],
    ids=["one-token", "chunk", "compacted", "bfloat16"],
)
def test_equals_reference(triton_device, attention_case, positions, context, dtype, renormalise, storage):
    case = attention_case(positions, context, 4, 2, 32, dtype, scattered=renormalise).to(triton_device)
    lse = None if renormalise else lse_of(case)
    assert_equals_reference(case, random_index(case, 0.4), storage, lse=lse, renormalise=renormalise)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_head_dimension_is_padded(triton_device, attention_case, storage):
    case = attention_case(range(70), 70, 3, 1, 80).to(triton_device)
    assert_equals_reference(case, random_index(case, 0.4), storage)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_only_its_slots_are_written(triton_device, attention_case, storage):
    case = attention_case(range(100), 100, 2, 1, 16).to(triton_device)
    packed = pack(case, random_index(case, 0.5), storage, "triton")
    others = torch.ones(packed.storage.blocks.shape[0], dtype=torch.bool)
    others[packed.slots.cpu().long()] = False
    left = packed.storage.blocks.cpu()[others]
    assert others.sum() == 5
    assert bool((left == 77).all() if storage == torch.uint8 else left.isnan().all())


def test_a_head_that_keeps_nothing_is_left_out(triton_device, attention_case):
    case = attention_case(range(100), 100, 2, 1, 16).to(triton_device)
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    mask[1, 1] = True
    assert_equals_reference(case, index_of(mask.to(triton_device), case.rows.blocks), torch.float32)


def test_columns_behind_the_last_list_are_not_read(triton_device, attention_case):
    case = attention_case(range(100), 100, 2, 1, 16).to(triton_device)
    index = random_index(case, 0.5)
    longer = torch.cat([index.columns, index.columns.new_full((9,), 2**30)])
    padded = BlockIndex(index.heads, index.blocks, index.offsets, longer)
    got, want = (pack(case, given, torch.float32, "triton") for given in (padded, index))
    assert torch.equal(unpacked(got), unpacked(want))


def test_an_extreme_row_has_no_scale_that_cannot_be_inverted(triton_device, attention_case):
    case = attention_case(range(100), 100, 2, 1, 16)
    # Scores of block 1 lie far below those of block 0, so that its probabilities vanish.
    case.keys[case.slots][:64] = 40.0 * case.query[99, 0]
    case.keys[case.slots][64:] = -40.0 * case.query[99, 0]
    case = case.to(triton_device)
    assert_equals_reference(case, random_index(case, 1.0), torch.uint8)
