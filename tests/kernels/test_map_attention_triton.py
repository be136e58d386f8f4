import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import MapStorage, PackedMap, index_of
from crossfill_kernels.map_attention import FORMS, map_attention, map_attention_reference
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.paged_attention import paged_attention_reference

SCALE = 0.2
STORAGES = [torch.float32, torch.bfloat16, torch.uint8]
OWN_FORMS = pytest.mark.parametrize("form", [form for form in FORMS if form != "auto"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random_map(blocks, senders, density, storage=torch.float32, device="cpu"):
    """A random map of row blocks: rows sum to about 1, nothing above the diagonal, unused slots poisoned."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1
    mask = torch.rand(senders, len(blocks), columns, generator=generator) < density
    lists = index_of(mask, numbers).mask(columns)
    entries = lists.permute(1, 2, 0).nonzero()  # [m, 3]: place of the row block, column, head
    offsets = torch.zeros(len(blocks) + 1, dtype=torch.int32)
    offsets[1:] = lists.sum(dim=(0, 2)).cumsum(0)
    count = entries.shape[0]
    slots = torch.randperm(count + 3, generator=generator)[:count].int()
    tiles = torch.rand(count, 64, 64, generator=generator) / (32 * columns * max(density, 0.1))
    diagonal = entries[:, 1] == numbers[entries[:, 0]]
    tiles = torch.where(diagonal[:, None, None], tiles.tril(), tiles)
    if storage == torch.uint8:
        scales = torch.full((count + 3, 64), float("nan"))
        scales[slots.long()] = tiles.amax(dim=-1) / 255
        blocks_of = torch.full((count + 3, 64, 64), 77, dtype=storage)
        tiles = (tiles / tiles.amax(dim=-1, keepdim=True).clamp(min=1e-9) * 255).round()
    else:
        scales, blocks_of = None, torch.full((count + 3, 64, 64), float("nan"), dtype=storage)
    blocks_of[slots.long()] = tiles.to(storage)
    stored = MapStorage(blocks_of.to(device), None if scales is None else scales.to(device))
    columns_of = (entries[:, 1] * senders + entries[:, 2]).int()
    return PackedMap(senders, *(t.to(device) for t in (numbers, offsets, columns_of, slots)), stored)


def random_weights(senders, receivers, device, nonzero=1.0):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(senders, receivers, generator=generator)
    return (weights * (torch.rand(senders, receivers, generator=generator) < nonzero) / senders).to(device)


def run(case, packed, weights, form):
    shape = (case.rows.count, weights.shape[1], case.values.shape[2])
    out = torch.full(shape, float("nan"), dtype=case.values.dtype, device=case.values.device)
    with dispatch.forced("triton"):
        map_attention(packed, weights, case.values, case.slots, case.rows, out=out, form=form)
    return out


def assert_equals_reference(case, packed, weights, form):
    want = map_attention_reference(packed, weights, case.values, case.slots, case.rows)
    tolerance = TOLERANCE[case.values.dtype]
    torch.testing.assert_close(run(case, packed, weights, form), want, atol=tolerance, rtol=tolerance)


@OWN_FORMS
@pytest.mark.parametrize(
    ("positions", "context", "dtype", "storage"),
    [
        (range(1), 1, torch.float32, torch.float32),
        (range(199, 200), 200, torch.float32, torch.uint8),
        *(([0, 5, 63, 64, 130, 131], 135, torch.float32, storage) for storage in STORAGES),
        *((range(60, 80), 80, torch.bfloat16, storage) for storage in STORAGES),
    ],
    ids=["one-token", "decode", *(f"compacted-{s}" for s in STORAGES), *(f"bfloat16-{s}" for s in STORAGES)],
)
def test_equals_reference(triton_device, attention_case, positions, context, dtype, storage, form):
    scattered = storage == torch.uint8
    case = attention_case(positions, context, 4, 2, 16, dtype, scattered).to(triton_device)
    packed = random_map(case.rows.blocks.tolist(), 5, 0.5, storage, triton_device)
    assert_equals_reference(case, packed, random_weights(5, 4, triton_device, 0.6), form)


@OWN_FORMS
@pytest.mark.parametrize(
    ("senders", "receivers", "kv_heads", "dim"),
    [(1, 1, 1, 64), (40, 5, 1, 8), (3, 9, 3, 40), (2, 34, 17, 16)],
    ids=["one-head", "many-sender-heads", "padded", "many-kv-heads"],
)
def test_heads_and_dimensions_are_padded(triton_device, attention_case, senders, receivers, kv_heads, dim, form):
    case = attention_case(range(60, 80), 80, kv_heads, kv_heads, dim).to(triton_device)
    packed = random_map([0, 1], senders, 0.9, device=triton_device)
    assert_equals_reference(case, packed, random_weights(senders, receivers, triton_device), form)


@OWN_FORMS
def test_rows_may_be_some_row_blocks_of_the_map(triton_device, attention_case, form):
    case = attention_case([70, 190], 195, 4, 2, 16).to(triton_device)
    packed = random_map([0, 1, 2], 4, 0.6, device=triton_device)
    assert_equals_reference(case, packed, random_weights(4, 4, triton_device), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_block_without_entries_gives_zeros(triton_device, attention_case, form):
    case = attention_case(range(60, 70), 70, 2, 1, 16).to(triton_device)
    weights = random_weights(3, 2, triton_device)
    assert torch.equal(run(case, random_map([0, 1], 3, 0.0, device=triton_device), weights, form), case.query * 0)
    some = random_map([0, 1], 3, 0.4, device=triton_device)
    assert_equals_reference(case, some, weights * 0, form)


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_map_of_the_same_model_is_exact_attention(triton_device, attention_case, form):
    case = attention_case(range(130), 130, 2, 1, 16).to(triton_device)
    index = index_of(torch.ones(2, 3, 3, dtype=torch.bool, device=triton_device), case.rows.blocks)
    kept = int(index.offsets[-1])
    with dispatch.forced("triton"):
        packed = pack_map(
            *(case.query, case.keys, case.slots, case.rows, index),
            scale=SCALE,
            storage=MapStorage(torch.full((kept, 64, 64), float("nan"), device=triton_device)),
            slot_ids=torch.arange(kept, dtype=torch.int32, device=triton_device).flip(0),
        )
    want = paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)
    one_hot = torch.eye(2, device=triton_device)
    torch.testing.assert_close(run(case, packed, one_hot, form), want, atol=1e-5, rtol=1e-5)
    # The control: heads exchanged, it is not.
    assert not torch.allclose(run(case, packed, one_hot.flip(0), form), want, atol=1e-2)


@OWN_FORMS
def test_parts_of_a_list_add_up_to_the_whole(triton_device, attention_case, form, monkeypatch):
    from crossfill_kernels.map_attention import triton as kernels

    case = attention_case(range(128, 140), 140, 2, 1, 16).to(triton_device)
    packed = random_map([2], 4, 0.8, device=triton_device)
    weights = random_weights(4, 2, triton_device)
    results = []
    for parts in (1, 2, 8):
        monkeypatch.setattr(kernels, "_parts", lambda *_, parts=parts: parts)
        assert_equals_reference(case, packed, weights, form)
        results.append(run(case, packed, weights, form))
        # Parts are added in order, so that a call repeats itself to the bit.
        assert torch.equal(run(case, packed, weights, form), results[-1])


def test_few_row_blocks_are_split_and_many_are_not(triton_device):
    from crossfill_kernels.map_attention import triton as kernels

    assert kernels._parts(1, 1000, triton_device) > 1
    assert kernels._parts(100_000, 1000, triton_device) == 1
    assert kernels._parts(1, 3, triton_device) == 1


@pytest.mark.parametrize(
    ("senders", "receivers", "kv_heads", "form"),
    [(16, 16, 8, "mix"), (16, 16, 1, "values_first")],
    ids=["many-kv-heads", "one-kv-head"],
)
def test_auto_takes_the_form_of_fewer_products(triton_device, senders, receivers, kv_heads, form):
    from crossfill_kernels.map_attention import triton as kernels

    assert kernels._least_work(senders, receivers, kv_heads, 128) == form
