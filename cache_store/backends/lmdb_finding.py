"""Lookups and reads of an LMDB store: as few steps of Python a page as there can be.

Both copy out within one short transaction, so that no page is kept from reuse. Both first take for granted that all
pages are there, intact and alike, check that for all at once, and look at each only if it is not so.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from cache_store.backends.checksum import are_intact
from cache_store.backends.lmdb_layout import unpack_flushes, unpack_scope_prefix
from cache_store.backends.lmdb_page import (
    FindSpan,
    find_spans,
    is_intact,
    unpack_head,
    unpack_sizes,
)
from cache_store.backends.protocol import Found
from cache_store.keys import DIGEST_BYTES

if TYPE_CHECKING:
    import lmdb

    from cache_store.backends.lmdb_change import Tables


Ids = Sequence[bytes]


def look_up(
    txn: "lmdb.Transaction[bytes]", tables: "Tables", scope: bytes, keys: Sequence[bytes]
) -> tuple[Found, Ids, Ids]:
    """See `Backend.lookup`; also the pages that were found, in the order asked, and those that are damaged.

    The transaction's own table is that of heads.
    """
    flushes = unpack_flushes(txn.get(b"state", None, tables["meta"]))
    packed = txn.get(scope, None, tables["scopes"])
    if packed is None:
        return Found([None] * len(keys), flushes, lambda _: {}), (), ()
    prefix = unpack_scope_prefix(packed)
    ids = [prefix + key for key in keys]
    heads = list(map(txn.get, ids))
    there = _all_there(heads)
    if there is not None:
        return _found([head[:DIGEST_BYTES] for head in there], flushes, there), ids, ()
    damaged = [page for page, head in zip(ids, heads, strict=True) if head is not None and not is_intact(head)]
    whole = [head if head is not None and is_intact(head) else None for head in heads]
    pages = [page for page, head in zip(ids, whole, strict=True) if head is not None]
    return _found([head and head[:DIGEST_BYTES] for head in whole], flushes, whole), pages, damaged


def _all_there(heads: Sequence[bytes | None]) -> Sequence[bytes] | None:
    there = cast("Sequence[bytes]", heads)
    try:
        return there if are_intact(there) else None
    except TypeError:
        # None is among them.
        return None


def _found(digests: Sequence[bytes | None], flushes: int, heads: Sequence[bytes | None]) -> Found:
    return Found(digests, flushes, partial(_sizes, heads))


def _sizes(heads: Sequence[bytes | None], index: int) -> Mapping[str, int]:
    head = heads[index]
    return unpack_sizes(head) if head else {}


class Reader:
    """Reads records, and remembers where they lie in bodies with the same list of names."""

    _MOST_LISTS = 1024

    def __init__(self) -> None:
        self._lists: dict[int, dict[str, FindSpan]] = {}

    def read(
        self, txn: "lmdb.Transaction[memoryview]", tables: "Tables", scope: bytes, wanted: Sequence[tuple[bytes, str]]
    ) -> tuple[list[bytes | None], Ids, Ids]:
        """See `Backend.read`; also the pages that were found, in the order asked, and those that are damaged.

        The transaction's own table is that of bodies.
        """
        packed = txn.get(scope, None, tables["scopes"])
        if packed is None or not wanted:
            return [None] * len(wanted), (), ()
        prefix = unpack_scope_prefix(packed)
        ids = [prefix + key for key, _ in wanted]
        if len(set(ids)) == len(ids):
            bodies = list(map(txn.get, ids))
        else:
            by_id = {page: txn.get(page) for page in set(ids)}
            bodies = [by_id[page] for page in ids]
        records = self._cut_alike(bodies, wanted)
        if records is not None:
            return records, ids, ()
        names = [name for _, name in wanted]
        return self._cut_each(txn, tables, list(zip(ids, bodies, names, strict=True)))

    def _cut_alike(
        self, bodies: Sequence[memoryview | None], wanted: Sequence[tuple[bytes, str]]
    ) -> list[bytes | None] | None:
        """All records, if all bodies have the same list of names and it has all that are wanted."""
        first = bodies[0]
        names_id = -1 if first is None else int.from_bytes(first[:8], "little")
        spans = self._lists.get(names_id)
        if spans is None:
            return None
        there = cast("Sequence[memoryview]", bodies)
        try:
            found = [spans[name](body) for body, (_, name) in zip(there, wanted, strict=True)]
        except (KeyError, TypeError, struct.error):
            # No such name, None among the bodies, or one that is too short.
            return None
        pairs = zip(there, found, strict=True)
        records = [body[start:end].tobytes() for body, (one, start, end) in pairs if one == names_id]
        return [*records] if len(records) == len(wanted) else None

    def _cut_each(
        self,
        txn: "lmdb.Transaction[memoryview]",
        tables: "Tables",
        wanted: Sequence[tuple[bytes, memoryview | None, str]],
    ) -> tuple[list[bytes | None], Ids, Ids]:
        """Each record by its page's own list of names."""
        records: list[bytes | None] = []
        damaged: dict[bytes, None] = {}
        for page, body, name in wanted:
            spans = None if body is None else self._list_of(txn, tables, page, body)
            find = spans.get(name) if spans else None
            records.append(None if body is None or find is None else _cut(body, find))
            # A head without a body, or of another list, is damage; neither is a page that is not there.
            if spans is None and txn.get(page, None, tables["heads"]) is not None:
                damaged[page] = None
        return records, [page for page, body, _ in wanted if body is not None], list(damaged)

    def _list_of(
        self, txn: "lmdb.Transaction[memoryview]", tables: "Tables", page: bytes, body: memoryview
    ) -> dict[str, FindSpan] | None:
        """How to find each record of a body; None if head and body do not fit."""
        names_id = int.from_bytes(body[:8], "little")
        spans = self._lists.get(names_id)
        if spans is None:
            packed = txn.get(page, None, tables["heads"])
            head = None if packed is None else unpack_head(packed)
            if head is None or head.names_id != names_id:
                return None
            if len(self._lists) >= self._MOST_LISTS:
                self._lists.clear()
            spans = self._lists[names_id] = find_spans(head)
        return spans


def _cut(body: memoryview, find: FindSpan) -> bytes:
    try:
        _, start, end = find(body)
    except struct.error:
        # Cut off. Nothing is not intact either, so its reader has it taken away.
        return b""
    return body[start:end].tobytes()
