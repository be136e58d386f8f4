"""The kernels write maps into the pool and read them out of it where they lie."""

import pytest
import torch

from cache_store.errors import StaleHandlesError
from cache_store.pool.geometry import SlotType
from cache_store.pool.handles import unpack
from cache_store.pool.reading import reading
from crossfill_kernels.blocks import MapStorage, PackedMap, index_of
from crossfill_kernels.map_attention import map_attention
from crossfill_kernels.pack_map import pack_map
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import rows_at

HEADS, DIM, TOKENS, SCALE = 3, 16, 200, 0.2
CACHE = slice(0, TOKENS)
# Three row blocks and a part of a fourth: 10 causal blocks a head.
KEPT = 10 * HEADS
TOLERANCE = {SlotType.FLOAT32: 1e-5, SlotType.BFLOAT16: 1e-2, SlotType.UINT8: 3e-2}


def as_kernels_see_it(storage):
    blocks = torch.from_numpy(storage.blocks)
    scales = None if storage.scales is None else torch.from_numpy(storage.scales)
    return MapStorage(blocks.view(torch.bfloat16) if blocks.dtype == torch.uint16 else blocks, scales)


def random_case():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, HEADS, DIM, generator=generator) for _ in range(3)]


def send(pool, query, keys):
    """Pack the whole map; the packed map and the handles as bytes."""
    rows = rows_at(range(TOKENS))
    index = index_of(torch.ones(HEADS, rows.block_count, rows.block_count, dtype=torch.bool), rows.blocks)
    handles = pool.allocate(int(index.offsets[-1]))
    storage, slots = as_kernels_see_it(pool.storage), torch.from_numpy(handles.slots)
    packed = pack_map(query, keys, CACHE, rows, index, scale=SCALE, storage=storage, slot_ids=slots)
    pool.publish(handles)
    return packed, handles.pack()


def receive(pool, packed, slots, values):
    """Attention by the map with each receiver head taking the sender head of its number."""
    storage = as_kernels_see_it(pool.storage)
    mine = PackedMap(HEADS, packed.blocks, packed.offsets, packed.columns, torch.from_numpy(slots), storage)
    out = torch.full_like(values, float("nan"))
    map_attention(mine, torch.eye(HEADS), values, CACHE, rows_at(range(TOKENS)), out=out)
    return out


@pytest.mark.parametrize("dtype", SlotType)
def test_attention_out_of_the_pool_is_dense_attention(open_named, dtype):
    sender, receiver = open_named(KEPT + 5, dtype), open_named(KEPT + 5, dtype)
    query, keys, values = random_case()
    sender.allocate(3)
    packed, handles = send(sender, query, keys)
    with reading(receiver, unpack(handles)) as slots:
        out = receive(receiver, packed, slots, values)
    rows = rows_at(range(TOKENS))
    dense = paged_attention_reference(query, keys, values, CACHE, rows, scale=SCALE)
    torch.testing.assert_close(out, dense, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert receiver.stats().retrieved == KEPT


def test_a_map_that_is_overwritten_while_it_is_used_is_refused(open_named):
    sender, receiver = open_named(KEPT, SlotType.FLOAT32), open_named(KEPT, SlotType.FLOAT32)
    query, keys, values = random_case()
    packed, handles = send(sender, query, keys)
    good = receive(receiver, packed, unpack(handles).slots, values)
    spoiled = []

    def use_while_it_goes():
        with reading(receiver, unpack(handles)) as slots:
            send(sender, -query, keys)
            spoiled.append(receive(receiver, packed, slots, values))

    with pytest.raises(StaleHandlesError, match=f"{KEPT} reused"):
        use_while_it_goes()
    assert not torch.allclose(spoiled[0], good, atol=1e-2), "what would have been used"


def test_the_kernels_see_the_pools_memory_itself(open_named):
    pool = open_named(2, SlotType.BFLOAT16)
    as_kernels_see_it(pool.storage).blocks[1, 2, 3] = 1.0
    assert pool.storage.blocks[1, 2, 3] == 0x3F80
