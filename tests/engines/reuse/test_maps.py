"""Maps from one worker to another through a block pool: what is packed, what is used, and what is guided instead."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cache_store.config import StoreSettings
from cache_store.keys import page_keys
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.shared_memory import open_pool
from cache_store.records import Kind, record_name
from crossfill_kernels import dispatch
from engines.errors import MapRecordError
from engines.reuse.map_records import unpack_maps
from engines.reuse.settings import MapSettings, ReuseMode, ReuseSettings, Weights

from .conftest import HEADS, KV_HEADS, LARGE, LAYERS, SCALE, SMALL, make_pair
from .test_sender import TOKENS, namespace

TOTAL, GUIDED = len(TOKENS), range(2, LAYERS - 1)
# Pages 0 … 4 are whole, all of whose causal blocks are kept of each head at top-p 1.
PAGES, ALL = 5, HEADS * sum(range(1, 6))
ROOM = 4 * ALL * len(GUIDED)
URL = StoreSettings(url="memory://")


@pytest.fixture
def make_pool(tmp_path):
    """`make_pool(slots, dtype)`: a pool in shared memory that nobody else has."""
    opened = []

    def make(slots=ROOM, dtype=SlotType.FLOAT32, name="test"):
        opened.append(open_pool(name, Geometry(slots, dtype), folder=tmp_path))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()


@pytest.fixture
def send(start):
    """`send(pool, top_p)`: the large model, which leaves masses and maps."""

    def send(pool, top_p=1.0, **maps):
        layers = tuple(sorted(set(make_pair().guided.values())))
        packed = dict.fromkeys(layers, top_p)
        told = ReuseSettings(model=LARGE, publish=layers, publish_maps=packed, store=URL, maps=MapSettings(**maps))
        return start(told, pool=pool)

    return send


@pytest.fixture
def take(start):
    """`take(pool, **changes)`: the small model, which uses maps."""

    def take(pool, **changes):
        pair = make_pair(**{"mode": ReuseMode.MAP, "weights": Weights.IDENTITY, **changes})
        return start(ReuseSettings(model=SMALL, pairs=(pair,), store=URL, wait_s=30, wait_share=1e6), 2, pool)

    return take


def leave(worker, cuts=()):
    worker.arrive("left", TOKENS)
    return worker.prefill("left", TOKENS, cuts=cuts)


def ask(worker, cuts=()):
    worker.arrive("asked", TOKENS)
    worker.wait()
    worker.engine.begin_batch()
    worker.engine.admit("asked", 0, TOTAL)
    outcome = worker.engine.outcome("asked")
    return worker.prefill("asked", TOKENS, cuts=cuts), outcome


def maps_of(worker, layer):
    """Probabilities float64 [H, rows, rows] of one layer's attention, from its own queries and keys."""
    keys = worker.key[layer, :TOTAL].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("nhd,thd->hnt", worker.query[layer, :TOTAL].double(), keys) * SCALE
    causal = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
    return scores.masked_fill(~causal, float("-inf")).softmax(dim=-1)


def applied(maps, worker, layer):
    """[rows, H, d]: maps of H heads applied to a layer's values."""
    values = worker.value[layer, :TOTAL].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    return torch.einsum("hnt,thd->nhd", maps, values).float()


def mapped(worker, outcome="mapped"):
    return worker.counted("map_layers_total", outcome=outcome)


@pytest.mark.parametrize("cuts", [(), (128, 256), (100, 200)], ids=["whole", "chunks", "chunks that cut blocks"])
def test_mapped_rows_are_the_senders_attention_on_the_receivers_values(make_pool, send, take, cuts):
    pool = make_pool()
    sender = send(pool)
    leave(sender)
    receiver = take(pool)
    calls = dispatch.calls()
    found, outcome = ask(receiver, cuts)
    assert outcome.startswith("map; blocks=5/6; density=1.00; sender=large; queries=computed")
    for layer in range(LAYERS):
        if layer in GUIDED:
            wanted = applied(maps_of(sender, make_pair().guided[layer]), receiver, layer)
            torch.testing.assert_close(found[layer, :320], wanted[:320], atol=1e-4, rtol=1e-4)
        own = applied(maps_of(receiver, layer), receiver, layer)
        dense = slice(320, None) if layer in GUIDED else slice(None)
        torch.testing.assert_close(found[layer, dense], own[dense], atol=1e-4, rtol=1e-4)
    chunks = len(cuts) + 1
    last = sum(cut < 320 for cut in (0, *cuts))
    assert mapped(receiver) == last * len(GUIDED)
    assert receiver.counted("mapped_rows_total") == 320 * len(GUIDED)
    assert chunks >= last
    assert sum(dispatch.calls().values()) > sum(calls.values())
    stats = pool.stats()
    assert (stats.retrieved, stats.published, stats.writing) == (ALL * len(GUIDED), 0, 0)


def test_after_a_prefix_of_its_own_the_rest_of_a_row_block_is_mapped(make_pool, send, take):
    pool, prefix = make_pool(), 100
    sender = send(pool)
    leave(sender)
    receiver = take(pool)
    where = receiver.slots[:prefix].long()
    for layer in range(LAYERS):
        receiver.keys[layer, where], receiver.values[layer, where] = (
            receiver.key[layer, :prefix],
            receiver.value[layer, :prefix],
        )
    receiver.arrive("asked", TOKENS)
    found = receiver.prefill("asked", TOKENS, prefix=prefix)
    assert receiver.counted("mapped_rows_total") == (320 - prefix) * len(GUIDED)
    wanted = applied(maps_of(sender, make_pair().guided[2]), receiver, 2)
    torch.testing.assert_close(found[2, : 320 - prefix], wanted[prefix:320], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"dtype": "map0"}, "want map1"),
        ({"shape": (HEADS + 1, 1)}, "want map1"),
        ({"payload": b""}, "too few"),
        ({"payload": b"\x01" * HEADS + b"\x00" * 7}, "are not"),
        ({"payload": b"\x01" * HEADS + b"\x00" * 20}, "1 handles for 4 bits"),
        ({"payload": b"\x00" * HEADS + b"\x00" * 8}, "keeps no block"),
    ],
)
def test_what_is_no_record_of_a_map_is_guided(make_pool, send, take, store, spoil, why):
    pool = make_pool()
    leave(send(pool))
    pages = page_keys(namespace().scope, TOKENS)
    layer = make_pair().guided[2]
    [whole] = store.read(namespace(), [(pages[0], record_name(Kind.MAP, layer))])
    with pytest.raises(MapRecordError, match=why):
        unpack_maps([{0: replace(whole, **spoil)}], HEADS)
    store.publish(namespace(), TOKENS, {0: [replace(whole, **spoil)]})
    receiver = take(pool, top_p=1.0)
    found, _ = ask(receiver)
    assert mapped(receiver, "absent") == 1
    assert mapped(receiver) == len(GUIDED) - 1
    torch.testing.assert_close(found[2], applied(maps_of(receiver, 2), receiver, 2), atol=1e-4, rtol=1e-4)


def test_bytes_and_half_floats_are_near(make_pool, send, take):
    apart = {}
    for dtype in SlotType:
        pool = make_pool(dtype=dtype, name=dtype.value)
        sender = send(pool)
        sender.arrive("left", TOKENS)
        sender.prefill("left", TOKENS)
        receiver = take(pool)
        found, outcome = ask(receiver)
        assert outcome.startswith("map; ")
        layer = GUIDED[0]
        wanted = applied(maps_of(sender, make_pair().guided[layer]), receiver, layer)[:320]
        apart[dtype] = float((found[layer, :320] - wanted).norm() / wanted.norm())
    assert apart[SlotType.FLOAT32] < 1e-5 < apart[SlotType.BFLOAT16] < 1e-2
    assert 1e-5 < apart[SlotType.UINT8] < 2e-2


def test_the_less_is_packed_the_further_away(make_pool, send, take):
    apart = []
    for number, top_p in enumerate((1.0, 0.7, 0.5, 0.3)):
        pool = make_pool(name=f"p{number}")
        sender = send(pool, top_p)
        sender.arrive("left", TOKENS)
        sender.prefill("left", TOKENS)
        receiver = take(pool)
        found, _ = ask(receiver)
        wanted = applied(maps_of(sender, make_pair().guided[2]), receiver, 2)[:320]
        apart.append(float((found[2, :320] - wanted).norm()))
    assert apart == sorted(apart)
    assert apart[0] < 1e-3 < apart[1]


def test_a_pool_that_is_too_small_is_a_guided_prefill_and_nothing_leaks(make_pool, send, take):
    pool = make_pool(slots=ALL // 2)
    sender = send(pool)
    leave(sender)
    assert sender.counted("unpacked_row_blocks_total", reason="pool_full") == PAGES * len(GUIDED)
    assert sender.counted("packed_row_blocks_total") == 0
    stats = pool.stats()
    assert stats.free == stats.slots
    receiver = take(pool)
    _, outcome = ask(receiver)
    assert outcome.startswith("guided; ")
    assert outcome.endswith("map=absent")
    assert mapped(receiver) == 0


def test_what_was_given_to_others_is_guided_and_packed_anew_when_it_is_computed_again(make_pool, send, take):
    pool = make_pool(slots=ALL * len(GUIDED))
    sender = send(pool)
    leave(sender)
    taken = pool.allocate(ALL)
    receiver = take(pool)
    guided, outcome = ask(receiver)
    # Of the layers whose blocks are still there, the first one is not.
    assert mapped(receiver, "gone") == 1
    assert mapped(receiver) == len(GUIDED) - 1
    assert outcome.startswith("map; ")
    pool.free(taken)
    before = sender.counted("packed_row_blocks_total")
    leave(sender)
    assert sender.counted("packed_row_blocks_total") - before == PAGES
    again, _ = ask(receiver)
    assert mapped(receiver, "gone") == 1
    assert mapped(receiver) == 2 * len(GUIDED) - 1
    assert not torch.allclose(guided[2, :320], again[2, :320], atol=1e-3)


def test_blocks_that_are_given_away_while_they_are_read_are_not_used(make_pool, send, take, monkeypatch):
    pool = make_pool()
    sender = send(pool)
    leave(sender)
    receiver = take(pool, top_p=1.0)
    reader = receiver.engine.layers._maps
    packed = reader.packed

    def packed_and_lost(stored):
        pool.free(stored.handles)
        pool.storage.blocks[:] = 7.0
        return packed(stored)

    monkeypatch.setattr(reader, "packed", packed_and_lost)
    found, outcome = ask(receiver)
    assert outcome.startswith("map; ")
    assert mapped(receiver, "gone") == len(GUIDED)
    assert mapped(receiver) == 0
    own = applied(maps_of(receiver, 2), receiver, 2)
    # Guided at top-p 1 is dense.
    torch.testing.assert_close(found[2], own, atol=1e-4, rtol=1e-4)


def test_another_machines_pool_is_seen_in_the_handles(make_pool, send, take):
    leave(send(make_pool(name="there")))
    receiver = take(make_pool(name="here"))
    _, outcome = ask(receiver)
    assert outcome.startswith("guided; ")
    assert outcome.endswith("map=pool_remote")
    assert mapped(receiver, "pool_remote") == len(GUIDED)


def test_without_a_pool_all_is_guided(make_pool, send, take):
    leave(send(make_pool()))
    receiver = take(None)
    _, outcome = ask(receiver)
    assert outcome.endswith("map=no_pool")
    assert mapped(receiver, "mapped") == 0


def test_hybrid_maps_sparse_layers_and_guides_dense_ones(make_pool, send, take):
    pool = make_pool()
    leave(send(pool, 0.5))
    unions = {}
    for name, changes in {
        "all": {"mode": ReuseMode.MAP},
        "none": {"mode": ReuseMode.HYBRID, "map_density": 0.01},
        "some": {"mode": ReuseMode.HYBRID, "map_density": 0.97},
    }.items():
        receiver = take(pool, **changes)
        _, outcome = ask(receiver)
        unions[name] = mapped(receiver), mapped(receiver, "too_dense"), outcome.partition(";")[0]
    assert unions["all"] == (len(GUIDED), 0, "map")
    assert unions["none"] == (0, len(GUIDED), "guided")
    assert sum(unions["some"][:2]) == len(GUIDED)


@pytest.mark.parametrize(("most", "mode"), [(0.49, "fallback; reason=too_dense"), (0.51, "map; ")])
def test_maps_count_half_towards_the_greatest_density(make_pool, send, take, most, mode):
    pool = make_pool()
    leave(send(pool))
    _, outcome = ask(take(pool, max_density=most))
    assert outcome.startswith(mode)


def test_a_row_block_that_two_chunks_share_is_guided(make_pool, send, take):
    pool = make_pool()
    sender = send(pool)
    leave(sender, cuts=(100,))
    assert sender.counted("unpacked_row_blocks_total", reason="cut") > 0
    receiver = take(pool)
    _, outcome = ask(receiver)
    assert outcome.startswith("map; blocks=5/6")
    # Two parts around page 1.
    assert receiver.counted("mapped_rows_total") == 4 * 64 * len(GUIDED)


def test_mapped_rows_are_approximate_from_the_first_on(make_pool, send, take):
    pool = make_pool()
    leave(send(pool))
    receiver = take(pool)
    ask(receiver)
    assert receiver.engine.provenance.hops_of(receiver.slots[:1].long()) == 1


def test_copies_beyond_their_bound_are_dropped(make_pool, send):
    pool = make_pool()
    sender = send(pool, capture_bytes=2**20)
    sender.packer._most_bytes = 10
    leave(sender)
    assert sender.counted("unpacked_row_blocks_total", reason="queue_full") == PAGES * len(GUIDED)
    assert pool.stats().free == pool.stats().slots


def test_records_say_what_lies_where(make_pool, send, store):
    pool = make_pool()
    sender = send(pool, 0.6)
    leave(sender)
    pages = page_keys(namespace().scope, TOKENS)
    layer = make_pair().guided[2]
    found = store.read(namespace(), [(page, record_name(Kind.MAP, layer)) for page in pages[:PAGES]])
    stored = unpack_maps([dict(enumerate(found))], HEADS)
    assert stored.blocks.tolist() == [*range(PAGES)]
    assert pool.verify(stored.handles).usable
    maps = maps_of(sender, layer)
    for row in range(PAGES):
        entries = range(int(stored.offsets[row]), int(stored.offsets[row + 1]))
        columns = [int(stored.columns[entry]) for entry in entries]
        assert columns == sorted(columns)
        rows = maps[:, row * 64 : (row + 1) * 64]
        for head in range(HEADS):
            own = [
                (column // HEADS, entry)
                for entry, column in zip(entries, columns, strict=True)
                if column % HEADS == head
            ]
            kept = torch.zeros(64, TOTAL, dtype=torch.float64)
            for column, _ in own:
                kept[:, column * 64 : (column + 1) * 64] = rows[head, :, column * 64 : (column + 1) * 64]
            kept /= kept.sum(dim=1, keepdim=True)
            for column, entry in own:
                block = pool.storage.blocks[stored.handles.slots[entry]]
                np.testing.assert_allclose(block, kept[:, column * 64 : (column + 1) * 64], atol=1e-5)
