"""What a backend does. Bytes in, bytes out: it knows pages, names and sizes, and nothing of what records hold.

Every operation is atomic: another process sees all of it or nothing. A backend is safe to use from several threads,
and by several processes at once where it is shared at all. What it cannot do within its deadline it gives up with
`StoreUnavailableError`; it never blocks longer. A time or a name that cannot be stored is a `ValueError`
(`cache_store.backends.arguments`).

A page is visible if it carries the current epoch of its scope. A flush raises the epoch, so everything older is a
miss at once and is reclaimed before anything else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Refusal(StrEnum):
    """Why a page was not stored; a metric's label."""

    FULL = "full"
    QUOTA = "quota"
    TOO_LARGE = "too_large"
    COLLISION = "collision"
    FLUSHED = "flushed"


@dataclass(frozen=True)
class ScopeInfo:
    """What a backend remembers of a namespace, for statistics and for flushes by model.

    Attributes:
        scope: 16 bytes, `Namespace.scope`.
        tenant, model, revision: of the namespace.
    """

    scope: bytes
    tenant: str
    model: str
    revision: str


@dataclass(frozen=True)
class PageWrite:
    """A page to store. Records of a page that exists are added to it; one of the same name replaces.

    Attributes:
        key, parent, tokens_digest: of `PageKey`.
        records: bytes by name.
    """

    key: bytes
    parent: bytes
    tokens_digest: bytes
    records: Mapping[str, bytes]


@dataclass(frozen=True)
class Found:
    """What a lookup found of pages, in the order asked. What records there are is unpacked only when asked for.

    Attributes:
        digests: `PageWrite.tokens_digest` of each page, as it was written, for the caller to compare; None where there
            is no page.
        flushes: how often the store had been flushed; what is computed now is published with it.
        sizes: size in bytes of each record by name, of the page of this index, if there is one.
    """

    digests: Sequence[bytes | None]
    flushes: int
    sizes: Callable[[int], Mapping[str, int]] = field(repr=False)


@dataclass(frozen=True)
class Limits:
    """Bounds that a publish keeps, evicting what was used least recently to make room.

    Attributes:
        budget_bytes: of the whole store, records and what the backend needs beside them.
        tenant_bytes: of one tenant.
    """

    budget_bytes: int
    tenant_bytes: int


@dataclass(frozen=True)
class Published:
    """What became of a publish.

    Attributes:
        pages, size_bytes: that were stored.
        refused: number of pages by reason.
        evicted_pages, evicted_bytes: what had to go.
    """

    pages: int = 0
    size_bytes: int = 0
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    evicted_pages: int = 0
    evicted_bytes: int = 0


@dataclass(frozen=True)
class ScopeStats:
    """What a namespace holds at its current epoch."""

    info: ScopeInfo
    epoch: int
    pages: int
    size_bytes: int


@dataclass(frozen=True)
class BackendStats:
    """What the whole store holds.

    Attributes:
        scopes: of each namespace.
        size_bytes: what counts towards the budget, flushed pages that are not reclaimed yet included.
        leased_pages: that may not be evicted now.
        quarantined: records and anchors taken away because they were not what they should be, since the store was made.
    """

    scopes: Sequence[ScopeStats]
    size_bytes: int
    leased_pages: int
    quarantined: int


@dataclass(frozen=True)
class Reclaimed:
    """What an eviction or a flush took away (a flush counts what it made invisible)."""

    pages: int
    size_bytes: int


class Backend(Protocol):
    """A place for pages. Keys and scopes are 16 bytes; times are seconds."""

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """Which of these pages are there; marks them as used. One round trip, whatever the number."""

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """The records (page key, name), None for those that are not there; marks the pages as used. One round trip."""

    def publish(
        self, info: ScopeInfo, pages: Sequence[PageWrite], limits: Limits, flushes: int | None = None
    ) -> Published:
        """Store pages in order, parents before children.

        A page whose parent is neither the scope nor stored nor earlier in `pages` is stored all the same (prefixes
        without records have no pages). A page that exists with another `tokens_digest` is refused as a collision.
        Makes room by evicting pages that no stored page has as its parent, least recently used first, of the tenant
        if its quota is the bound, else of the whole store; never leased ones, and never those of this call. If that
        is not enough, the page is refused.

        With `flushes` (of the lookup before what is stored was computed) nothing is stored if the store was flushed
        since, whatever that flush was of: `Refusal.FLUSHED` for every page.
        """

    def lease(self, scope: bytes, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
        """Keep these pages until the lease ends; without a time, until they are released. How many are there to keep.

        A holder that leases again extends; several holders may hold one page.
        """

    def release(self, holder: str) -> int:
        """End all leases of a holder; of how many pages."""

    def flush(self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None) -> Reclaimed:
        """Raise the epoch of every scope that fits all that is given; everything if nothing is. Counts as a flush."""

    def evict(self, size_bytes: int) -> Reclaimed:
        """Reclaim flushed pages, then evict, until this many bytes are free or nothing more may go."""

    def quarantine(self, scope: bytes, key: bytes, name: str) -> bool:
        """Take a record away for good and count it; whether it was there."""

    def stats(self) -> BackendStats:
        """What the store holds."""

    def scan(self) -> Iterator[tuple[ScopeInfo, PageWrite]]:
        """Every visible page with its records, parents before children; for verification and export. May be slow."""

    def compact(self) -> Reclaimed:
        """Give memory or disk space that is free back to the system, where the backend can."""

    def put_anchor(self, pool: "AnchorPool", identity: str, data: bytes) -> "AnchorPut":
        """Add or replace an anchor, and evict until it fits: of the five oldest the one used least."""

    def anchors(self, pool: "AnchorPool") -> dict[str, bytes]:
        """The pool's anchors by identity, the oldest first; does not count as use. One round trip."""

    def quarantine_anchor(self, pool: "AnchorPool", identity: str) -> bool:
        """Take an anchor away for good and count it, as `quarantine` does a record; whether it was there."""

    def use_anchors(self, pool: "AnchorPool", identities: Sequence[str]) -> None:
        """Count one use of each of these anchors."""

    def close(self) -> None:
        """Let go of files and connections; anything after it raises `StoreUnavailableError`."""


@dataclass(frozen=True)
class AnchorPool:
    """A bounded set of correction states (KVCMAS, § Anchor pool).

    Attributes:
        info: the namespace; a flush of it empties the pool too.
        slot: where in the workflow the states apply, as the engine names it.
        capacity: most anchors.
        budget_bytes: most bytes of all of them.
    """

    info: ScopeInfo
    slot: str
    capacity: int = 10
    budget_bytes: int = 64 * 2**20


@dataclass(frozen=True)
class AnchorPut:
    """What became of an anchor: whether it was stored (one larger than the budget is not), and who had to go."""

    stored: bool
    evicted: Sequence[str] = ()
