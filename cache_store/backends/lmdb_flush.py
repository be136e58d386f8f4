"""A flush of an LMDB store: one walk over all namespaces, as they lie packed.

Client salts make many namespaces of few names, so the names are unpacked once for all that share them, and what fits
is written at once for all.
"""

from collections.abc import Mapping

from cache_store.backends.lmdb_change import Change
from cache_store.backends.lmdb_layout import (
    digest_name,
    pack_counts,
    pack_number,
    pack_prefix,
    split_scope,
    unpack_names,
    unpack_number,
)
from cache_store.backends.lmdb_pages import drop_anchor
from cache_store.backends.protocol import Reclaimed


def flush(change: Change, wanted: Mapping[str, str]) -> Reclaimed:
    """See `Backend.flush`; `wanted` has the fields of `ScopeInfo` that must fit."""
    pages = size_bytes = 0
    change.state.flushes += 1
    change.write_scopes()
    anchored = _anchored(change)
    raised: list[tuple[bytes, bytes]] = []
    flushed: list[tuple[bytes, bytes]] = []
    # By packed names, the digest of the tenant's name; None if they do not fit.
    tenants: dict[bytes, bytes | None] = {}
    with change.txn.cursor(change.tables["scopes"]) as cursor:
        for name, packed in cursor:
            (number, epoch, held, held_bytes), names = split_scope(packed)
            if names not in tenants:
                tenants[names] = _tenant_if_fits(names, wanted)
            tenant = tenants[names]
            if tenant is None:
                anchored.discard(number)
                continue
            raised.append((bytes(name), pack_counts(number, epoch + 1, 0, 0) + names))
            if held:
                flushed.append((pack_prefix(number, epoch), tenant))
            pages, size_bytes = pages + held, size_bytes + held_bytes
    with change.txn.cursor(change.tables["scopes"]) as cursor:
        cursor.putmulti(raised)
    change.add_flushed(flushed)
    for number in anchored:
        for anchor in change.below(pack_number(number), "anchors"):
            drop_anchor(change, anchor)
    return Reclaimed(pages, size_bytes)


def _tenant_if_fits(names: bytes, wanted: Mapping[str, str]) -> bytes | None:
    info = unpack_names(b"", names)
    fits = all(getattr(info, name) == value for name, value in wanted.items())
    return digest_name(info.tenant) if fits else None


def _anchored(change: Change) -> set[int]:
    """Numbers of the namespaces that have anchors."""
    found: set[int] = set()
    with change.txn.cursor(change.tables["anchors"]) as cursor:
        there = cursor.first()
        while there:
            number = unpack_number(bytes(cursor.key())[:8])
            found.add(number)
            there = cursor.set_range(pack_number(number + 1))
    return found
