"""Publishing to Redis in parts, each of which the server does at once."""

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from cache_store.backends.protocol import Limits, PageWrite, Published, Refusal, ScopeInfo
from cache_store.backends.redis_codec import pack_page, pack_scope
from cache_store.backends.redis_link import Call, RedisLink, Together
from cache_store.backends.redis_recent import TOUCH_PAGES, touch_call
from cache_store.backends.redis_scripts import load_script

CHUNK_PAGES, CHUNK_BYTES = 64, 1 << 20
"""Pages and bytes that one run of a script stores."""

BATCH_BYTES = 16 << 20
"""Bytes that are sent before the replies to them are awaited."""

MAX_PAGE_BYTES = 256 << 20
"""Redis takes strings of up to 512 MiB."""

GENERATION_BYTES = 8
"""Length of the random id of what a scope holds between two flushes."""

STAGED_MS = 10_000
"""Life of data that its script never came for, because the server stopped in between."""

_ALL_IN_ONE = -1
_DAMAGED = "damaged"

Packed = tuple[bytes, bytes, bytes]
Chunk = tuple[int, list[Packed]]


class Publisher:
    """Stores pages of one call (`Backend.publish`).

    Args:
        link: the store's server.
        info: the namespace.
        limits: that are kept.
        flushes: what is refused if the store was flushed since this number; None to store in any case.
    """

    def __init__(self, link: RedisLink, info: ScopeInfo, limits: Limits, flushes: int | None) -> None:
        self._link, self._info, self._limits, self._flushes = link, info, limits, flushes
        self.generation = b""
        """Of the scope, afterwards; empty if nothing was stored."""
        self.damaged = 0
        """Pages that were not what they should be, taken away."""

    def publish(self, pages: Sequence[PageWrite], first: Sequence[Call]) -> Published:
        """Store pages in order, after the calls that come first."""
        packed = [(page.key, *pack_page(page)) for page in pages]
        fitting = [page for page in packed if len(page[2]) <= MAX_PAGE_BYTES]
        sums = Counter({Refusal.TOO_LARGE.value: len(packed) - len(fitting)})
        chunks = list(_chunks(fitting)) or [(0, [])]
        tick = _ALL_IN_ONE
        if len(chunks) > 1:
            *_, tick = self._link.run_all([*first, (load_script("begin"), (len(fitting),))])
            first = [
                touch_call(self._info.scope, [page[0] for page in part], before=tick + at, flushes=self._flushes)
                for at, part in _parts(fitting, TOUCH_PAGES)
            ]
        before = [Together(*call) for call in first]
        while chunks:
            batch, chunks = _batch(chunks)
            calls = [self._call((tick, len(fitting) + at), chunk) for at, chunk in batch]
            replies = self._link.run_together([*before, *calls])[len(before) :]
            before = []
            again: list[Chunk] = []
            for (offset, chunk), (reply, _) in zip(batch, replies, strict=True):
                done, tick, self.generation = self._link.understood(_Outcome(sums, reply).count)
                self.damaged = sums[_DAMAGED]
                if done < len(chunk):
                    # So much must go to make room that it would hold up the server; it goes on with the next run.
                    again.append((offset + done, chunk[done:]))
            chunks = again + chunks
        return _published(sums)

    def _call(self, times: tuple[int, int], chunk: list[Packed]) -> Together:
        # An id for each part: if a flush comes between two, the second must not use what the first began.
        fresh = secrets.token_bytes(GENERATION_BYTES)
        info, limits = self._info, self._limits
        flushes = "" if self._flushes is None else self._flushes
        head = (info.scope, info.tenant, pack_scope(info), fresh, limits.budget_bytes, limits.tenant_bytes)
        staged = self._link.address.root + b":x:" + fresh
        return Together(
            load_script("publish"),
            (*head, *times, flushes, *chain.from_iterable((key, entry) for key, entry, _ in chunk)),
            before=tuple(
                ("SET", staged + str(place).encode(), data, "PX", STAGED_MS)
                for place, (_, _, data) in enumerate(chunk, start=1)
            ),
        )


class _Outcome:
    def __init__(self, sums: Counter[str], reply: Any) -> None:
        self._sums, self._reply = sums, reply

    def count(self) -> tuple[int, int, bytes]:
        """Add the reply of `publish.lua` to the sums; pages done, the call's tick, and the generation."""
        *numbers, generation = self._reply
        done, pages, size, full, quota, too_large, collision, flushed, evicted, evicted_bytes, damaged, tick = map(
            int, numbers
        )
        self._sums.update(pages=pages, size_bytes=size, evicted_pages=evicted, evicted_bytes=evicted_bytes)
        self._sums[_DAMAGED] += damaged
        refused = zip(_REFUSALS, (full, quota, too_large, collision, flushed), strict=True)
        self._sums.update({reason.value: number for reason, number in refused})
        return done, tick, generation


_REFUSALS = (Refusal.FULL, Refusal.QUOTA, Refusal.TOO_LARGE, Refusal.COLLISION, Refusal.FLUSHED)


def _published(sums: Counter[str]) -> Published:
    return Published(
        pages=sums["pages"],
        size_bytes=sums["size_bytes"],
        refused={reason: sums[reason.value] for reason in _REFUSALS if sums[reason.value]},
        evicted_pages=sums["evicted_pages"],
        evicted_bytes=sums["evicted_bytes"],
    )


def _parts(pages: Sequence[Packed], size: int) -> Iterator[tuple[int, Sequence[Packed]]]:
    for at in range(0, len(pages), size):
        yield at, pages[at : at + size]


def _chunks(pages: Sequence[Packed]) -> Iterator[Chunk]:
    start, size = 0, 0
    for at, page in enumerate(pages):
        grown = size + sum(map(len, page))
        if at > start and (at - start == CHUNK_PAGES or grown > CHUNK_BYTES):
            yield start, list(pages[start:at])
            start, grown = at, grown - size
        size = grown
    if pages:
        yield start, list(pages[start:])


def _batch(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    size = 0
    for number, (_, pages) in enumerate(chunks):
        size += sum(len(data) for _, _, data in pages)
        if number and size > BATCH_BYTES:
            return chunks[:number], chunks[number:]
    return chunks, []
