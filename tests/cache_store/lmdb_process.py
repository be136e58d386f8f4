"""What other processes do to a store in tests of LMDB; run as `python lmdb_process.py WHAT FOLDER`."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.protocol import Limits, PageWrite, ScopeInfo
from cache_store.errors import StoreError
from cache_store.records import Kind, Record, encode, record_name

SCOPE = ScopeInfo(b"scope-scope-scop", "acme", "small", "r1")
LAYERS = 10


def digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def true_page(name: str, parent: bytes) -> PageWrite:
    """A page whose records anybody can check: their payloads follow from their names."""
    found = {}
    for layer in range(LAYERS):
        payload = hashlib.blake2b(f"{name}/{layer}".encode(), digest_size=64).digest() * 10
        record = Record(Kind.MASS, layer, (640,), "u8", digest(name), payload)
        found[record_name(Kind.MASS, layer)] = encode(record)
    return PageWrite(digest(name)[:16], parent, digest(name), found)


def publish_for_ever(folder: Path) -> None:
    """Publish chains of pages into a small budget, so that others go, until somebody ends this process."""
    backend = LmdbBackend(folder, deadline_s=30)
    limits, number = Limits(2**20, 2**30), 0
    while True:
        parent, pages = SCOPE.scope, []
        for _ in range(8):
            pages.append(true_page(f"{os.getpid()}/{number}", parent))
            parent, number = pages[-1].key, number + 1
        backend.publish(SCOPE, pages, limits)
        say("published")


def hold_writers_lock(folder: Path) -> None:
    """Keep every other process from writing."""
    backend = LmdbBackend(folder, deadline_s=30)
    transaction = backend._environment.begin()
    say("holding")
    time.sleep(60)
    transaction.abort()


def lease(folder: Path) -> None:
    """Lease all pages for a minute, and die without a word."""
    backend = LmdbBackend(folder, deadline_s=30)
    keys = [page.key for _, page in backend.scan()]
    say(str(backend.lease(SCOPE.scope, keys, "dead reader", 60)))
    os._exit(9)


def read_for_ever(folder: Path) -> None:
    """Hold a transaction that reads, as a process does that was stopped in the middle of a read."""
    backend = LmdbBackend(folder, deadline_s=30)
    with backend._environment.view():
        say("reading")
        time.sleep(60)


def publish_shared(folder: Path) -> None:
    """Publish the same pages as every other process that does this, each with a record of its own."""
    backend = LmdbBackend(folder, deadline_s=30)
    for number in range(20):
        page = true_page(f"shared/{number}", SCOPE.scope)
        own = {**page.records, f"kv/{os.getpid()}": b"mine"}
        backend.publish(SCOPE, [PageWrite(page.key, page.parent, page.tokens_digest, own)], Limits(2**30, 2**30))
    backend.close()


def look(folder: Path) -> None:
    """Open the store and say what becomes of it."""
    try:
        backend = LmdbBackend(folder, deadline_s=30)
        say(f"{sum(1 for _ in backend.scan())} pages")
        backend.close()
    except StoreError as error:
        say(f"{type(error).__name__} {getattr(error, 'reason', '')} {error}")


def keep_open(folder: Path) -> None:
    """Have the store open, and do nothing."""
    backend = LmdbBackend(folder, deadline_s=30)
    say("open")
    time.sleep(60)
    backend.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    doing = {
        f.__name__: f
        for f in (publish_for_ever, hold_writers_lock, lease, read_for_ever, publish_shared, look, keep_open)
    }
    doing[sys.argv[1]](Path(sys.argv[2]))
