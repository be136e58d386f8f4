"""Pages in a folder, shared by the processes of one machine: the default store.

What an operation may wait for: reads take no lock. Changes wait for LMDB's writers' lock in a thread of their own and
are given up at the deadline. Only `scan` and `compact` may take longer, and `evict`, which works in steps of a bounded
number of pages, each within the deadline. Use is remembered in memory and written with the next change, by age or by
count, so that a lookup changes nothing on disk; a process that dies loses what it had not written.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from cache_store.backends import lmdb_flush, lmdb_pages
from cache_store.backends.arguments import check_info, check_pool, check_text, check_ttl
from cache_store.backends.lmdb_change import Change
from cache_store.backends.lmdb_environment import Environment, plain_errors
from cache_store.backends.lmdb_finding import Reader, look_up
from cache_store.backends.lmdb_folder import Folder, read_pid_namespace
from cache_store.backends.lmdb_gate import Gate
from cache_store.backends.lmdb_page import pack_page
from cache_store.backends.lmdb_reading import View
from cache_store.backends.lmdb_recent import Recent
from cache_store.backends.lmdb_writer import Writer
from cache_store.backends.options import read_count, read_options
from cache_store.backends.protocol import (
    AnchorPool,
    AnchorPut,
    BackendStats,
    Found,
    Limits,
    PageWrite,
    Published,
    Reclaimed,
    ScopeInfo,
)
from cache_store.errors import StoreError, StoreUnavailableError, StoreUrlError

if TYPE_CHECKING:
    import lmdb

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

MAP_BYTES = 64 * 2**30
"""Largest file by default: address space, not disk."""

_EVICT_PAGES, _SCAN_PAGES = 1000, 64
_READER_CHECK_CHANGES = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boottime() -> float:
    """Seconds since the machine started, sleep included; no change of the date touches them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_boot_id() -> str:
    """What tells one start of the machine from another; empty where the system has none."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


class LmdbBackend:
    """A store in a folder of a local disk.

    Args:
        path: the folder; made if it is not there.
        map_bytes: largest size of its file; the same for all processes.
        deadline_s: longest that an operation waits.
        clock: seconds since the machine started, by which leases end.
        boot_id: of the machine: timed leases of another start are void.
        pid_namespace: number of this process's; None to ask the system.

    Raises:
        ForeignProcessError: processes of another PID namespace have it open.
        StoreVersionError: another version of Crossfill made it.
        StoreUnavailableError: it cannot be opened, with the reason.
    """

    def __init__(
        self,
        path: Path,
        *,
        map_bytes: int = MAP_BYTES,
        deadline_s: float = 1.0,
        clock: Callable[[], float] = read_boottime,
        boot_id: str | None = None,
        pid_namespace: int | None = None,
    ) -> None:
        self._path, self._map_bytes, self._deadline_s, self._clock = path, map_bytes, deadline_s, clock
        self._boot_id = read_boot_id() if boot_id is None else boot_id
        self._gate, self._recent, self._reader, self._changes = Gate(path), Recent(), Reader(), 0
        self._pid_namespace = read_pid_namespace() if pid_namespace is None else pid_namespace
        self._open_folder()

    @classmethod
    def from_url(cls, url: str, *, deadline_s: float = 1.0) -> "LmdbBackend":
        """Open `lmdb:///folder`, with `?map_bytes=N` for another largest size."""
        parts = urlsplit(url)
        if parts.netloc or not parts.path.strip("/"):
            raise StoreUrlError(f"a store in a folder is written lmdb:///absolute/path, not {url!r}")
        options = read_options(parts.query, {"map_bytes"})
        map_bytes = read_count(options, "map_bytes", MAP_BYTES)
        return cls(Path(unquote(parts.path)), map_bytes=map_bytes, deadline_s=deadline_s)

    def lookup(self, scope: bytes, keys: Sequence[bytes]) -> Found:
        """See `Backend.lookup`."""
        self._require_place()
        with self._gate, self._environment.look() as txn:
            found, seen, damaged = look_up(txn, self._environment.tables, scope, keys)
        if self._recent.add(seen, damaged):
            self._write_recent()
        return found

    def read(self, scope: bytes, wanted: Sequence[tuple[bytes, str]]) -> list[bytes | None]:
        """See `Backend.read`."""
        self._require_place()
        with self._gate, self._environment.view() as txn:
            records, seen, damaged = self._reader.read(txn, self._environment.tables, scope, wanted)
        if self._recent.add(seen, damaged):
            self._write_recent()
        return records

    def publish(
        self, info: ScopeInfo, pages: Sequence[PageWrite], limits: Limits, flushes: int | None = None
    ) -> Published:
        """See `Backend.publish`."""
        check_info(info)
        # Packed here, not while the writers' lock is held.
        packed = [(page, pack_page(page.tokens_digest, page.records)) for page in pages]
        return self._change(lambda change: lmdb_pages.publish(change, info, packed, limits, flushes))

    def lease(self, scope: bytes, keys: Sequence[bytes], holder: str, ttl_s: float | None) -> int:
        """See `Backend.lease`."""
        check_text("holder", holder)
        check_ttl(ttl_s)
        return self._change(lambda change: lmdb_pages.lease(change, scope, keys, holder, ttl_s))

    def release(self, holder: str) -> int:
        """See `Backend.release`."""
        check_text("holder", holder)
        return self._change(lambda change: lmdb_pages.release(change, holder))

    def flush(self, *, tenant: str | None = None, model: str | None = None, revision: str | None = None) -> Reclaimed:
        """See `Backend.flush`. Leases of what it makes invisible end; anchors go at once.

        One that has got the writers' lock is made even if it takes longer than the deadline.
        """
        asked = {"tenant": tenant, "model": model, "revision": revision}
        wanted = {name: value for name, value in asked.items() if value is not None}
        for name, value in wanted.items():
            check_text(name, value)
        return self._change(lambda change: lmdb_flush.flush(change, wanted), lasting=True)

    def evict(self, size_bytes: int) -> Reclaimed:
        """See `Backend.evict`. In steps of 1,000 pages, each of which is atomic and has the deadline."""
        pages = freed = 0
        while freed < size_bytes:
            step = self._change(partial(lmdb_pages.evict, size_bytes=size_bytes - freed, most_pages=_EVICT_PAGES))
            pages, freed = pages + step.pages, freed + step.size_bytes
            if step.pages < _EVICT_PAGES:
                break
        if pages:
            # LMDB uses free pages again from the change after the next.
            self._write_recent()
        return Reclaimed(pages, freed)

    def quarantine(self, scope: bytes, key: bytes, name: str) -> bool:
        """See `Backend.quarantine`."""
        return self._change(lambda change: lmdb_pages.quarantine(change, scope, key, name))

    def stats(self) -> BackendStats:
        """See `Backend.stats`."""
        return self._view(lambda view: view.stats(self._now_ns()))

    def scan(self) -> Iterator[tuple[ScopeInfo, PageWrite]]:
        """See `Backend.scan`. The pages of when it begins, less those that go meanwhile."""
        for scope in self._view(View.scopes):
            pages = self._view(partial(View.ordered, scope=scope))
            for start in range(0, len(pages), _SCAN_PAGES):
                some = pages[start : start + _SCAN_PAGES]
                yield from self._view(partial(View.whole, info=scope.info, pages=some))

    def compact(self) -> Reclaimed:
        """Write the store anew without its free pages, and put that in its place. Takes as long as the copy does.

        The file can only be replaced while no other process has it open, so it is refused otherwise; this process's
        own operations are refused meanwhile.

        Raises:
            StoreUnavailableError: `refused` if others have it open, `full` if there is no room for the copy.
        """
        self._gate.check_process()
        self._require_place()
        with plain_errors(self._path), self._folder.guard(), self._gate.shut(self._deadline_s):
            if not self._folder.is_alone():
                message = f"other processes have {self._path} open; compact it when they have stopped"
                raise StoreUnavailableError(message, "refused")
            before = self._environment.file_bytes
            self._writer.change(partial(self._make, _forget_length), self._deadline_s)
            if not self._writer.stop(self._deadline_s):
                raise StoreUnavailableError(f"a change of {self._path} is still being written", "timeout")
            try:
                self._environment.replace_with_copy()
            finally:
                self._open()
            return Reclaimed(0, max(0, before - self._environment.file_bytes))

    def put_anchor(self, pool: AnchorPool, identity: str, data: bytes) -> AnchorPut:
        """See `Backend.put_anchor`. A replaced anchor keeps its age and its uses."""
        check_pool(pool, identity)
        return self._change(lambda change: lmdb_pages.put_anchor(change, pool, identity, data))

    def anchors(self, pool: AnchorPool) -> dict[str, bytes]:
        """See `Backend.anchors`."""
        check_pool(pool)
        return self._view(lambda view: view.anchors(pool))

    def quarantine_anchor(self, pool: AnchorPool, identity: str) -> bool:
        """See `Backend.quarantine_anchor`."""
        check_pool(pool, identity)
        return self._change(lambda change: lmdb_pages.quarantine_anchor(change, pool, identity))

    def use_anchors(self, pool: AnchorPool, identities: Sequence[str]) -> None:
        """See `Backend.use_anchors`. Anchors that are gone are left out."""
        check_pool(pool, *identities)
        self._change(lambda change: lmdb_pages.use_anchors(change, pool, identities))

    def close(self) -> None:
        """See `Backend.close`. What a hung disk or another process keeps from ending is left to the process's end."""
        if not self._gate.is_own() or not self._gate.close(self._deadline_s):
            return
        self._write_recent()
        self._let_go()

    def _open_folder(self) -> None:
        self._folder = Folder(self._path, pid_namespace=self._pid_namespace, deadline_s=self._deadline_s)
        try:
            with self._folder.guard():
                self._open()
        except BaseException:
            self._folder.close()
            raise
        self._is_held = True

    def _let_go(self) -> None:
        """Of the files; of a hung disk's only the lock that shows who has them open."""
        if self._is_held:
            self._is_held = False
            if self._writer.stop(self._deadline_s):
                self._environment.close()
            self._folder.close()

    def _require_place(self) -> None:
        """Open what is at the path now, if what was open turned out to be deleted or replaced."""
        if self._environment.is_lost or not self._is_held:
            self._open_again()

    def _open_again(self) -> None:
        self._gate.check_process()
        with self._gate.shut(self._deadline_s):
            if self._is_held and not self._environment.is_lost:
                # Another thread was here before.
                return
            self._let_go()
            # What was used, and what damaged, is not what lies there now.
            self._recent = Recent()
            try:
                self._open_folder()
            except StoreUnavailableError:
                raise
            except StoreError as error:
                # Users of an open store expect nothing else.
                raise StoreUnavailableError(str(error), "io") from error
        _LOG.warning("the store %s was deleted or replaced while it was open, and is opened again", self._path)

    def _open(self) -> None:
        environment = Environment(self._path, self._map_bytes)
        self._environment = environment
        self._writer = Writer(environment.begin, self._write_recent_if_old, Recent.AGE_S)

        def prepare(txn: "lmdb.Transaction[memoryview]") -> None:
            restarted = environment.prepare(txn, self._boot_id)
            change = Change(txn, environment.tables, 0 if restarted else self._now_ns())
            if restarted:
                lmdb_pages.end_timed_leases(change)
            change.finish()

        try:
            with plain_errors(self._path):
                self._writer.change(prepare, self._deadline_s)
                environment.env.reader_check()
        except BaseException:
            if self._writer.stop(self._deadline_s):
                environment.close()
            raise

    def _view(self, look: Callable[[View], T]) -> T:
        self._require_place()
        with self._gate, self._environment.view() as txn:
            view = View(txn, self._environment.tables)
            found = look(view)
        if view.damaged and self._recent.add((), view.damaged):
            self._write_recent()
        return found

    def _change(self, change: Callable[[Change], T], *, lasting: bool = False) -> T:
        self._require_place()
        with self._gate:
            return self._writer.change(partial(self._make, change), self._deadline_s, lasting=lasting)

    def _make(self, make: Callable[[Change], T], txn: "lmdb.Transaction[memoryview]") -> T:
        self._changes += 1
        if self._changes % _READER_CHECK_CHANGES == 0:
            self._environment.env.reader_check()
        change = Change(txn, self._environment.tables, self._now_ns())
        change.state.file_bytes = self._environment.file_bytes
        used, damaged = self._recent.take()
        for page in damaged:
            lmdb_pages.take_damaged(change, page)
        change.use(used)
        change.gone_pages = change.gone_bytes = 0
        result = make(change)
        change.finish()
        return result

    def _write_recent(self) -> None:
        self._writer.post(partial(self._make, lambda _: None))

    def _write_recent_if_old(self) -> None:
        if self._recent.is_old():
            self._write_recent()

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)


def _forget_length(change: Change) -> None:
    # A compacted file is shorter, and was not cut off.
    change.state.file_bytes = 0
