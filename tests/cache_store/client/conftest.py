import threading
from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry

from cache_store.backends.protocol import Limits, PageWrite
from cache_store.keys import page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store, scope_info


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
def backend(opened):
    """An empty store of each kind, whose faults a test can choose."""
    faulty = Faulty(opened.backend)
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


@pytest.fixture
def put(backend):
    """Store bytes, whatever they are, as a record of a page: `put(namespace, page, name, data)`."""

    def put(namespace, page, name, data):
        write = PageWrite(page.key, page.parent, page.tokens_digest, {name: data})
        backend.backend.publish(scope_info(namespace), [write], Limits(2**30, 2**30))

    return put


@pytest.fixture
def flip(backend, put):
    """Alter one byte of a stored record: `flip(namespace, page, name)`."""

    def flip(namespace, page, name):
        [data] = backend.backend.read(namespace.scope, [(page.key, name)])
        put(namespace, page, name, data[:-1] + bytes([data[-1] ^ 1]))

    return flip
