"""What a Redis store counts towards its budget is at least what the server has allocated for it."""

import random

import pytest

from cache_store.backends.protocol import PageWrite
from cache_store.backends.redis import RedisBackend

from .sample_pages import ROOMY, A, put

PAGES, PART = 1280, 64


def chain(keys, _rng):
    return keys[-1] if keys else A.scope


def bushes(keys, rng):
    return rng.choice(keys) if keys else A.scope


def strangers(_keys, rng):
    """Parents that are not stored: every page is a leaf and every one has an entry for its parent."""
    return rng.randbytes(16)


def used_bytes(client):
    """Without what the connections themselves take."""
    memory = client.info("memory")
    return memory["used_memory"] - memory["mem_clients_normal"]


@pytest.mark.parametrize("parent", [chain, bushes, strangers])
# The second just missed a smaller size class of the server's allocator.
@pytest.mark.parametrize("sizes", [[600] * 30, [547] * 30, [600], []], ids=["usual", "worst", "one", "none"])
def test_memory_stays_within_what_is_counted(start_redis, sizes, parent):
    rng = random.Random(1)
    server = start_redis()
    records = {f"mass/{layer}": rng.randbytes(size) for layer, size in enumerate(sizes)}
    backend = RedisBackend.from_url(server.url(), deadline_s=30.0)
    with server.client() as client:
        # The scripts, and what the server allocates once.
        put(backend, [PageWrite(rng.randbytes(16), A.scope, rng.randbytes(32), records)])
        before, counted_before = used_bytes(client), backend.stats().size_bytes
        keys = []
        for _ in range(PAGES // PART):
            pages = []
            for _ in range(PART):
                above, key = parent(keys, rng), rng.randbytes(16)
                pages.append(PageWrite(key, above, rng.randbytes(32), records))
                keys.append(key)
            assert put(backend, pages, ROOMY).pages == PART
            used, counted = used_bytes(client) - before, backend.stats().size_bytes - counted_before
            # A few pages are too little to tell: tables double at once.
            if len(keys) >= 4 * PART:
                assert used <= counted
        assert used > len(keys) * (sum(sizes) + 300), "nothing was measured"
    backend.close()
