"""What an LMDB store does with pages, leases and anchors, each within one transaction."""

from collections import Counter
from collections.abc import Sequence

from cache_store.backends.anchors import choose_victim
from cache_store.backends.lmdb_change import Change
from cache_store.backends.lmdb_layout import (
    PAGE_OVERHEAD_BYTES,
    digest_name,
    pack_number,
    pack_prefix,
    unpack_number,
)
from cache_store.backends.lmdb_page import Stored, pack_page, unpack_page
from cache_store.backends.protocol import (
    AnchorPool,
    AnchorPut,
    Limits,
    PageWrite,
    Published,
    Reclaimed,
    Refusal,
    ScopeInfo,
)

PUBLISH_EVICTIONS = 1000
"""Most pages that one publish takes away, so that it keeps its deadline; what then still has no room is refused."""

_FOREVER = 2**64 - 1

Packed = tuple[bytes, bytes]


def publish(
    change: Change,
    info: ScopeInfo,
    pages: Sequence[tuple[PageWrite, Packed]],
    limits: Limits,
    flushes: int | None = None,
) -> Published:
    """See `Backend.publish`; each page comes with its head and body, as they are if the page is new."""
    if flushes not in {None, change.state.flushes}:
        return Published(refused={Refusal.FLUSHED: len(pages)} if pages else {})
    scope = change.make_scope(info)
    prefix = pack_prefix(scope.number, scope.epoch)
    ids = [prefix + page.key for page, _ in pages]
    change.spare(ids)
    change.use(ids)
    refused: Counter[Refusal] = Counter()
    stored = size_bytes = 0
    for page, (written, packed) in zip(ids, pages, strict=True):
        refusal = _store(change, page, info, written, packed, limits)
        if refusal:
            refused[refusal] += 1
        else:
            stored += 1
            size_bytes += sum(map(len, written.records.values()))
    return Published(stored, size_bytes, dict(refused), change.gone_pages, change.gone_bytes)


def _store(
    change: Change, page: bytes, info: ScopeInfo, written: PageWrite, packed: Packed, limits: Limits
) -> Refusal | None:
    records, meta = written.records, change.find(page)
    if meta:
        stored = _stored(change, page)
        if stored is None:
            take_damaged(change, page)
            meta = None
        elif stored.head.tokens_digest != written.tokens_digest:
            return Refusal.COLLISION
        else:
            records = {**stored.records(), **records}
            packed = pack_page(written.tokens_digest, records)
    size_bytes = PAGE_OVERHEAD_BYTES + sum(map(len, records.values()))
    if size_bytes > min(limits.tenant_bytes, limits.budget_bytes):
        return Refusal.TOO_LARGE
    growth = size_bytes - (meta.size_bytes if meta else 0)
    refusal = _make_room(change, digest_name(info.tenant), growth, limits)
    if refusal:
        return refusal
    if meta is None:
        meta = change.add(page, change.make_scope(info), written.parent)
    else:
        change.use([page])
    change.count(page, meta, growth)
    meta.size_bytes = size_bytes
    _put(change, page, packed)
    return None


def _make_room(change: Change, tenant: bytes, growth: int, limits: Limits) -> Refusal | None:
    while change.tenant_bytes(tenant) + growth > limits.tenant_bytes:
        if change.gone_pages >= PUBLISH_EVICTIONS or not change.drop_one(tenant):
            return Refusal.QUOTA
    while change.state.size_bytes + growth > limits.budget_bytes:
        if change.gone_pages >= PUBLISH_EVICTIONS or not change.drop_one():
            return Refusal.FULL
    return None


def _stored(change: Change, page: bytes) -> Stored | None:
    head = change.txn.get(page, db=change.tables["heads"])
    return unpack_page(head, change.txn.get(page, db=change.tables["bodies"]))


def _put(change: Change, page: bytes, packed: Packed) -> None:
    head, body = packed
    change.txn.put(page, head, db=change.tables["heads"])
    change.txn.put(page, body, db=change.tables["bodies"])


def take_damaged(change: Change, page: bytes) -> bool:
    """Take away and count a page that is not as it was written, but for its records; whether it was one."""
    meta = change.find(page)
    if meta is None or _stored(change, page):
        return False
    # Their ends would be counted off a page that is stored in its place.
    for row in change.below(b"", "leases") if meta.holders else ():
        if row.endswith(page):
            change.end_lease(row)
    # Nothing in it can be told from anything else.
    change.drop(page, meta)
    change.state.quarantined += 1
    return True


def quarantine(change: Change, name: bytes, key: bytes, record: str) -> bool:
    """See `Backend.quarantine`."""
    scope = change.scope(name)
    if scope is None:
        return False
    page = pack_prefix(scope.number, scope.epoch) + key
    meta, stored = change.find(page), _stored(change, page)
    if meta is None or stored is None:
        return take_damaged(change, page)
    if record not in stored.head.sizes:
        return False
    records = stored.records()
    size_bytes = len(records.pop(record))
    _put(change, page, pack_page(stored.head.tokens_digest, records))
    change.count(page, meta, -size_bytes)
    meta.size_bytes -= size_bytes
    change.keep(page, meta)
    change.state.quarantined += 1
    return True


def evict(change: Change, size_bytes: int, most_pages: int) -> Reclaimed:
    """Free so many bytes or take away so many pages, whichever comes first."""
    while change.gone_bytes < size_bytes and change.gone_pages < most_pages and change.drop_one():
        pass
    return Reclaimed(change.gone_pages, change.gone_bytes)


def lease(change: Change, name: bytes, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
    """See `Backend.lease`."""
    scope = change.scope(name)
    if scope is None:
        return 0
    ends = _FOREVER if ttl_s is None else change.now_ns + round(ttl_s * 1e9)
    there = 0
    for key in dict.fromkeys(keys):
        page = pack_prefix(scope.number, scope.epoch) + key
        meta = change.find(page)
        if meta is None:
            continue
        there += 1
        row = digest_name(holder) + page
        held = change.txn.get(row, db=change.tables["leases"])
        if held is None:
            meta.holders += 1
            change.keep(page, meta)
        elif unpack_number(held) >= ends:
            continue
        else:
            change.txn.delete(bytes(held) + row, db=change.tables["lease_ends"])
        change.txn.put(row, pack_number(ends), db=change.tables["leases"])
        change.txn.put(pack_number(ends) + row, b"", db=change.tables["lease_ends"])
    return there


def release(change: Change, holder: str) -> int:
    """See `Backend.release`."""
    pages = [change.end_lease(row) for row in change.below(digest_name(holder), "leases")]
    return sum(1 for page in pages if change.find(page) and change.is_visible(page))


def end_timed_leases(change: Change) -> None:
    """Forget every lease that ends by time: the clock is another one now."""
    for row in change.below(b"", "lease_ends"):
        if unpack_number(row[:8]) == _FOREVER:
            return
        change.end_lease(row[8:])


def pool_prefix(number: int, slot: str) -> bytes:
    """What the keys of a pool's anchors begin with."""
    return pack_number(number) + digest_name(slot)


def put_anchor(change: Change, pool: AnchorPool, identity: str, data: bytes) -> AnchorPut:
    """See `Backend.put_anchor`."""
    if len(data) > pool.budget_bytes or pool.capacity < 1:
        return AnchorPut(stored=False)
    prefix = pool_prefix(change.make_scope(pool.info).number, pool.slot)
    rows, sizes, uses = _anchors(change, prefix)
    if identity not in rows:
        change.state.order += 1
        rows[identity], uses[identity] = prefix + pack_number(change.state.order), 0
        change.txn.put(rows[identity], pack_number(0) + identity.encode(), db=change.tables["anchors"])
    change.txn.put(rows[identity], data, db=change.tables["anchor_data"])
    sizes[identity] = len(data)
    evicted = []
    while len(rows) > pool.capacity or sum(sizes.values()) > pool.budget_bytes:
        victim = choose_victim(uses, identity)
        drop_anchor(change, rows.pop(victim))
        del sizes[victim], uses[victim]
        evicted.append(victim)
    return AnchorPut(stored=True, evicted=tuple(evicted))


def quarantine_anchor(change: Change, pool: AnchorPool, identity: str) -> bool:
    """See `Backend.quarantine_anchor`."""
    scope = change.scope(pool.info.scope)
    rows = _anchors(change, pool_prefix(scope.number, pool.slot))[0] if scope else {}
    if identity not in rows:
        return False
    drop_anchor(change, rows[identity])
    change.state.quarantined += 1
    return True


def use_anchors(change: Change, pool: AnchorPool, identities: Sequence[str]) -> None:
    """See `Backend.use_anchors`."""
    scope = change.scope(pool.info.scope)
    if scope is None:
        return
    rows, _, uses = _anchors(change, pool_prefix(scope.number, pool.slot))
    for identity in identities:
        if identity in rows:
            uses[identity] += 1
            change.txn.put(rows[identity], pack_number(uses[identity]) + identity.encode(), db=change.tables["anchors"])


def _anchors(change: Change, prefix: bytes) -> tuple[dict[str, bytes], dict[str, int], dict[str, int]]:
    """Key, size and uses of each anchor of a pool, the oldest first."""
    rows, sizes, uses = {}, {}, {}
    for row in change.below(prefix, "anchors"):
        head = change.txn.get(row, db=change.tables["anchors"])
        data = change.txn.get(row, db=change.tables["anchor_data"])
        assert head is not None
        assert data is not None
        identity = bytes(head[8:]).decode()
        rows[identity], sizes[identity], uses[identity] = row, len(data), unpack_number(head[:8])
    return rows, sizes, uses


def drop_anchor(change: Change, row: bytes) -> None:
    """Take an anchor away."""
    change.txn.delete(row, db=change.tables["anchors"])
    change.txn.delete(row, db=change.tables["anchor_data"])
