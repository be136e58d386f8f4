"""Counts a Redis store from outside, key by key, and compares with what the store says of itself."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

from cache_store.backends.redis_codec import pack_page
from cache_store.backends.redis_scripts import PAGE_OVERHEAD_BYTES, STRING_BYTES

from .sample_pages import A, page

if TYPE_CHECKING:
    import redis

    from cache_store.backends.redis import RedisBackend


def allocated(size: int) -> int:
    """What jemalloc takes for so many bytes: the smallest of its size classes that is large enough."""
    classes = [16 * number for number in range(1, 9)]
    while classes[-1] < size:
        top = classes[-1]
        classes += [top + quarter * top // 4 for quarter in range(1, 5)]
    return min(one for one in classes if one >= size)


def footprint(entry_bytes: int, data_bytes: int) -> int:
    """What a page counts for."""
    return allocated(entry_bytes + STRING_BYTES) + allocated(data_bytes + STRING_BYTES) + PAGE_OVERHEAD_BYTES


def page_bytes(size: int) -> int:
    """What a page of `sample_pages` with one record of so many bytes counts for."""
    entry, data = pack_page(page("any", A.scope, size))
    return footprint(len(entry), len(data))


def audit(backend: RedisBackend, client: redis.Redis, name: str = "crossfill") -> None:
    """Every sum, counter and set of the store is what its pages make it."""
    root = b"{%s}" % name.encode()
    stats = backend.stats()
    scopes = client.hgetall(root + b":scopes")
    dead = client.zrange(root + b":d", 0, -1)
    leased = client.hgetall(root + b":lp")
    tenants: Counter[bytes] = Counter()
    leaves: dict[bytes, set[bytes]] = {}
    data_keys = set()
    for generation in [*scopes.values(), *dead]:
        about = client.hgetall(root + b":g:" + generation)
        index = client.hgetall(root + b":i:" + generation)
        sizes = {key: struct.unpack("<I", entry[-8:-4])[0] for key, entry in index.items()}
        total = sum(footprint(len(entry), sizes[key]) for key, entry in index.items())
        assert (int(about[b"pages"]), int(about[b"bytes"])) == (len(index), total)
        tenants[about[b"tenant"]] += total
        for key, size in sizes.items():
            data_keys.add(root + b":p:" + generation + key)
            assert client.strlen(root + b":p:" + generation + key) == size
        if generation not in dead:
            parents = Counter(entry[32:48] for entry in index.values())
            assert {k: int(v) for k, v in client.hgetall(root + b":k:" + generation).items()} == parents
            assert set(client.hkeys(root + b":u:" + generation)) == set(index)
            free = {generation + key for key in index if not parents[key] and generation + key not in leased}
            leaves.setdefault(about[b"tenant"], set()).update(free)
    assert stats.size_bytes == sum(tenants.values())
    assert {k: int(v) for k, v in client.hgetall(root + b":tenants").items()} == {k: v for k, v in tenants.items() if v}
    gone = {member for member in client.zrange(root + b":l", 0, -1) if member[:8] in dead}
    assert set(client.zrange(root + b":l", 0, -1)) - gone == set().union(*leaves.values())
    for tenant, members in leaves.items():
        assert set(client.zrange(root + b":t:" + tenant, 0, -1)) - gone == members
    assert set(client.scan_iter(root + b":p:*")) == data_keys
    assert not list(client.scan_iter(root + b":x:*"))
    leases = Counter(lease[:24] for lease in client.zrange(root + b":e", 0, -1))
    assert {member: int(number) for member, number in leased.items()} == leases
    assert stats.leased_pages == len(leased)
