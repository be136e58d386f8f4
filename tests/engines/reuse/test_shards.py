"""Tensor parallelism: two processes leave a half of a layer's heads each, and a receiver reads them as one."""

import multiprocessing
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from cache_store.client.fetch import Fetcher
from cache_store.client.publish import Publisher
from cache_store.config import StoreSettings
from cache_store.keys import page_keys
from cache_store.metrics import StoreMetrics
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.shared_memory import open_pool
from cache_store.records import Kind, record_name
from cache_store.store import Store, open_store
from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.rows import rows_at
from engines.reuse.map_records import unpack_maps
from engines.reuse.map_sender import CapturedMaps, CopiedLayer, MapSender
from engines.reuse.mass_records import pack_masses, unpack_masses
from engines.reuse.metrics import ReuseMetrics
from engines.reuse.sender import Captured, Sender
from engines.reuse.settings import Weights

from .conftest import DIM, HEADS, KV_HEADS, LONG_S, SCALE, make_pair
from .test_sender import TOKENS, namespace

LAYER, ROWS, PAGES, TOP_P = 4, 320, 5, 0.6
GEOMETRY = Geometry(2000, SlotType.FLOAT32)


def open_all(folder):
    store = open_store(StoreSettings(url=f"lmdb://{folder}/store"), StoreMetrics(CollectorRegistry()))
    return store, open_pool("shards", GEOMETRY, folder=folder)


def leave(folder, tenant, shard, shards):
    """Compute some of the heads of one layer, and leave their masses and maps; in a process of its own."""
    store, pool = open_all(folder)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(ROWS, HEADS, DIM, generator=generator)
    keys, values = (torch.randn(ROWS, KV_HEADS, DIM, generator=generator) for _ in range(2))
    own, own_kv = (slice(shard * count // shards, (shard + 1) * count // shards) for count in (HEADS, KV_HEADS))
    query, keys, values = query[:, own].contiguous(), keys[:, own_kv].contiguous(), values[:, own_kv].contiguous()
    rows = rows_at(range(ROWS))
    mass = block_mass(query, keys, values, slice(0, ROWS), rows, scale=SCALE, out=torch.empty_like(query))
    where = replace(namespace(), tenant=tenant)
    fetcher, publisher, metrics = Fetcher(store), Publisher(store), ReuseMetrics(CollectorRegistry())
    stored = fetcher.start("r", where, TOKENS, (), LONG_S)
    sender = Sender(publisher, metrics, most_bytes=2**30, wait_s=LONG_S, shard=(shard, shards))
    packer = MapSender(
        pool,
        store,
        publisher,
        metrics,
        top_p={LAYER: TOP_P},
        renormalise=True,
        most_bytes=2**30,
        wait_s=LONG_S,
        shard=(shard, shards),
    )
    sender.offer(Captured("r", where, TOKENS, 0, ROWS, True, {LAYER: mass}, stored))
    copied = {LAYER: CopiedLayer(query, keys, mass, SCALE)}
    packer.offer(CapturedMaps("r", where, TOKENS, 0, ROWS, copied, stored))
    for waits in (sender, packer, publisher):
        assert waits.drain(LONG_S)
    fetcher.close()
    store.close()
    pool.close()


def read(store: Store, tenant, kind, shards):
    where = replace(namespace(), tenant=tenant)
    coverage = store.match(where, TOKENS)
    names = [record_name(kind, LAYER, shard, shards) for shard in range(shards)]
    return [dict(enumerate(store.read(where, [(page, name) for page in coverage.pages[:PAGES]]))) for name in names]


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What one process left for one tenant, and two for another; the store and the pool."""
    spawn, folder = multiprocessing.get_context("spawn"), tmp_path_factory.mktemp("shards")
    started = [
        spawn.Process(target=leave, args=(folder, *what)) for what in (("one", 0, 1), ("two", 0, 2), ("two", 1, 2))
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        assert process.exitcode == 0
    store, pool = open_all(folder)
    yield store, pool
    store.close()
    pool.close()


def dense(stored, pool):
    """Probabilities [H, rows, columns] of a stored map, and how many blocks it keeps."""
    packed = torch.zeros(HEADS, ROWS, ROWS)
    for row in range(PAGES):
        for entry in range(int(stored.offsets[row]), int(stored.offsets[row + 1])):
            column, head = divmod(int(stored.columns[entry]), HEADS)
            block = torch.from_numpy(pool.storage.blocks[stored.handles.slots[entry]].copy())
            packed[head, row * 64 : (row + 1) * 64, column * 64 : (column + 1) * 64] = block
    return packed, len(stored.handles)


def test_two_processes_leave_what_one_does(left):
    store, pool = left
    whole, halves = (
        unpack_masses(read(store, *what), HEADS) for what in (("one", Kind.MASS, 1), ("two", Kind.MASS, 2))
    )
    assert len(whole.codes) > HEADS * PAGES
    for name in ("blocks", "offsets", "columns", "codes"):
        assert torch.equal(getattr(whole, name), getattr(halves, name)), name
    maps, half_maps = (unpack_maps(read(store, *what), HEADS) for what in (("one", Kind.MAP, 1), ("two", Kind.MAP, 2)))
    assert torch.equal(maps.columns, half_maps.columns)
    assert torch.equal(maps.offsets, half_maps.offsets)
    assert pool.verify(half_maps.handles).usable
    one, two = dense(maps, pool), dense(half_maps, pool)
    assert one[1] == two[1] < HEADS * PAGES * (PAGES + 1) / 2
    assert torch.equal(one[0], two[0])
    # A control: the shards in the other order are other heads.
    turned = unpack_maps(read(store, "two", Kind.MAP, 2)[::-1], HEADS)
    assert not torch.equal(dense(turned, pool)[0], one[0])


def test_a_row_block_of_which_a_shard_is_missing_is_left_out(left):
    store, _ = left
    first, second = read(store, "two", Kind.MASS, 2)
    assert unpack_masses([first, {1: second[1], 3: second[3]}], HEADS).blocks.tolist() == [1, 3]
    first, second = read(store, "two", Kind.MAP, 2)
    assert unpack_maps([first, {1: second[1], 3: second[3]}], HEADS).blocks.tolist() == [1, 3]


def test_names_of_shards_are_names_of_their_own(left):
    store, _ = left
    where = replace(namespace(), tenant="two")
    assert store.match(where, TOKENS).names == {
        record_name(kind, LAYER, shard, 2) for kind in (Kind.MASS, Kind.MAP) for shard in range(2)
    }


def test_a_receiver_reads_all_shards_of_a_layer_or_none(store, sender, receive):
    layers = sorted(set(make_pair().guided.values()))
    digests = [page.tokens_digest for page in page_keys(namespace().scope, TOKENS)]
    shards = [[], []]
    for layer in layers:
        query, keys, values = sender.query[layer, :ROWS], sender.key[layer, :ROWS], sender.value[layer, :ROWS]
        out = torch.empty_like(query)
        mass = block_mass(query, keys, values, slice(0, ROWS), rows_at(range(ROWS)), scale=SCALE, out=out)
        for shard, heads in enumerate((slice(0, 2), slice(2, 4))):
            half = BlockMass(mass.mass[heads].contiguous(), mass.blocks, mass.totals)
            shards[shard].append(pack_masses(half, layer, digests[:PAGES], (shard, 2)))
    sender.arrive("left", TOKENS)
    sender.prefill("left", TOKENS)
    whole = receive(weights=Weights.IDENTITY, top_p=0.5)
    whole.arrive("asked", TOKENS)
    wanted = whole.prefill("asked", TOKENS)
    store.flush()
    halves = receive(weights=Weights.IDENTITY, top_p=0.5, shards=2)
    for count, guided in ((1, 0), (2, PAGES)):
        for of_shard in shards[:count]:
            records = {page: [of_layer[page] for of_layer in of_shard] for page in range(PAGES)}
            store.publish(namespace(), TOKENS, records)
        halves.arrive(f"asked {count}", TOKENS)
        found = halves.prefill(f"asked {count}", TOKENS)
        assert halves.counted("row_blocks_total", outcome="guided") == guided
    torch.testing.assert_close(found, wanted)
