"""The least that a store must do: plain calls of lmdb and redis-py that move the same bytes.

A page is one value: what there is of it (the digest of its tokens, names and sizes), then its records. No limits, no
order of use, no epochs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cache_store.backends.protocol import PageWrite

_MAP_BYTES = 2**36


@dataclass(frozen=True)
class Layout:
    """Where things lie in a value; all pages of a benchmark are alike."""

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

    def close(self) -> None:
        """Let go of files and connections."""


def description(page: PageWrite) -> bytes:
    """What is kept of a page beside its records."""
    sizes = b"".join(struct.pack("<I", len(data)) + name.encode() for name, data in page.records.items())
    return page.tokens_digest + sizes


def open_raw(url: str, folder: Path, layout: Layout) -> Raw | None:
    """Plain calls of the library behind `url`; None if there is none. `folder` is for an embedded store."""
    scheme = urlsplit(url).scheme
    if scheme == "lmdb":
        return _RawLmdb(folder / "raw", layout)
    if scheme in {"redis", "rediss"}:
        return _RawRedis(url, layout)
    return None


class _RawLmdb:
    def __init__(self, folder: Path, layout: Layout) -> None:
        import lmdb

        folder.mkdir(parents=True)
        self._layout = layout
        # Syncs as seldom as the store does: what a crash loses is computed again.
        self._environment = lmdb.open(str(folder), map_size=_MAP_BYTES, sync=False)

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        return [(page.key, b"".join([description(page), *page.records.values()])) for page in pages]

    def publish(self, prepared: Any) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in prepared:
                transaction.put(key, value)

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return self._slices(keys, slice(0, self._layout.description_bytes))

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        return self._slices(keys, self._layout.span(index))

    def close(self) -> None:
        self._environment.close()

    def _slices(self, keys: Sequence[bytes], part: slice) -> list[bytes | None]:
        with self._environment.begin(buffers=True) as transaction:
            values = map(transaction.get, keys)
            return [None if value is None else bytes(value[part]) for value in values]


class _RawRedis:
    def __init__(self, url: str, layout: Layout) -> None:
        import redis

        self._layout = layout
        self._client: Any = redis.Redis.from_url(urlunsplit(urlsplit(url)._replace(query="")))

    def prepare(self, pages: Sequence[PageWrite]) -> Any:
        described = {page.key: description(page) for page in pages}
        return described, {b"raw:" + page.key: b"".join([*page.records.values()]) for page in pages}

    def publish(self, prepared: Any) -> None:
        described, values = prepared
        # A value of its own for what lookups ask, as one that holds records too would travel whole.
        self._client.pipeline(transaction=True).hset("raw", mapping=described).mset(values).execute()

    def match(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found: list[bytes | None] = self._client.hmget("raw", keys)
        return found

    def read(self, keys: Sequence[bytes], index: int) -> Sequence[bytes | None]:
        start = index * self._layout.record_bytes
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(b"raw:" + key, start, start + self._layout.record_bytes - 1)
        found: list[bytes | None] = pipeline.execute()
        return found

    def close(self) -> None:
        self._client.close()
