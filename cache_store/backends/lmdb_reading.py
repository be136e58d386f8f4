"""What is read from an LMDB store: copied out within one short transaction, so that no page is kept from reuse."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cache_store.backends.lmdb_change import Tables
from cache_store.backends.lmdb_layout import (
    Meta,
    Scope,
    State,
    pack_prefix,
    unpack_number,
)
from cache_store.backends.lmdb_page import unpack_page
from cache_store.backends.lmdb_pages import pool_prefix
from cache_store.backends.protocol import (
    AnchorPool,
    BackendStats,
    PageWrite,
    ScopeInfo,
    ScopeStats,
)

if TYPE_CHECKING:
    import lmdb


class View:
    """Reads of one transaction.

    Attributes:
        damaged: ids of pages that are not as they were written, but for their records.
    """

    def __init__(self, txn: "lmdb.Transaction[memoryview]", tables: Tables) -> None:
        self._txn, self._tables = txn, tables
        self.damaged: list[bytes] = []

    def anchors(self, pool: AnchorPool) -> dict[str, bytes]:
        """See `Backend.anchors`."""
        packed = self._txn.get(pool.info.scope, db=self._tables["scopes"])
        if packed is None:
            return {}
        prefix = pool_prefix(Scope.unpack(pool.info.scope, packed).number, pool.slot)
        found = {}
        for row, head in self._rows("anchors", prefix):
            data = self._txn.get(row, db=self._tables["anchor_data"])
            assert data is not None
            found[bytes(head[8:]).decode()] = bytes(data)
        return found

    def stats(self, now_ns: int) -> BackendStats:
        """See `Backend.stats`."""
        packed = self._txn.get(b"state", db=self._tables["meta"])
        state = State() if packed is None else State.unpack(packed)
        scopes = self.scopes()
        visible = {pack_prefix(scope.number, scope.epoch) for scope in scopes}
        leased = {
            row[16:]
            for row, ends in self._rows("leases", b"")
            if unpack_number(ends) > now_ns and row[16:24] in visible
        }
        stats = [ScopeStats(scope.info, scope.epoch, scope.pages, scope.size_bytes) for scope in scopes]
        return BackendStats(stats, state.size_bytes, len(leased), state.quarantined)

    def scopes(self) -> list[Scope]:
        """Every namespace."""
        return [Scope.unpack(name, packed) for name, packed in self._rows("scopes", b"")]

    def ordered(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Ids of a namespace's visible pages and the keys of their parents; parents come before children."""
        prefix = pack_prefix(scope.number, scope.epoch)
        parents = {page[8:]: Meta.unpack(packed).parent for page, packed in self._rows("pages", prefix)}
        below: dict[bytes, list[bytes]] = {}
        for key, parent in parents.items():
            below.setdefault(parent, []).append(key)
        found = [key for key, parent in parents.items() if parent not in parents]
        # Grows while it is walked.
        for key in found:
            found += below.get(key, [])
        return [(prefix + key, parents[key]) for key in found]

    def whole(self, info: ScopeInfo, pages: Sequence[tuple[bytes, bytes]]) -> list[tuple[ScopeInfo, PageWrite]]:
        """Those pages that are still there, with all records."""
        found = []
        for page, parent in pages:
            head = self._txn.get(page, db=self._tables["heads"])
            stored = unpack_page(head, self._txn.get(page, db=self._tables["bodies"]))
            if stored:
                found.append((info, PageWrite(page[8:], parent, stored.head.tokens_digest, stored.records())))
            elif head is not None:
                self.damaged.append(page)
        return found

    def _rows(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        with self._txn.cursor(self._tables[table]) as cursor:
            found = cursor.set_range(prefix) if prefix else cursor.first()
            while found and (row := bytes(cursor.key())).startswith(prefix):
                yield row, cursor.value()
                found = cursor.next()
