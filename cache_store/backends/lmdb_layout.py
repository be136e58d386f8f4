"""What lies where in an LMDB store: tables, keys and values as bytes.

A page's id is its namespace's number, the epoch and the key, so a flush that raises the epoch hides every older page
without touching any. Numbers in keys are big-endian, so that LMDB's order is theirs.
"""

import hashlib
import json
import struct
from dataclasses import dataclass

from cache_store.backends.protocol import ScopeInfo

LAYOUT_VERSION = 2
PAGE_OVERHEAD_BYTES = 3072
"""Counted for a page beside its records: names and sizes, LMDB's tables, and rounding to its pages of 4 KB. Measured
with 30 records of 600 bytes: 20,987 bytes of file a page, of which 18,000 are records."""

TABLES = (
    # b"layout", b"boot", b"state"
    "meta",
    # namespace (16 bytes) → Scope; and its number → namespace
    "scopes",
    "scope_names",
    # digest of a tenant's name → bytes it holds
    "tenants",
    # page id → Meta; → head; → body; and how many children wait for a parent that is not stored
    "pages",
    "heads",
    "bodies",
    "orphans",
    # use → page id, of pages that may be evicted; and the same by tenant
    "lru",
    "lru_tenant",
    # order of flush → namespace's number, epoch, tenant: what is to be reclaimed; and tenant, order → number, epoch
    "flushed",
    "flushed_tenant",
    # holder, page id → end; and end, holder, page id
    "leases",
    "lease_ends",
    # namespace's number, slot, order → uses and identity; → the anchor's bytes
    "anchors",
    "anchor_data",
)

_PREFIX = struct.Struct(">II")
_META = struct.Struct("<QQII16s16s")
_SCOPE = struct.Struct(">IIQQ")
_STATE = struct.Struct("<QQQQIQQI")


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
        return pack_counts(self.number, self.epoch, self.pages, self.size_bytes) + names

    @classmethod
    def unpack(cls, scope: bytes, data: bytes | memoryview) -> "Scope":
        """From bytes."""
        counts, names = split_scope(data)
        return cls(unpack_names(scope, names), *counts)


def pack_counts(number: int, epoch: int, pages: int, size_bytes: int) -> bytes:
    """What a packed `Scope` begins with; the rest are its names."""
    return _SCOPE.pack(number, epoch, pages, size_bytes)


def split_scope(data: bytes | memoryview) -> tuple[tuple[int, int, int, int], bytes]:
    """What went into `pack_counts` for a packed `Scope`, and its names, packed."""
    number, epoch, pages, size_bytes = _SCOPE.unpack_from(data)
    return (number, epoch, pages, size_bytes), bytes(data[_SCOPE.size :])


def unpack_names(scope: bytes, names: bytes) -> ScopeInfo:
    """Names of `split_scope`."""
    return ScopeInfo(scope, *json.loads(names))


def unpack_scope_prefix(data: bytes | memoryview) -> bytes:
    """What the ids of the namespace's visible pages begin with, from a packed `Scope`: it begins with it too."""
    return bytes(data[: _PREFIX.size])


@dataclass(slots=True)
class State:
    """Counters of the whole store.

    Attributes:
        flushes: of the whole store or of parts of it.
        uses: the logical clock of eviction.
        size_bytes: of all pages, flushed ones included.
        quarantined: records taken away.
        scopes: namespaces that were numbered.
        order: of flushes and anchors.
        file_bytes: that the file had when the last change began; a shorter one was cut off.
        swept: number of the namespace that was looked at last for whether it holds anything.
    """

    flushes: int = 0
    uses: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    scopes: int = 0
    order: int = 0
    file_bytes: int = 0
    swept: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _STATE.pack(
            self.flushes,
            self.uses,
            self.size_bytes,
            self.quarantined,
            self.scopes,
            self.order,
            self.file_bytes,
            self.swept,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "State":
        """From bytes."""
        return cls(*_STATE.unpack(data))


def unpack_flushes(data: bytes | None) -> int:
    """`State.flushes` of a packed state, without the rest."""
    return int.from_bytes(data[:8], "little") if data else 0
