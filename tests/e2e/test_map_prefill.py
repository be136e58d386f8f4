"""A worker whose attention comes from the maps that another one left in the block pool: its queries are not computed."""

import pytest

from cache_store.keys import page_keys
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.shared_memory import open_pool

from .test_guided_reuse import differences, generate, leave, namespace_of, prompt_of, store, tenant

__all__ = ["store", "tenant"]

pytestmark = pytest.mark.real

SENDER, TWIN = "tiny-llama", "tiny-twin"
# All of the twin's but the last.
LAYERS = 3


@pytest.fixture(scope="module")
def pool(stack):
    """The block pool of the running workers, as one more process has it open."""
    opened = open_pool(stack.pool, Geometry.within(stack.pool_bytes, SlotType.FLOAT32))
    yield opened
    opened.close()


def counts(stack, url):
    names = ("map_layers_total", "mapped_rows_total", "skipped_query_rows_total")
    return {name: stack.counter(url, f"crossfill_reuse_{name}") for name in names}


def outcome_of(stack, url, outcome):
    return stack.counter(url, "crossfill_reuse_map_layers_total", outcome=outcome)


def test_with_all_maps_of_an_identical_model_the_answer_is_that_of_a_dense_prefill(stack, tenant):
    url = stack.workers[TWIN][0]
    prompt = prompt_of(300, seed=11)
    leave(stack, SENDER, prompt, tenant)
    calls = stack.counter(url, "crossfill_kernel_calls_total", op="map_attention")
    before = counts(stack, url)
    mapped = generate(url, prompt, tenant)
    after = {name: count - before[name] for name, count in counts(stack, url).items()}
    # Four chunks of a row block each; the last, incomplete one is dense.
    assert after == {"map_layers_total": 4 * LAYERS, "mapped_rows_total": 256 * LAYERS} | {
        "skipped_query_rows_total": 256 * LAYERS
    }
    assert stack.counter(url, "crossfill_kernel_calls_total", op="map_attention") - calls == 4 * LAYERS
    dense = generate(url, prompt, tenant, reuse="off")
    assert [token for _, token, _ in mapped] == [token for _, token, _ in dense]
    assert max(differences(mapped, dense)) < 1e-3
    assert counts(stack, url) == {name: before[name] + count for name, count in after.items()}


def test_the_more_blocks_are_dropped_the_further_is_the_answer(stack, store, pool, models_root, tenant):
    """Copies of the same maps, without the blocks that have little of a row block's attention."""
    url, prompt = stack.workers[TWIN][0], prompt_of(300, seed=12)
    leave(stack, SENDER, prompt, tenant)
    dense = generate(url, prompt, tenant, reuse="off")
    apart = []
    for least in (0.0, 0.1, 0.2, 0.4):
        other = f"{tenant}-{least}"
        thin(store, pool, namespace_of(models_root, SENDER, tenant), other, prompt, least)
        mapped = outcome_of(stack, url, "mapped")
        apart.append(sum(differences(generate(url, prompt, other), dense)))
        assert outcome_of(stack, url, "mapped") - mapped == 4 * LAYERS
    assert apart == sorted(apart)
    assert apart[0] < 1e-3
    assert apart[-1] > 20 * max(apart[0], 1e-4)


def thin(store, pool, namespace, tenant, prompt, least):
    """Leave for another tenant the maps of `namespace`, less the blocks that hold a smaller share than `least`."""
    other = namespace.__class__(
        tenant, *[getattr(namespace, name) for name in list(namespace.__dataclass_fields__)[1:]]
    )
    pages, theirs = page_keys(namespace.scope, prompt), page_keys(other.scope, prompt)
    names = sorted(store.match(namespace, prompt).names)
    records = {}
    for index, (page, own) in enumerate(zip(pages, theirs, strict=True)):
        found = [one for one in store.read(namespace, [(page, name) for name in names]) if one is not None]
        records[index] = [thinned(one, pool, index, own.tokens_digest, least) for one in found]
    assert store.publish(other, prompt, records).pages == len(pages)
