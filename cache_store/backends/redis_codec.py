"""What goes to the Redis scripts and comes back: few long strings, as redis-py takes its time for each it parses."""

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from cache_store.backends.checksum import CHECKSUM_BYTES, are_intact, is_intact, seal
from cache_store.backends.protocol import PageWrite, ScopeInfo, ScopeStats
from cache_store.keys import DIGEST_BYTES, KEY_BYTES

_COUNTS = struct.Struct("<HI")
# The form comes after digest and parent, and the parent again: both sealed.
_PARENT_ENDS = DIGEST_BYTES + KEY_BYTES
_FORM_AT = _PARENT_ENDS + KEY_BYTES + 2 * CHECKSUM_BYTES
_NAMES_AT = _FORM_AT + _COUNTS.size
_ABSENT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index holds of a page.

    Attributes:
        tokens_digest, parent: of its key.
        names: of its records, in the order of their data.
        ends: of each record in the data.
    """

    tokens_digest: bytes
    parent: bytes
    names: tuple[str, ...]
    ends: tuple[int, ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of its records by name."""
        sizes, before = {}, 0
        for name, end in zip(self.names, self.ends, strict=True):
            sizes[name] = end - before
            before = end
        return sizes

    def records(self, data: bytes) -> dict[str, bytes]:
        """Its records, cut out of its data."""
        return dict(zip(self.names, _cut(data, self.ends), strict=True))


def pack_names(names: Sequence[str]) -> bytes:
    """Names framed by their lengths, in the order given."""
    encoded = [name.encode() for name in names]
    return b"".join(len(name).to_bytes(2, "little") + name for name in encoded)


def sort_names(names: Sequence[str]) -> tuple[str, ...]:
    """The order in which a page has its records."""
    return tuple(sorted(names, key=str.encode))


@lru_cache(maxsize=256)
def _unpack_names(framed: bytes) -> tuple[str, ...]:
    names, at = [], 0
    while at < len(framed):
        length = int.from_bytes(framed[at : at + 2], "little")
        names.append(framed[at + 2 : at + 2 + length].decode())
        at += 2 + length
    return tuple(names)


def pack_page(page: PageWrite) -> tuple[bytes, bytes]:
    """A page's entry for the index (`entry.lua` says what is in it), and its data."""
    names, framed = _arrange(tuple(page.records))
    parts = [page.records[name] for name in names]
    # The size of the data comes last even without records.
    ends = list(accumulate(map(len, parts))) or [0]
    form = _COUNTS.pack(len(names), len(framed)) + framed + struct.pack(f"<{len(ends)}I", *ends)
    return seal(page.tokens_digest + page.parent) + seal(page.parent) + seal(form), b"".join(parts)


@lru_cache(maxsize=256)
def _arrange(given: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    names = sort_names(given)
    return names, pack_names(names)


def find_damaged(entries: Sequence[bytes | None]) -> Sequence[int]:
    """Places of those entries that are not as they were written."""
    there = [entry for entry in entries if entry is not None]
    # Nearly always all are whole. Of one that was cut off between two of its parts only the length tells.
    if are_intact(there) and min(map(len, there), default=_NAMES_AT + 1) > _NAMES_AT:
        return ()
    return [place for place, entry in enumerate(entries) if entry is not None and not _is_whole(entry)]


def _is_whole(entry: bytes) -> bool:
    return len(entry) > _NAMES_AT and is_intact(entry)


def unpack_entry(data: bytes) -> Entry:
    """A page's entry, from its bytes in the index, if they are as they were written."""
    count, length = _COUNTS.unpack_from(data, _FORM_AT)
    names = _unpack_names(data[_NAMES_AT : _NAMES_AT + length])
    ends = struct.unpack_from(f"<{count}I", data, _NAMES_AT + length)
    return Entry(data[:DIGEST_BYTES], data[DIGEST_BYTES:_PARENT_ENDS], names, ends)


def pack_hmget(table: bytes, keys: Sequence[bytes]) -> bytes:
    """The command for these fields of a hash, as it is sent; redis-py takes half as long for that as the server."""
    head = b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n" % (len(keys) + 2, len(table), table)
    before = b"$%d\r\n" % KEY_BYTES
    return b"".join((head, before, (b"\r\n" + before).join(keys), b"\r\n"))


def unpack_read(reply: Sequence[bytes], whole: Sequence[bytes | None], names: int) -> Iterator[Sequence[bytes | None]]:
    """The reply of `read.lua`, of each page the records that were asked for, in their order.

    Args:
        reply: heads, a generation, how many pages were damaged, and the records of pages that did not come by
            themselves.
        whole: the pages that were to come by themselves; None for each if none was.
        names: number of records asked for of each page.
    """
    heads, parts, at = reply[0], iter(reply[3:]), 0
    missing = (None,) * names
    for page in whole:
        form = heads[at]
        at += 1
        if not form:
            yield missing
            continue
        numbers = struct.unpack_from(f"<{names}I", heads, at)
        at += 4 * names
        if form == 1:
            if page is None or len(page) != (numbers[-1] if numbers else 0):
                raise ValueError("a page is not what the index says")
            yield _cut(page, numbers)
        elif form == 3:
            yield _cut(next(parts), numbers)
        else:
            yield _split(next(parts), numbers)


def _split(data: bytes, lengths: Sequence[int]) -> list[bytes | None]:
    found: list[bytes | None] = []
    at = 0
    for length in lengths:
        if length == _ABSENT:
            found.append(None)
        else:
            found.append(data[at : at + length])
            at += length
    return found


def _cut(data: bytes, ends: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def pack_scope(info: ScopeInfo) -> bytes:
    """Tenant, model and revision, framed."""
    parts = [part.encode() for part in (info.tenant, info.model, info.revision)]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack_scope(scope: bytes, framed: bytes) -> ScopeInfo:
    """The namespace that `pack_scope` framed."""
    parts, at = [], 0
    for _ in range(3):
        length = int.from_bytes(framed[at : at + 4], "little")
        parts.append(framed[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return ScopeInfo(scope, *parts)


def unpack_stats(reply: Sequence[Any]) -> tuple[bytes, bool, tuple[int, int, int], list[ScopeStats]]:
    """The reply of `stats.lua`: where to go on, whether to, bytes, leased pages and quarantined, and some scopes."""
    more, size_bytes, leased, quarantined = map(int, reply[1:5])
    scopes = []
    for at in range(5, len(reply), 5):
        scope, framed, *numbers = reply[at : at + 5]
        epoch, pages, size = map(int, numbers)
        scopes.append(ScopeStats(unpack_scope(scope, framed), epoch, pages, size))
    return reply[0], more > 0, (size_bytes, leased, quarantined), scopes


def group_by_names(wanted: Sequence[tuple[bytes, str]]) -> Mapping[tuple[str, ...], list[bytes]]:
    """Pages of which the same records are wanted: keys by sorted names, each page once, by last mention."""
    names: defaultdict[bytes, dict[str, None]] = defaultdict(dict)
    for key, name in reversed(wanted):
        names[key][name] = None
    groups: dict[tuple[str, ...], list[bytes]] = {}
    sorted_once: dict[tuple[str, ...], tuple[str, ...]] = {}
    for key, found in reversed(names.items()):
        given = tuple(found)
        if given not in sorted_once:
            sorted_once[given] = sort_names(given)
        groups.setdefault(sorted_once[given], []).append(key)
    return groups
