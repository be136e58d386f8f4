"""An LMDB environment that is open: its tables, and what may go wrong below them.

LMDB maps its file into memory, so a file that was cut off would end the process at the first read beyond its end.
LMDB itself may leave the file shorter than it says (pages that were freed before they were written), so neither its
length nor LMDB's count of pages tells alone: a change lengthens the file first, and notes how long it was.

A file that was deleted or replaced stays open, and nobody else sees what is written to it: a flush would reach nothing.
Nor do the locks of such a file keep anybody else from writing. So every change looks whether the files are still those
of the folder, and reads look now and then.
"""

import errno
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from cache_store.backends.lmdb_layout import LAYOUT_VERSION, TABLES, State
from cache_store.errors import StoreUnavailableError, StoreVersionError

MAX_READERS = 1024
PLACE_S = 1.0
"""Longest that reads go on in a file that was deleted or replaced."""

_PROBE_BYTES = 2**20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _is_full(path: Path) -> bool:
    """Whether the disk takes no more, a file may not grow, or a quota is used up: LMDB calls all of it an I/O error."""
    probe = path / "probe"
    try:
        with probe.open("wb") as file:
            os.truncate(file.fileno(), (path / "data.mdb").stat().st_size + _PROBE_BYTES)
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        return error.errno in _NO_ROOM
    finally:
        probe.unlink(missing_ok=True)
    return False


FAILURES = (lmdb.Error, OSError, ArithmeticError, AssertionError, LookupError, ValueError, struct.error)
"""What comes of a file, or of counters and lists in it that were altered: those carry no checksums."""


def explain(path: Path, error: Exception) -> StoreUnavailableError:
    """What one of `FAILURES` says of the store in `path`, as an error of ours."""
    if isinstance(error, OSError):
        message, reason = f"{path}: {error.strerror}", "full" if error.errno in _NO_ROOM else "io"
    elif not isinstance(error, lmdb.Error):
        message = f"{path} is damaged ({type(error).__name__}: {error}); delete the folder: the store fills again"
        reason = "io"
    elif isinstance(error, lmdb.MapFullError):
        message, reason = f"{path} has reached map_bytes; make it larger, or the budget smaller", "full"
    elif isinstance(error, lmdb.MapResizedError):
        message = f"{path} is larger than map_bytes: another process opened it with more; give all the same"
        reason = "full"
    elif isinstance(error, lmdb.DiskError) or error.code in _NO_ROOM or (error.code == errno.EIO and _is_full(path)):
        message, reason = f"no room on the disk of {path}", "full"
    elif "already open in this process" in str(error):
        message, reason = f"{path} is already open in this process; share that backend", "refused"
    else:
        message = f"{path} cannot be used ({error}); if it stays so, delete the folder: the store fills again"
        reason = "io"
    return StoreUnavailableError(message, reason)


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Turn failures into errors of ours."""
    try:
        yield
    except FAILURES as error:
        raise explain(path, error) from error


class Environment:
    """The files of a store, open.

    Args:
        path: the folder.
        map_bytes: largest size of the file; address space only, the file grows as it is used.
    """

    def __init__(self, path: Path, map_bytes: int) -> None:
        self._path = path
        self._data, self._lock = path / "data.mdb", path / "lock.mdb"
        with plain_errors(path):
            self.env = lmdb.open(
                str(path),
                map_size=map_bytes,
                mode=0o600,
                max_dbs=len(TABLES),
                max_readers=MAX_READERS,
                max_spare_txns=8,
                # A crash of the machine may undo the last change, and leaves the rest whole.
                metasync=False,
                # Reading ahead of random reads only fills memory.
                readahead=False,
            )
            self._fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
            self._identities = self._look_at_files(os.fstat(self._fd))
        self._look_at_place_s = time.monotonic() + PLACE_S
        self.is_lost = False
        """Whether the files were found to be deleted or replaced."""
        self.tables: dict[str, lmdb._Database] = {}
        self._found_bytes = self._longest = 0

    def begin(self) -> "lmdb.Transaction[memoryview]":
        """A transaction that writes, on a file that is as long as LMDB takes it to be; waits for other writers.

        Raises:
            StoreUnavailableError: the file was cut off, deleted or replaced meanwhile.
        """
        # LMDB reads the first pages at once.
        self._check_length()
        txn = self.env.begin(write=True, buffers=True)
        try:
            self._check_place()
            self._lengthen()
        except BaseException:
            txn.abort()
            raise
        return txn

    def view(self) -> "lmdb.Transaction[memoryview]":
        """A transaction that reads, without copies; its own table is that of bodies.

        Raises:
            StoreUnavailableError: the file was cut off, deleted or replaced meanwhile.
        """
        self._check_for_reading()
        try:
            return self.env.begin(self.tables["bodies"], buffers=True)
        except lmdb.ReadersFullError:
            self.env.reader_check()
            return self.env.begin(self.tables["bodies"], buffers=True)

    def look(self) -> "lmdb.Transaction[bytes]":
        """A transaction that reads and copies all that it reads; its own table is that of heads. Errors as `view`."""
        self._check_for_reading()
        try:
            return self.env.begin(self.tables["heads"])
        except lmdb.ReadersFullError:
            self.env.reader_check()
            return self.env.begin(self.tables["heads"])

    def prepare(self, txn: "lmdb.Transaction[memoryview]", boot_id: str) -> bool:
        """Open the tables, make those of a new store; whether the store was last used before the machine started.

        Raises:
            StoreVersionError: another version's layout.
            StoreUnavailableError: the file was cut off.
        """
        try:
            return self._prepare(txn, boot_id)
        except BaseException:
            # As it was found, so that the next one to open it finds the same fault.
            os.truncate(self._path / "data.mdb", self._found_bytes)
            raise

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        # Several times faster than asking for all that is known of the file.
        return os.lseek(self._fd, 0, os.SEEK_END)

    def replace_with_copy(self) -> None:
        """Close, and put a copy without free pages in the file's place, whole or not at all."""
        copy = self._path / "compact"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o700)
        try:
            self.env.copy(str(copy), compact=True)
            with (copy / "data.mdb").open("rb") as file:
                os.fchmod(file.fileno(), 0o600)
                os.fsync(file.fileno())
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        finally:
            self.close()
        (copy / "data.mdb").replace(self._path / "data.mdb")
        shutil.rmtree(copy)

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._fd)
        self.env.close()

    def _prepare(self, txn: "lmdb.Transaction[memoryview]", boot_id: str) -> bool:
        meta = self.env.open_db(b"meta", txn=txn)
        found = txn.get(b"layout", db=meta)
        version = LAYOUT_VERSION if found is None else int.from_bytes(found, "big")
        if version != LAYOUT_VERSION:
            message = f"the store {self._path} has layout {version}, this Crossfill has layout {LAYOUT_VERSION}"
            raise StoreVersionError(
                f"{message}: delete the folder (the store fills again), or use the Crossfill that wrote it"
            )
        if found is None:
            txn.put(b"layout", LAYOUT_VERSION.to_bytes(4, "big"), db=meta)
        packed = txn.get(b"state", db=meta)
        if packed is not None and self._found_bytes < State.unpack(packed).file_bytes:
            self._refuse_cut()
        for name in TABLES:
            self.tables[name] = self.env.open_db(name.encode(), txn=txn)
        before = txn.get(b"boot", db=meta)
        if before is not None and bytes(before) == boot_id.encode():
            return False
        txn.put(b"boot", boot_id.encode(), db=meta)
        return before is not None

    def _lengthen(self) -> None:
        # Under the writers' lock: an earlier look may be older than another process's last change.
        found = self._found_bytes = self._check_length()
        needed = (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]
        if found < needed:
            # Safe, for no other process writes now.
            os.truncate(self._path / "data.mdb", needed)
            self._longest = needed

    def _check_for_reading(self) -> None:
        self._check_length()
        if time.monotonic() >= self._look_at_place_s:
            self._check_place()
            self._look_at_place_s = time.monotonic() + PLACE_S

    def _check_place(self) -> None:
        try:
            self.is_lost = self._look_at_files(self._data.stat()) != self._identities
        except (FileNotFoundError, NotADirectoryError):
            self.is_lost = True
        if self.is_lost:
            message = f"the store {self._path} was deleted or replaced while it was open"
            raise StoreUnavailableError(f"{message}; try again: the next call opens what is there now", "io")

    def _look_at_files(self, data: os.stat_result) -> tuple[int, int, int]:
        """What tells these files from any others: both are on one disk."""
        return data.st_dev, data.st_ino, self._lock.stat().st_ino

    def _check_length(self) -> int:
        # In this order: another thread may lengthen the file in between.
        longest, found = self._longest, os.lseek(self._fd, 0, os.SEEK_END)
        if found < longest:
            self._refuse_cut()
        self._longest = found
        return found

    def _refuse_cut(self) -> None:
        message = f"the file of {self._path} was cut off; delete the folder and start again: the store fills again"
        raise StoreUnavailableError(message, "io")
