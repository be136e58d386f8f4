import threading
from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry

from cache_store.backends.protocol import (
    AnchorPut,
    BackendStats,
    Limits,
    PageInfo,
    PageWrite,
    Published,
    Reclaimed,
    Refusal,
    ScopeStats,
)
from cache_store.keys import page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store


class DictBackend:
    """Pages in a dictionary, without bounds: what the protocol says, as plainly as possible."""

    def __init__(self):
        self.lock = threading.Lock()
        self.infos, self.epochs, self.pages, self.pools = {}, defaultdict(int), {}, {}
        self.leases, self.quarantined = {}, 0

    def _page(self, scope, key):
        return self.pages.get((scope, self.epochs[scope], key))

    def lookup(self, scope, keys):
        with self.lock:
            found = [self._page(scope, key) for key in keys]
            return [
                page and PageInfo(page.tokens_digest, {name: len(data) for name, data in page.records.items()})
                for page in found
            ]

    def read(self, scope, wanted):
        with self.lock:
            return [page.records.get(name) if (page := self._page(scope, key)) else None for key, name in wanted]

    def publish(self, info, pages, limits):
        with self.lock:
            self.infos[info.scope] = info
            stored, refused, size = 0, defaultdict(int), 0
            for new in pages:
                old = self._page(info.scope, new.key)
                if old and old.tokens_digest != new.tokens_digest:
                    refused[Refusal.COLLISION] += 1
                    continue
                records = {**(old.records if old else {}), **new.records}
                page = PageWrite(new.key, new.parent, new.tokens_digest, records)
                self.pages[info.scope, self.epochs[info.scope], new.key] = page
                stored, size = stored + 1, size + sum(map(len, new.records.values()))
            return Published(stored, size, dict(refused))

    def lease(self, scope, keys, holder, ttl_s):
        there = {key for key in keys if self._page(scope, key)}
        self.leases[holder] = there
        return len(there)

    def release(self, holder):
        return len(self.leases.pop(holder, ()))

    def flush(self, *, tenant=None, model=None, revision=None):
        with self.lock:
            gone = 0
            for info in self.infos.values():
                wanted = ((tenant, info.tenant), (model, info.model), (revision, info.revision))
                if all(asked in {None, has} for asked, has in wanted):
                    epoch = self.epochs[info.scope]
                    gone += sum(place[:2] == (info.scope, epoch) for place in self.pages)
                    self.epochs[info.scope] += 1
            return Reclaimed(gone, 0)

    def evict(self, size_bytes):
        return Reclaimed(0, 0)

    def compact(self):
        return Reclaimed(0, 0)

    def quarantine(self, scope, key, name):
        with self.lock:
            page = self._page(scope, key)
            self.quarantined += 1
            return page is not None and page.records.pop(name, None) is not None

    def stats(self):
        scopes = []
        for info in self.infos.values():
            pages = [p for place, p in self.pages.items() if place[:2] == (info.scope, self.epochs[info.scope])]
            size = sum(len(data) for page in pages for data in page.records.values())
            scopes.append(ScopeStats(info, self.epochs[info.scope], len(pages), size))
        leased = sum(map(len, self.leases.values()))
        return BackendStats(scopes, sum(scope.size_bytes for scope in scopes), leased, self.quarantined)

    def put_anchor(self, pool, identity, data):
        self.pools.setdefault((pool.info.scope, pool.slot), {})[identity] = data
        return AnchorPut(True)

    def anchors(self, pool):
        return dict(self.pools.get((pool.info.scope, pool.slot), {}))

    def use_anchors(self, pool, identities):
        pass

    def close(self):
        pass


class Faulty:
    """A backend whose calls can be counted, made to wait and made to fail."""

    def __init__(self, backend):
        self.backend = backend
        self.calls = defaultdict(int)
        self.error = None
        self.open = threading.Event()
        self.open.set()

    def hang(self, *operations):
        """From now on calls (of these operations) wait for `go_on`."""
        self.hanging = operations
        self.open.clear()

    def go_on(self):
        self.open.set()

    def __getattr__(self, name):
        work = getattr(self.backend, name)

        def call(*arguments, **named):
            self.calls[name] += 1
            if not self.open.is_set() and (not self.hanging or name in self.hanging):
                self.open.wait(60)
            if self.error:
                raise self.error
            return work(*arguments, **named)

        return call


@pytest.fixture
def namespace():
    return Namespace("acme", "small", "r1", "tokenizer", "template")


@pytest.fixture
def backend():
    faulty = Faulty(DictBackend())
    yield faulty
    # Lets threads end that hang in it.
    faulty.go_on()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def store(backend, registry):
    return Store(backend, Limits(2**30, 2**30), StoreMetrics(registry))


@pytest.fixture
def counted(registry):
    """The value of a series; 0 if there is none."""

    def value(name, **labels):
        return registry.get_sample_value(f"crossfill_store_{name}", labels) or 0.0

    return value


@pytest.fixture
def made():
    """Records for pages of a prefix: `made(namespace, tokens, names, pages)`; payloads are of the key and the name."""

    def make(namespace, tokens, names=("mass/0",), pages=None, keys_of=page_keys):
        keys = keys_of(namespace.scope, tokens)
        chosen = range(len(keys)) if pages is None else pages
        return {index: [record(keys[index], name) for name in names] for index in chosen}

    def record(page, name):
        kind, layer = name.split("/")
        payload = page.key + name.encode()
        return Record(Kind[kind.upper()], int(layer), (len(payload),), "u1", page.tokens_digest, payload)

    return make
