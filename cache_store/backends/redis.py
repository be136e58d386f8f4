"""Pages in Redis, shared by machines: every change is a script, every question one round trip.

A store is one hash tag, `{name}`, so all of it lies on one shard of a cluster; to use more shards, name more stores.
What a script does is seen whole or not at all. A publish of many pages runs as several scripts of at most
64, so that the server is never held up for long: each part is atomic, and as parents come before children
and a page is of use without its children, what is seen between two parts is a shorter prefix and nothing else. The
same holds for a read of many pages: each page's records belong together. A flush is seen whole after its first script,
and a page counts as used for whoever makes room from when this process told the server (`redis_recent.py`).
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from cache_store.backends import redis_codec as codec
from cache_store.backends.breaker import Breaker
from cache_store.backends.protocol import (
    AnchorPool,
    AnchorPut,
    BackendStats,
    Found,
    Limits,
    PageWrite,
    Published,
    Reclaimed,
    ScopeInfo,
    ScopeStats,
)
from cache_store.backends.redis_address import parse_address
from cache_store.backends.redis_faults import ACCESS_REFUSED
from cache_store.backends.redis_link import Argument, RedisLink
from cache_store.backends.redis_publish import GENERATION_BYTES, Publisher
from cache_store.backends.redis_read import RedisReader, parts_of
from cache_store.backends.redis_scripts import load_script
from cache_store.backends.redis_upkeep import delete_orphans, scan_pages
from cache_store.errors import StoreError, StoreUnavailableError, StoreUrlError

Value = TypeVar("Value")

LEASE_PAGES = 256
"""Pages of one run of a script that leases."""

_UNBOUNDED = 1 << 53
_LOG = logging.getLogger(__name__)


class RedisBackend:
    """A store in Redis 6 or newer, or Valkey. Safe to use from several threads and processes.

    Each operation keeps the deadline as a whole; `flush`, `release`, `stats`, `evict`, `scan` and `compact`, which run
    in as many parts as it takes, keep it for each of them.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._reader = RedisReader(link)

    @classmethod
    def from_url(cls, url: str, *, deadline_s: float = 1.0, breaker: Breaker | None = None) -> "RedisBackend":
        """Open the store at `redis://`, `rediss://` or `redis+cluster://user:password@host:port/database?name=…`.

        Raises:
            StoreUrlError: the URL is wrong, a file that it names cannot be read, the password is refused, or the server
                would delete a store's keys by itself.
            StoreVersionError: another version of Crossfill wrote the store.
            StoreUnavailableError: the server does not answer.
        """
        address = parse_address(url)
        address.require_files()
        backend = cls(RedisLink(address, deadline_s=deadline_s, breaker=breaker))
        try:
            backend._check()
        except Exception:
            backend.close()
            raise
        return backend

    def __repr__(self) -> str:
        return f"RedisBackend({self._link.address.shown})"

    @property
    def breaker(self) -> Breaker:
        """Whether the server is asked at all at the moment."""
        return self._link.breaker

    def _check(self) -> None:
        shown = self._link.address.shown
        try:
            memory = self._link.ask([("INFO", "memory")])[0]
            # Nothing is marked as used, but a store of another version, or a replica, says so.
            self._run(int, "touch", b"", b"", "", "")
        except StoreUnavailableError as error:
            if isinstance(error.__cause__, ACCESS_REFUSED):
                raise StoreUrlError(f"{shown}: the server refuses the user or password, or a command") from error
            raise
        if isinstance(memory, Exception):
            _LOG.warning("%s: INFO is refused, so whether the server deletes keys by itself is not known", shown)
            return
        facts = self._link.understood(
            lambda: dict(line.split(":", 1) for line in memory.decode().splitlines() if ":" in line)
        )
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys") and facts.get("maxmemory", "0") != "0":
            raise StoreUrlError(
                f"{shown}: maxmemory-policy is {policy}, so the server would delete parts of the store's index; "
                "set noeviction (or volatile-lru: a store's keys never expire) and bound the store by its budget"
            )

    def _run(self, take: Callable[[Any], Value], script: str, *arguments: Argument) -> Value:
        reply = self._link.run(load_script(script), *arguments)
        return self._link.understood(lambda: take(reply))

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """See `Backend.lookup`."""
        return self._reader.lookup(scope, keys)

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """See `Backend.read`."""
        return self._reader.read(scope, wanted)

    def publish(
        self, info: ScopeInfo, pages: Sequence[PageWrite], limits: Limits, flushes: int | None = None
    ) -> Published:
        """See `Backend.publish`."""
        publisher = Publisher(self._link, info, limits, flushes)
        with self._link.operation():
            published = publisher.publish(pages, self._reader.recent.take())
        self._reader.remember_generation(info.scope, publisher.generation)
        self._reader.damage.tell(publisher.damaged)
        return published

    def lease(self, scope: bytes, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
        """See `Backend.lease`."""
        ttl_ms = -1 if ttl_s is None else max(0, math.ceil(ttl_s * 1000))
        script, distinct = load_script("lease"), list(dict.fromkeys(keys))
        parts = [b"".join(part) for part in parts_of(distinct, LEASE_PAGES)]
        replies = self._link.run_all([(script, (scope, part, holder, ttl_ms)) for part in parts])
        return self._link.understood(lambda: sum(map(int, replies)))

    def release(self, holder: str) -> int:
        """See `Backend.release`. Several scripts if it holds many."""
        released, cursor, done = 0, b"0", False
        while not done:
            pages, cursor, done = self._run(_in_part, "release", holder, cursor)
            released += pages
        return released

    def flush(self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None) -> Reclaimed:
        """See `Backend.flush`. The first script makes everything a miss; others end leases and count."""
        wanted = ["" if value is None else f"={value}" for value in (tenant, model, revision)]
        number, done, pages, size_bytes = b"", 0, 0, 0
        while not done:
            number, done, pages, size_bytes = self._run(_of_flush, "flush", number, *wanted)
        return Reclaimed(pages, size_bytes)

    def evict(self, size_bytes: int) -> Reclaimed:
        """See `Backend.evict`. Several scripts if much must go."""
        return self._evict(size_bytes, before=_UNBOUNDED)

    def _evict(self, size_bytes: int, *, before: int) -> Reclaimed:
        pages, freed, more = 0, 0, True
        self._link.run_all(self._reader.recent.take())
        while more and freed < size_bytes:
            gone, size, again = self._run(_whole_numbers, "evict", size_bytes - freed, before)
            pages, freed, more = pages + gone, freed + size, again > 0
        return Reclaimed(pages, freed)

    def quarantine(self, scope: bytes, key: bytes, name: str) -> bool:
        """See `Backend.quarantine`."""
        taken = self._run(int, "quarantine", scope, key, name)
        self._reader.damage.tell(int(taken > 1))
        return taken > 0

    def stats(self) -> BackendStats:
        """See `Backend.stats`. The store keeps its sums, so nothing is counted; in parts if it has many scopes."""
        scopes: dict[bytes, ScopeStats] = {}
        cursor, more, sums = b"0", True, (0, 0, 0)
        while more:
            cursor, more, sums, found = self._run(codec.unpack_stats, "stats", cursor)
            # While it iterates over a table that grows, the server may name a scope twice.
            scopes |= {stats.info.scope: stats for stats in found}
        return BackendStats(list(scopes.values()), *sums)

    def scan(self) -> Iterator[tuple[ScopeInfo, PageWrite]]:
        """See `Backend.scan`. Does not count as use; pages that come or go meanwhile may be missing."""
        for scope in self.stats().scopes:
            yield from ((scope.info, page) for page in scan_pages(self._link, scope.info.scope, self._reader.damage))

    def compact(self) -> Reclaimed:
        """Reclaim what was flushed and what lost its index, then ask the server to give memory back."""
        flushed = self._evict(_UNBOUNDED, before=-1)
        orphans = delete_orphans(self._link)
        # Some servers do not let clients ask; their allocator gives memory back by itself, later.
        self._link.ask([("MEMORY", "PURGE")])
        return Reclaimed(flushed.pages + orphans.pages, flushed.size_bytes + orphans.size_bytes)

    def put_anchor(self, pool: AnchorPool, identity: str, data: bytes) -> AnchorPut:
        """See `Backend.put_anchor`."""
        info = pool.info
        return self._run(
            lambda reply: AnchorPut(bool(int(reply[0])), [name.decode() for name in reply[1:]]),
            "anchor_put",
            *(info.scope, info.tenant, codec.pack_scope(info), secrets.token_bytes(GENERATION_BYTES)),
            *(pool.slot, identity, pool.capacity, pool.budget_bytes, data),
        )

    def anchors(self, pool: AnchorPool) -> dict[str, bytes]:
        """See `Backend.anchors`."""
        return self._reader.anchors(pool.info.scope, pool.slot)

    def quarantine_anchor(self, pool: AnchorPool, identity: str) -> bool:
        """See `Backend.quarantine_anchor`."""
        return self._run(int, "anchor_quarantine", pool.info.scope, pool.slot, identity) > 0

    def use_anchors(self, pool: AnchorPool, identities: Sequence[str]) -> None:
        """See `Backend.use_anchors`."""
        self._run(int, "anchor_use", pool.info.scope, pool.slot, *identities)

    def close(self) -> None:
        """See `Backend.close`. Tells the server first what was used."""
        try:
            self._link.run_all(self._reader.recent.take())
        except StoreError as error:
            _LOG.info("%s: which pages were used last stays unknown to it: %s", self._link.address.shown, error)
        self._link.close()


def _whole_numbers(reply: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, reply))


def _in_part(reply: Sequence[Any]) -> tuple[int, bytes, bool]:
    number, cursor, done = reply
    return int(number), cursor, int(done) > 0


def _of_flush(reply: Sequence[Any]) -> tuple[bytes, int, int, int]:
    number, done, pages, size_bytes = reply
    return number, int(done), int(pages), int(size_bytes)
