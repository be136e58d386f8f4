"""One change of an LMDB store: namespaces, use, and which pages may go, within one transaction.

What was loaded is kept until the end, because a chain of pages changes its parents again and again.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cache_store.backends.lmdb_layout import (
    Meta,
    Scope,
    State,
    digest_name,
    pack_number,
    pack_prefix,
    unpack_number,
    unpack_prefix,
)
from cache_store.backends.protocol import ScopeInfo

if TYPE_CHECKING:
    import lmdb

Tables = Mapping[str, "lmdb._Database"]

MAX_SCOPES = 4096
"""Namespaces that stay known though they hold nothing."""

_SWEPT_SCOPES = 50


class Change:
    """Reads and writes of one transaction; nothing is there before `finish`.

    Args:
        txn: that writes.
        tables: by name.
        now_ns: time by which leases end.

    Attributes:
        state: counters; changed in place.
        gone_pages, gone_bytes: pages that were taken away so far.
    """

    def __init__(self, txn: "lmdb.Transaction[memoryview]", tables: Tables, now_ns: int) -> None:
        self.txn, self.tables, self.now_ns = txn, tables, now_ns
        packed = txn.get(b"state", db=tables["meta"])
        self.state = State() if packed is None else State.unpack(packed)
        self.gone_pages = self.gone_bytes = 0
        # Pages of this call stay out of the tables of eviction until it ends.
        self.spared: set[bytes] = set()
        self._metas: dict[bytes, Meta | None] = {}
        self._changed: set[bytes] = set()
        self._scopes: dict[bytes, Scope] = {}
        self._changed_scopes: set[bytes] = set()
        self._names: dict[int, bytes] = {}
        self._tenants: dict[bytes, int] = {}
        self._end_leases()

    def finish(self) -> None:
        """Write what was kept until now."""
        spared, self.spared = self.spared, set()
        for page in spared:
            meta = self.find(page)
            if meta:
                self.keep(page, meta)
        for page in self._changed:
            meta = self._metas[page]
            if meta:
                self.txn.put(page, meta.pack(), db=self.tables["pages"])
        self.write_scopes()
        for tenant, size_bytes in self._tenants.items():
            if size_bytes:
                self.txn.put(tenant, pack_number(size_bytes), db=self.tables["tenants"])
            else:
                self.txn.delete(tenant, db=self.tables["tenants"])
        self.txn.put(b"state", self.state.pack(), db=self.tables["meta"])

    def write_scopes(self) -> None:
        """Write the namespaces that changed, and keep none: what their table holds is what they are."""
        for name in self._changed_scopes:
            self.txn.put(name, self._scopes[name].pack(), db=self.tables["scopes"])
        self._scopes, self._changed_scopes = {}, set()

    # Namespaces and tenants

    def scope(self, name: bytes) -> Scope | None:
        """The namespace, if anything was ever stored in it."""
        if name not in self._scopes:
            packed = self.txn.get(name, db=self.tables["scopes"])
            if packed is None:
                return None
            self._scopes[name] = Scope.unpack(name, packed)
        return self._scopes[name]

    def make_scope(self, info: ScopeInfo) -> Scope:
        """The namespace; a new one gets the next number, and so does one that comes back after it was forgotten."""
        scope = self.scope(info.scope)
        if scope is None:
            self._forget_some_scopes()
            self.state.scopes += 1
            scope = self._scopes[info.scope] = Scope(info, self.state.scopes)
            self._changed_scopes.add(info.scope)
            self.txn.put(pack_number(scope.number), info.scope, db=self.tables["scope_names"])
        return scope

    def _forget_some_scopes(self) -> None:
        """Beyond a number, look at the next few and forget those that hold nothing, of any epoch."""
        if self.txn.stat(self.tables["scopes"])["entries"] < MAX_SCOPES:
            return
        rows: list[tuple[bytes, bytes]] = []
        with self.txn.cursor(self.tables["scope_names"]) as cursor:
            there = cursor.set_range(pack_number(self.state.swept + 1))
            while there and len(rows) < _SWEPT_SCOPES:
                rows.append((bytes(cursor.key()), bytes(cursor.value())))
                there = cursor.next()
        self.state.swept = unpack_number(rows[-1][0]) if there else 0
        for number, name in rows:
            # Those of this change may be about to hold something.
            if name in self._scopes or self._holds_anything(unpack_number(number)):
                continue
            self.txn.delete(number, db=self.tables["scope_names"])
            self.txn.delete(name, db=self.tables["scopes"])

    def _holds_anything(self, number: int) -> bool:
        pages = self.below(pack_prefix(number, 0)[:4], "pages")
        return any(True for _ in pages) or any(True for _ in self.below(pack_number(number), "anchors"))

    def is_visible(self, page: bytes) -> bool:
        """Whether the page carries the current epoch of its namespace."""
        number, epoch = unpack_prefix(page)
        return self._scope_of(number).epoch == epoch

    def tenant_bytes(self, tenant: bytes) -> int:
        """What the tenant holds, flushed pages included."""
        if tenant not in self._tenants:
            packed = self.txn.get(tenant, db=self.tables["tenants"])
            self._tenants[tenant] = 0 if packed is None else unpack_number(packed)
        return self._tenants[tenant]

    def count(self, page: bytes, meta: Meta, growth: int) -> None:
        """Add to what the page, its namespace if it is visible, its tenant and the store hold."""
        self.state.size_bytes += growth
        self._tenants[meta.tenant] = self.tenant_bytes(meta.tenant) + growth
        number, epoch = unpack_prefix(page)
        scope = self._scope_of(number)
        if scope.epoch == epoch:
            scope.size_bytes += growth
            self._changed_scopes.add(scope.info.scope)

    # Pages

    def find(self, page: bytes) -> Meta | None:
        """What eviction knows of the page, if it is stored."""
        if page not in self._metas:
            packed = self.txn.get(page, db=self.tables["pages"])
            self._metas[page] = None if packed is None else Meta.unpack(packed)
        return self._metas[page]

    def keep(self, page: bytes, meta: Meta) -> None:
        """Remember a change of the page, and list it among those that may go if it is one."""
        self._changed.add(page)
        wanted = meta.use if meta.may_go and page not in self.spared else None
        if wanted == meta.listed:
            return
        if meta.listed is not None:
            self.txn.delete(pack_number(meta.listed), db=self.tables["lru"])
            self.txn.delete(meta.tenant + pack_number(meta.listed), db=self.tables["lru_tenant"])
        if wanted is not None:
            self.txn.put(pack_number(wanted), page, db=self.tables["lru"])
            self.txn.put(meta.tenant + pack_number(wanted), page, db=self.tables["lru_tenant"])
        meta.listed = wanted

    def use(self, pages: Iterable[bytes]) -> None:
        """Mark those that are stored as used, the last one as used last."""
        for page in pages:
            meta = self.find(page)
            if meta:
                self.state.uses += 1
                meta.use = self.state.uses
                self.keep(page, meta)

    def spare(self, pages: Iterable[bytes]) -> None:
        """Let none of these go before the end."""
        self.spared |= set(pages)
        for page in self.spared:
            meta = self.find(page)
            if meta:
                self.keep(page, meta)

    def add(self, page: bytes, scope: Scope, parent: bytes) -> Meta:
        """A new page, still without records; children that came before it are its own."""
        waiting = self.txn.pop(page, db=self.tables["orphans"])
        children = 0 if waiting is None else unpack_number(waiting)
        self.state.uses += 1
        meta = self._metas[page] = Meta(self.state.uses, 0, children, 0, parent, digest_name(scope.info.tenant))
        scope.pages += 1
        self._changed_scopes.add(scope.info.scope)
        self._count_child(page, meta, +1)
        self.keep(page, meta)
        return meta

    def drop(self, page: bytes, meta: Meta) -> None:
        """Take a page away, whether it may go or not."""
        visible = self.is_visible(page)
        self.count(page, meta, -meta.size_bytes)
        if visible:
            scope = self._scope_of(unpack_prefix(page)[0])
            scope.pages -= 1
            self._changed_scopes.add(scope.info.scope)
            # A flushed parent goes with all its epoch.
            self._count_child(page, meta, -1)
            if meta.children:
                self.txn.put(page, pack_number(meta.children), db=self.tables["orphans"])
        meta.holders += 1
        self.keep(page, meta)
        self._metas[page] = None
        self.txn.delete(page, db=self.tables["pages"])
        self.txn.delete(page, db=self.tables["heads"])
        self.txn.delete(page, db=self.tables["bodies"])
        self.gone_pages += 1
        self.gone_bytes += meta.size_bytes

    def drop_one(self, tenant: bytes = b"") -> bool:
        """Take away a flushed page, else the least recently used that may go; of one tenant, if it is given."""
        page = self._flushed_page(tenant)
        if page is None:
            table = self.tables["lru_tenant" if tenant else "lru"]
            with self.txn.cursor(table) as cursor:
                if not cursor.set_range(tenant) or bytes(cursor.key()[: len(tenant)]) != tenant:
                    return False
                page = bytes(cursor.value())
        meta = self.find(page)
        # Every page that these tables name is stored.
        assert meta is not None
        self.drop(page, meta)
        return True

    def below(self, prefix: bytes, table: str) -> Iterator[bytes]:
        """Keys of a table that begin with `prefix`; each may be deleted before the next."""
        key = prefix
        while True:
            with self.txn.cursor(self.tables[table]) as cursor:
                if not cursor.set_range(key):
                    return
                found = bytes(cursor.key())
            if not found.startswith(prefix):
                return
            yield found
            key = found + b"\0"

    def add_flushed(self, prefixes: Iterable[tuple[bytes, bytes]]) -> None:
        """Note what is to be reclaimed: `pack_prefix`, and the digest of the tenant's name."""
        rows = []
        for prefix, tenant in prefixes:
            self.state.order += 1
            rows.append((pack_number(self.state.order), prefix, tenant))
        with self.txn.cursor(self.tables["flushed"]) as cursor:
            cursor.putmulti([(order, prefix + tenant) for order, prefix, tenant in rows])
        with self.txn.cursor(self.tables["flushed_tenant"]) as cursor:
            cursor.putmulti(sorted((tenant + order, prefix) for order, prefix, tenant in rows))

    def _flushed_page(self, tenant: bytes) -> bytes | None:
        table = "flushed_tenant" if tenant else "flushed"
        for row in self.below(tenant, table):
            packed = self.txn.get(row, db=self.tables[table])
            assert packed is not None
            prefix, owner = bytes(packed[:8]), tenant or bytes(packed[8:])
            for page in self.below(prefix, "pages"):
                return page
            order = row[len(tenant) :]
            self.txn.delete(order, db=self.tables["flushed"])
            self.txn.delete(owner + order, db=self.tables["flushed_tenant"])
            for orphan in self.below(prefix, "orphans"):
                self.txn.delete(orphan, db=self.tables["orphans"])
        return None

    def _count_child(self, page: bytes, meta: Meta, growth: int) -> None:
        number, epoch = unpack_prefix(page)
        if meta.parent == self._scope_of(number).info.scope:
            return
        parent = pack_prefix(number, epoch) + meta.parent
        above = self.find(parent)
        if above:
            above.children += growth
            self.keep(parent, above)
            return
        packed = self.txn.get(parent, db=self.tables["orphans"])
        waiting = growth + (0 if packed is None else unpack_number(packed))
        if waiting:
            self.txn.put(parent, pack_number(waiting), db=self.tables["orphans"])
        else:
            self.txn.delete(parent, db=self.tables["orphans"])

    def _scope_of(self, number: int) -> Scope:
        if number not in self._names:
            name = self.txn.get(pack_number(number), db=self.tables["scope_names"])
            assert name is not None
            self._names[number] = bytes(name)
        scope = self.scope(self._names[number])
        assert scope is not None
        return scope

    def _end_leases(self) -> None:
        """Forget the leases that have ended."""
        for row in self.below(b"", "lease_ends"):
            if unpack_number(row[:8]) > self.now_ns:
                return
            self.end_lease(row[8:])

    def end_lease(self, lease: bytes) -> bytes:
        """Forget one lease; the id of its page, which may be gone."""
        ends = self.txn.pop(lease, db=self.tables["leases"])
        if ends is not None:
            self.txn.delete(bytes(ends) + lease, db=self.tables["lease_ends"])
        page = lease[16:]
        meta = self.find(page)
        if meta:
            meta.holders -= 1
            self.keep(page, meta)
        return page
