"""Pages for tests, by name: what they are called tells their keys, digests and bytes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from cache_store.backends.protocol import Limits, PageWrite, ScopeInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cache_store.backends.protocol import Backend, Published

    from .conftest import Opened

A = ScopeInfo(b"scope-a-scope-a-", "acme", "small", "r1")
A2 = ScopeInfo(b"scope-a2scope-a2", "acme", "large", "r1")
B = ScopeInfo(b"scope-b-scope-b-", "bolt", "small", "r1")
ROOMY = Limits(2**30, 2**30)


def key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


def page(name: str, parent: str | bytes, records: Mapping[str, bytes] | int = 100) -> PageWrite:
    """A page called `name`; a number stands for one record of so many bytes."""
    if isinstance(records, int):
        records = {"mass/0": name.encode() * (records // len(name)) + b"." * (records % len(name))}
    return PageWrite(key(name), parent if isinstance(parent, bytes) else key(parent), digest(name), records)


def chain(scope: ScopeInfo, *names: str, size: int = 100) -> list[PageWrite]:
    parents: list[str | bytes] = [scope.scope, *names[:-1]]
    return [page(name, parent, size) for name, parent in zip(names, parents, strict=True)]


def there(backend: Backend, scope: ScopeInfo, *names: str) -> list[str]:
    """Which of these pages are stored; by scan, so that looking is no use."""
    stored = {written.key for info, written in backend.scan() if info.scope == scope.scope}
    return [name for name in names if key(name) in stored]


def look(backend: Backend, scope: ScopeInfo, *names: str) -> list[tuple[bytes, dict[str, int]] | None]:
    """Digest, and sizes of the records, of each of these pages, by lookup."""
    found = backend.lookup(scope.scope, list(map(key, names)))
    assert len(found.digests) == len(names)
    return [None if one is None else (one, dict(found.sizes(index))) for index, one in enumerate(found.digests)]


def room(opened: Opened, pages: int, size: int = 100) -> Limits:
    """Limits that exactly so many pages of this size fit in."""
    return Limits(pages * opened.footprint({"mass/0": size}), 2**30)


def put(backend: Backend, pages: list[PageWrite], limits: Limits = ROOMY, scope: ScopeInfo = A) -> Published:
    return backend.publish(scope, pages, limits)
