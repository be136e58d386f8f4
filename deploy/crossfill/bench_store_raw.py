"""The least that a store must do: plain calls of lmdb and redis-py that move the same bytes.

In two ways: each record a value of its own beside one that tells what there is of the page (the digest of its tokens,
names and sizes), as one would use a library that has keys and values; and each page packed into one value, which is
faster and cannot add a record to a page. Neither has limits, an order of use or epochs.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from crossfill.bench_store_report import Side

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cache_store.backends.protocol import PageWrite

_MAP_BYTES = 2**36


@dataclass(frozen=True)
class Layout:
    """Where things lie in a value of a whole page; all pages of a benchmark are alike."""

    description_bytes: int
    record_bytes: int

    def span(self, index: int) -> slice:
        """Of a record, by its place among those of its page."""
        start = self.description_bytes + index * self.record_bytes
        return slice(start, start + self.record_bytes)


class Raw(Protocol):
    """A store without a store. Pages are prepared first, so that only the library's calls are timed."""

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        """What `publish` takes."""

    def publish(self, prepared: Any) -> None:
        """Write pages in one transaction."""

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """What there is of each page, in one round trip."""

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        """One record of each page, by its place, in one round trip."""


def description(page: PageWrite) -> bytes:
    """What is kept of a page beside its records."""
    sizes = b"".join(struct.pack("<I", len(data)) + name.encode() for name, data in page.records.items())
    return page.tokens_digest + sizes


@contextmanager
def open_raw(url: str, folder: Path, layout: Layout) -> Iterator[dict[Side, Raw]]:
    """Plain calls of the library behind `url`, in both ways; none if there is none. An embedded one is in `folder`."""
    scheme = urlsplit(url).scheme
    if scheme == "lmdb":
        import lmdb

        folder.mkdir(parents=True)
        # Syncs as the store does.
        with lmdb.open(str(folder), map_size=_MAP_BYTES, max_dbs=3, metasync=False, readahead=False) as environment:
            yield {Side.RAW: _LmdbRecords(environment), Side.PACKED: _LmdbPages(environment, layout)}
    elif scheme in {"redis", "rediss"}:
        import redis

        with redis.Redis.from_url(urlunsplit(urlsplit(url)._replace(query=""))) as client:
            yield {Side.RAW: _RedisRecords(client), Side.PACKED: _RedisPages(client, layout)}
    else:
        yield {}


class _LmdbRecords:
    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._pages, self._records = environment.open_db(b"pages"), environment.open_db(b"records")

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        described = [(page.key, description(page)) for page in pages]
        numbered = [(page.key, enumerate(page.records.values())) for page in pages]
        return described, [(key + bytes([index]), data) for key, records in numbered for index, data in records]

    def publish(self, prepared: Any) -> None:
        described, records = prepared
        with self._environment.begin(write=True) as transaction:
            for key, data in described:
                transaction.put(key, data, db=self._pages)
            for key, data in records:
                transaction.put(key, data, db=self._records)

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        with self._environment.begin() as transaction:
            return [transaction.get(key, db=self._pages) for key in keys]

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        last = bytes([index])
        with self._environment.begin() as transaction:
            return [transaction.get(key + last, db=self._records) for key in keys]


class _LmdbPages:
    def __init__(self, environment: Any, layout: Layout) -> None:
        self._environment = environment
        self._layout = layout
        self._pages = environment.open_db(b"whole")

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        return [(page.key, b"".join([description(page), *page.records.values()])) for page in pages]

    def publish(self, prepared: Any) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in prepared:
                transaction.put(key, value, db=self._pages)

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return self._slices(keys, slice(0, self._layout.description_bytes))

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        return self._slices(keys, self._layout.span(index))

    def _slices(self, keys: Sequence[bytes], part: slice) -> list[bytes | None]:
        with self._environment.begin(db=self._pages, buffers=True) as transaction:
            values = map(transaction.get, keys)
            return [None if value is None else bytes(value[part]) for value in values]


class _RedisRecords:
    def __init__(self, client: Any) -> None:
        self._client = client

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        described = {page.key: description(page) for page in pages}
        return described, [(b"raw:r:" + page.key, dict(enumerate(page.records.values()))) for page in pages]

    def publish(self, prepared: Any) -> None:
        described, pages = prepared
        pipeline = self._client.pipeline(transaction=True).hset("raw", mapping=described)
        for key, records in pages:
            pipeline.hset(key, mapping=records)
        pipeline.execute()

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found: list[bytes | None] = self._client.hmget("raw", keys)
        return found

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.hget(b"raw:r:" + key, index)
        found: list[bytes | None] = pipeline.execute()
        return found


class _RedisPages:
    def __init__(self, client: Any, layout: Layout) -> None:
        self._client = client
        self._layout = layout

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        described = {page.key: description(page) for page in pages}
        return described, {b"raw:p:" + page.key: b"".join([*page.records.values()]) for page in pages}

    def publish(self, prepared: Any) -> None:
        described, values = prepared
        # A value of its own for what lookups ask, as one that holds records too would travel whole.
        self._client.pipeline(transaction=True).hset("packed", mapping=described).mset(values).execute()

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found: list[bytes | None] = self._client.hmget("packed", keys)
        return found

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        start = index * self._layout.record_bytes
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(b"raw:p:" + key, start, start + self._layout.record_bytes - 1)
        found: list[bytes | None] = pipeline.execute()
        return found
