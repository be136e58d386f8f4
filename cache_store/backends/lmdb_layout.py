"""What lies where in an LMDB store: tables, keys and values as bytes.

A page's id is its namespace's number, the epoch and the key, so a flush that raises the epoch hides every older page
without touching any. Numbers in keys are big-endian, so that LMDB's order is theirs.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

from cache_store.backends.protocol import ScopeInfo

LAYOUT_VERSION = 1
PAGE_OVERHEAD_BYTES = 3072
"""Counted for a page beside its records: names and sizes, LMDB's tables, and rounding to its pages of 4 KB. Measured
with 30 records of 600 bytes: 21,063 bytes of file a page, of which 18,000 are records."""

TABLES = (
    # b"layout", b"boot", b"state"
    "meta",
    # namespace (16 bytes) → Scope; and its number → namespace
    "scopes",
    "scope_names",
    # digest of a tenant's name → bytes it holds
    "tenants",
    # page id → Meta; → head and records; and how many children wait for a parent that is not stored
    "pages",
    "data",
    "orphans",
    # use → page id, of pages that may be evicted; and the same by tenant
    "lru",
    "lru_tenant",
    # order of flush → namespace's number, epoch, tenant: what is to be reclaimed
    "flushed",
    # holder, page id → end; and end, holder, page id
    "leases",
    "lease_ends",
    # namespace's number, slot, order → uses and identity; → the anchor's bytes
    "anchors",
    "anchor_data",
)

_PREFIX = struct.Struct(">II")
_META = struct.Struct("<QQII16s16s")
_SCOPE = struct.Struct("<IIQQ")
_STATE = struct.Struct("<QQQIQQ")
_HEAD = struct.Struct("<I32sHI")
ID_BYTES = _PREFIX.size + 16


def pack_number(number: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return number.to_bytes(8, "big")


def unpack_number(data: bytes | memoryview) -> int:
    """The number of `pack_number`."""
    return int.from_bytes(data, "big")


def pack_prefix(number: int, epoch: int) -> bytes:
    """What the ids of all pages of one namespace and epoch begin with."""
    return _PREFIX.pack(number, epoch)


def unpack_prefix(data: bytes | memoryview) -> tuple[int, int]:
    """Namespace's number and epoch of a page's id."""
    number, epoch = _PREFIX.unpack_from(data)
    return number, epoch


def digest_name(name: str) -> bytes:
    """16 bytes for a name of any length: LMDB's keys have at most 511."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


@dataclass(slots=True)
class Meta:
    """What eviction knows of a page: when it was used last, what depends on it, what it counts for."""

    use: int
    size_bytes: int
    children: int
    holders: int
    parent: bytes
    tenant: bytes
    # The use under which the tables of eviction have it now; None if they do not.
    listed: int | None = None

    def pack(self) -> bytes:
        """As bytes; `listed` follows from the rest."""
        return _META.pack(self.use, self.size_bytes, self.children, self.holders, self.parent, self.tenant)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Meta":
        """From bytes."""
        meta = cls(*_META.unpack(data))
        meta.listed = meta.use if meta.may_go else None
        return meta

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted: neither a parent nor leased."""
        return not self.children and not self.holders


@dataclass(slots=True)
class Scope:
    """A namespace: its number, its current epoch, and what it holds at it."""

    info: ScopeInfo
    number: int
    epoch: int = 0
    pages: int = 0
    size_bytes: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        names = json.dumps([self.info.tenant, self.info.model, self.info.revision]).encode()
        return _SCOPE.pack(self.number, self.epoch, self.pages, self.size_bytes) + names

    @classmethod
    def unpack(cls, scope: bytes, data: bytes | memoryview) -> "Scope":
        """From bytes."""
        info = ScopeInfo(scope, *json.loads(bytes(data[_SCOPE.size :])))
        return cls(info, *_SCOPE.unpack_from(data))


def unpack_scope_prefix(data: bytes | memoryview) -> bytes:
    """What the ids of the namespace's visible pages begin with, from a packed `Scope`."""
    return _PREFIX.pack(*_SCOPE.unpack_from(data)[:2])


@dataclass(slots=True)
class State:
    """Counters of the whole store.

    Attributes:
        uses: the logical clock of eviction.
        size_bytes: of all pages, flushed ones included.
        quarantined: records taken away.
        scopes: namespaces that were numbered.
        order: of flushes and anchors.
        file_bytes: that the file had when the last change began; a shorter one was cut off.
    """

    uses: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    scopes: int = 0
    order: int = 0
    file_bytes: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _STATE.pack(self.uses, self.size_bytes, self.quarantined, self.scopes, self.order, self.file_bytes)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "State":
        """From bytes."""
        return cls(*_STATE.unpack(data))


@dataclass(frozen=True, slots=True)
class Stored:
    """A page's value: digest of its tokens, and where its records lie in the bytes.

    Attributes:
        tokens_digest: as it was written.
        sizes: of the records, by name, in the order they lie.
        start: of the first.
        data: all of it, in LMDB's memory: valid only as long as the transaction.
    """

    tokens_digest: bytes
    sizes: Mapping[str, int]
    start: int
    data: memoryview = field(repr=False)

    def records(self) -> dict[str, bytes]:
        """Copies of the records by name."""
        ends = accumulate(self.sizes.values(), initial=self.start)
        return {
            name: bytes(self.data[end : end + size])
            for (name, size), end in zip(self.sizes.items(), ends, strict=False)
        }

    def spans(self) -> dict[str, tuple[int, int]]:
        """Start and end of each record by name."""
        ends = list(accumulate(self.sizes.values(), initial=self.start))
        return dict(zip(self.sizes, pairwise(ends), strict=True))


def pack_page(tokens_digest: bytes, records: Mapping[str, bytes]) -> bytes:
    """A page's value: checksum of the head, digest, number of records, their names and sizes, then their bytes.

    Raises:
        ValueError: the digest is not 32 bytes, or a name or the number of records is beyond 65,535.
    """
    if len(tokens_digest) != 32:
        raise ValueError(f"want a digest of 32 bytes, got {len(tokens_digest)}")
    encoded = [name.encode() for name in records]
    if len(encoded) > 0xFFFF or any(len(name) > 0xFFFF for name in encoded):
        raise ValueError("want at most 65,535 records a page and bytes a name")
    names = struct.pack(f"<{len(encoded)}H", *map(len, encoded)) + b"".join(encoded)
    sizes = struct.pack(f"<{len(encoded)}Q", *map(len, records.values()))
    head = _HEAD.pack(0, tokens_digest, len(encoded), len(names))[4:] + names + sizes
    return b"".join([zlib.crc32(head).to_bytes(4, "little"), head, *records.values()])


def unpack_page(data: memoryview) -> Stored | None:
    """A page's value, without copying records; None if its head was altered since it was written.

    The records carry checksums of their own; this one keeps a damaged head from leading to the wrong bytes.
    """
    if len(data) < _HEAD.size:
        return None
    checksum, tokens_digest, count, names_bytes = _HEAD.unpack_from(data)
    sizes_at = _HEAD.size + names_bytes
    start = sizes_at + 8 * count
    if start > len(data) or zlib.crc32(data[4:start]) != checksum:
        return None
    sizes = struct.unpack_from(f"<{count}Q", data, sizes_at)
    names = _unpack_names(bytes(data[_HEAD.size : sizes_at]), count)
    return Stored(tokens_digest, dict(zip(names, sizes, strict=True)), start, data)


# Most pages have the same names.
@lru_cache(maxsize=256)
def _unpack_names(data: bytes, count: int) -> tuple[str, ...]:
    lengths = struct.unpack_from(f"<{count}H", data)
    ends = list(accumulate(lengths, initial=2 * count))
    return tuple(data[start:end].decode() for start, end in pairwise(ends))
