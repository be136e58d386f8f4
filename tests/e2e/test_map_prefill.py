"""A worker whose attention comes from the maps that another one left in the block pool: it computes no queries."""

import re
import time
from dataclasses import replace
from functools import partial

import httpx
import numpy as np
import pytest
import torch

from cache_store.keys import page_keys
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.shared_memory import open_pool
from cache_store.records import Kind
from engines.reuse.map_records import pack_maps, unpack_maps
from engines.reuse.map_storage import map_storage
from tests.conftest import POOL_BYTES
from tests.e2e.test_guided_reuse import chat, differences, generate, leave, namespace_of, prompt_of, store, tenant

__all__ = ["store", "tenant"]

pytestmark = pytest.mark.real

SENDER, TWIN, HEADS = "tiny-llama", "tiny-twin", 4
# All of the twin's but the last; prompts are prefilled in chunks of one row block.
LAYERS = 3


@pytest.fixture(scope="module")
def pool(stack):
    """The block pool of the running workers, as one more process has it open."""
    opened = open_pool(stack.pool, Geometry.within(POOL_BYTES, SlotType.FLOAT32))
    yield opened
    opened.close()


def pack(stack, prompt, tenant):
    """Have the sender prefill a prompt and pack its maps, which comes in the background."""
    url, blocks = stack.workers[SENDER][0], len(prompt) // 64 * LAYERS
    before = stack.counter(url, "crossfill_reuse_packed_row_blocks_total")
    answer = leave(stack, SENDER, prompt, tenant)
    until = time.monotonic() + 60
    while stack.counter(url, "crossfill_reuse_packed_row_blocks_total") - before < blocks:
        assert time.monotonic() < until, "the sender packed nothing"
        time.sleep(0.1)
    # Handed to the store's queue; a flush of it is not seen from here.
    time.sleep(0.5)
    return answer


def counts(stack):
    url = stack.workers[TWIN][0]
    return {
        "mapped": stack.counter(url, "crossfill_reuse_map_layers_total", outcome="mapped"),
        "gone": stack.counter(url, "crossfill_reuse_map_layers_total", outcome="gone"),
        "late": stack.counter(url, "crossfill_reuse_map_layers_total", outcome="late"),
        "rows": stack.counter(url, "crossfill_reuse_mapped_rows_total"),
        "skipped": stack.counter(url, "crossfill_reuse_skipped_query_rows_total"),
        "kernel": stack.counter(url, "crossfill_kernel_calls_total", op="map_attention"),
    }


def grown(stack, before):
    return {name: count - before[name] for name, count in counts(stack).items()}


MAPPED = {
    "mapped": 4 * LAYERS,
    "gone": 0,
    "late": 0,
    "rows": 256 * LAYERS,
    "skipped": 256 * LAYERS,
    "kernel": 4 * LAYERS,
}
NOTHING = dict.fromkeys(MAPPED, 0)


def all_mapped(stack, ask):
    """What `ask(extra_key)` finds when all layers were mapped.

    Layers of tiny models are computed as fast as the store gives them; where one was late, it is asked anew.
    """
    for attempt in range(10):
        before = counts(stack)
        found = ask(f"attempt-{attempt}")
        if not (what := grown(stack, before))["late"]:
            assert what == MAPPED
            return found
    pytest.fail("the store is too slow for a tiny model")


def test_all_maps_of_the_same_model_are_dense_prefill_without_queries(stack, tenant):
    url, prompt = stack.workers[TWIN][0], prompt_of(300, seed=11)
    pack(stack, prompt, tenant)
    # Four row blocks; the last, incomplete one is dense.
    mapped = all_mapped(stack, lambda key: generate(url, prompt, tenant, key=key))
    before = counts(stack)
    dense = generate(url, prompt, tenant, reuse="off")
    assert grown(stack, before) == NOTHING
    assert [token for _, token, _ in mapped] == [token for _, token, _ in dense]
    assert max(differences(mapped, dense)) < 1e-3


def test_the_more_blocks_are_dropped_the_further_is_the_answer(stack, store, pool, models_root, tenant):
    """Copies of the same maps, without blocks that hold little of a row block's attention; four prompts."""
    url, bounds = stack.workers[TWIN][0], (0.0, 0.3, 0.45)
    apart = [0.0] * len(bounds)
    for seed in range(20, 24):
        prompt = prompt_of(300, seed=seed)
        pack(stack, prompt, tenant)
        dense = told_apart(url, prompt, tenant, "off", "dense")
        for number, least in enumerate(bounds):
            thin(store, pool, namespace_of(models_root, SENDER, tenant), f"{tenant}-{number}", prompt, least)
            found = all_mapped(stack, partial(told_apart, url, prompt, f"{tenant}-{number}", "allow"))
            apart[number] += float(np.abs(found - dense).sum())
    assert apart == sorted(apart)
    assert apart[0] < 1e-3
    assert apart[1] > 10 * apart[0], apart


def told_apart(url, prompt, tenant, reuse, key):
    """Log-probabilities of the prompt's own last tokens, whose rows are dense and look at all before them."""
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": 1,
            "custom_params": {"crossfill": {"reuse": reuse, "tenant": tenant, "salt": ""}},
        },
        "return_logprob": True,
        "logprob_start_len": 260,
        "extra_key": f"{tenant}/{reuse}/{key}",
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return np.array([one[0] for one in response.json()["meta_info"]["input_token_logprobs"][1:]])


def thin(store, pool, namespace, tenant, prompt, least):
    """Leave for another tenant what `namespace` has, less the blocks of maps that hold a smaller share than `least`."""
    other = replace(namespace, tenant=tenant)
    pages, theirs = page_keys(namespace.scope, prompt), page_keys(other.scope, prompt)
    names = sorted(store.match(namespace, prompt).names)
    records = {}
    for index, (page, own) in enumerate(zip(pages, theirs, strict=True)):
        found = [one for one in store.read(namespace, [(page, name) for name in names]) if one is not None]
        records[index] = [
            thinned(one, pool, index, own.tokens_digest, least)
            if one.kind is Kind.MAP
            else replace(one, tokens_digest=own.tokens_digest)
            for one in found
        ]
    assert store.publish(other, prompt, records).pages == len(pages)


def thinned(record, pool, index, digest, least):
    stored = unpack_maps([{index: record}], HEADS)
    shares = pool.storage.blocks[stored.handles.slots].sum(axis=(1, 2)) / 64
    # Of each head the diagonal stays, so that it keeps something.
    kept = np.flatnonzero((shares >= least) | (stored.columns.numpy() // HEADS == index))
    left = replace(
        stored,
        offsets=torch.tensor([0, len(kept)], dtype=torch.int32),
        columns=stored.columns[kept],
        handles=stored.handles[kept],
    )
    [thin_record] = pack_maps(left.packed(map_storage(pool)), left.handles, record.layer, [digest])
    return thin_record


def test_maps_whose_slots_were_given_to_others_are_guided(stack, pool, tenant):
    url, prompt = stack.workers[TWIN][0], prompt_of(300, seed=13)
    pack(stack, prompt, tenant)
    pool.free(pool.allocate(pool.geometry.slots))
    before = counts(stack)
    guided = generate(url, prompt, tenant)
    assert grown(stack, before) == NOTHING | {"gone": 4 * LAYERS}
    # Guided at top-p 1 is dense.
    dense = generate(url, prompt, tenant, reuse="off")
    assert max(differences(guided, dense)) < 1e-4


WORDS = " ".join(f"word{n}" for n in range(120))


def test_the_header_says_that_maps_were_used_and_queries_were_not_computed(stack, tenant):
    sender, url = stack.workers[SENDER][0], stack.workers[TWIN][0]
    before = stack.counter(sender, "crossfill_reuse_packed_row_blocks_total")
    assert chat(sender, SENDER, WORDS, tenant).status_code == 200
    until = time.monotonic() + 60
    while stack.counter(sender, "crossfill_reuse_packed_row_blocks_total") == before:
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1)
    said = chat(url, TWIN, WORDS, tenant).headers["x-crossfill-reuse"]
    assert re.fullmatch(r"map; blocks=\d+/\d+; density=1.00; sender=tiny-llama; queries=skipped", said)
