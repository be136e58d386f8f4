"""What other processes do to a store of any kind; run as `python store_process.py WHAT URL [NUMBER]`."""

from __future__ import annotations

import os
import sys
import time

from prometheus_client import CollectorRegistry

from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import Limits
from cache_store.keys import PAGE, page_keys
from cache_store.metrics import StoreMetrics
from cache_store.namespace import Namespace
from cache_store.records import Kind, Record
from cache_store.store import Store

NAMESPACE = Namespace("acme", "small", "r1", "tokenizer", "template")
TOKENS = list(range(6 * PAGE))
ROUNDS, LEASE_S = 40, 3600.0


def open_process_store(url: str) -> Store:
    return Store(open_backend(url, deadline_s=30), Limits(2**30, 2**30), StoreMetrics(CollectorRegistry()))


def true_record(key_index: int, layer: int, size_bytes: int = 16) -> Record:
    """A record of a page of `TOKENS` that anybody can check: its payload is of its key and layer."""
    page = page_keys(NAMESPACE.scope, TOKENS)[key_index]
    return Record(Kind.MASS, layer, (size_bytes,), "u1", page.tokens_digest, (page.key * size_bytes)[:size_bytes])


def publish_layer(store: Store, layer: int) -> None:
    store.publish(NAMESPACE, TOKENS, {index: [true_record(index, layer)] for index in range(len(TOKENS) // PAGE)})


def publish(url: str, layer: int) -> None:
    """Publish one layer of each page, and say under which keys."""
    store = open_process_store(url)
    publish_layer(store, layer)
    store.close()
    say(" ".join(page.key.hex() for page in page_keys(NAMESPACE.scope, TOKENS)))


def read(url: str, layer: int) -> None:
    """Say how many pages have the layer as it should be, and what the seed made of a hash of text."""
    store = open_process_store(url)
    pages = store.match(NAMESPACE, TOKENS).pages
    found = store.read(NAMESPACE, [(page, f"mass/{layer}") for page in pages])
    right = sum(record == true_record(index, layer) for index, record in enumerate(found))
    store.close()
    say(f"{right} {hash('text')}")


def publish_at_once(url: str, layer: int) -> None:
    """Add a layer after the other to the same pages, from when somebody says so."""
    store = open_process_store(url)
    say("ready")
    sys.stdin.readline()
    for number in range(ROUNDS):
        publish_layer(store, layer + number)
    store.close()


def lease(url: str, _: int) -> None:
    """Lease all pages for an hour, and read until somebody ends this process."""
    store = open_process_store(url)
    pages = store.match(NAMESPACE, TOKENS).pages
    say(str(store.lease(NAMESPACE, pages, f"reader {os.getpid()}", LEASE_S)))
    while True:
        store.read(NAMESPACE, [(page, "mass/0") for page in pages])
        time.sleep(0.01)


def publish_large(url: str, megabytes: int) -> None:
    """Publish one page after the other in one call, a megabyte each."""
    store = open_process_store(url)
    tokens = list(range(megabytes * PAGE))
    records = {}
    for index, page in enumerate(page_keys(NAMESPACE.scope, tokens)):
        payload = page.key * (2**20 // 16)
        records[index] = [Record(Kind.MASS, 0, (len(payload),), "u1", page.tokens_digest, payload)]
    say("ready")
    sys.stdin.readline()
    store.publish(NAMESPACE, tokens, records)
    say("published")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    doing = {f.__name__: f for f in (publish, read, publish_at_once, lease, publish_large)}
    doing[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
