"""The file in shared memory that holds a pool: made whole or not at all, opened only if it is what is asked for.

Layout: a page of header and counts; uint64 [S] words and uint64 [S] sequences of the slots; from the next page on the
slots' data; behind it float32 [S, 64] scales, for uint8. The header never changes once the file has a name.
"""

import errno
import mmap
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from cache_store.errors import StoreFullError, StoreUnavailableError, StoreUrlError, StoreVersionError
from cache_store.keys import PAGE
from cache_store.pool.geometry import Geometry, SlotArrays, SlotType
from cache_store.pool.locks import SegmentLocks
from cache_store.pool.table import SlotTable

LAYOUT_VERSION = 1
_MAGIC = b"CfPool\x00\x00"
# magic, layout version, place of the slots' type in `_TYPES`, number of slots, id
_HEADER = struct.Struct("<8sIIQQ")
_CHECKSUM = struct.Struct("<I")
_TYPES = tuple(SlotType)
_PAGE_BYTES, _WORD_BYTES = 4096, 8
_COUNTS_AT, _COUNTS = 1024, 64


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        geometry: size and type.
        pool: id, random; never 0.
    """

    geometry: Geometry
    pool: int


@dataclass(frozen=True, eq=False)
class Segment:
    """An open pool file, with a seat taken.

    Attributes:
        path: where it is.
        header: what it is.
        locks: its locks.
        seat: which seat this process has.
        memory: the mapping that `table` and `storage` lie in.
        table: the slots' states.
        storage: the slots.
    """

    path: Path
    header: Header
    locks: SegmentLocks
    seat: int
    memory: mmap.mmap
    table: SlotTable
    storage: SlotArrays


def size_bytes(geometry: Geometry) -> int:
    """Bytes of the file of such a pool."""
    return _data_at(geometry) + geometry.slots * geometry.slot_bytes


def open_segment(path: Path, geometry: Geometry, deadline_s: float) -> Segment:
    """Open the pool of this name, or make it if there is none, and take a seat.

    One of another geometry that nobody has open is replaced.

    Raises:
        StoreFullError: no room for it in the folder.
        StoreUrlError: others have it open with another geometry, or the folder cannot hold a pool.
        StoreVersionError: what is there is no pool of this version.
        StoreUnavailableError: it cannot be opened or locked.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        with _system_errors(path):
            segment = _attach(path, geometry, deadline_s)
            if segment:
                return segment
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(f"{path} is made and removed again and again", "timeout")
            # Its memory is taken whole, which for a large pool is seconds: nobody else is waited for in these.
            began = time.monotonic()
            _create(path, geometry)
            deadline += time.monotonic() - began


def remove_if_abandoned(path: Path, deadline_s: float) -> bool:
    """Remove a pool of this version that no living process has open; whether it did.

    Raises:
        StoreVersionError: what is there is no pool of this version.
        StoreUnavailableError: it cannot be opened or locked.
    """
    with _system_errors(path):
        file = _open(path)
        if file is None:
            return False
        locks = SegmentLocks(file, deadline_s)
        try:
            with locks.exclusive():
                _read_header(file, path)
                if locks.is_shared() or not os.fstat(file.fileno()).st_nlink:
                    return False
                path.unlink()
                return True
        finally:
            locks.close()


def remove(segment: Segment) -> None:
    """Remove the name of an open pool, unless it stands for another one by now.

    Raises:
        StoreUnavailableError: it cannot be locked or removed.
    """
    with _system_errors(segment.path), segment.locks.exclusive(), suppress(FileNotFoundError):
        with FileIO(segment.path) as file:
            if file.read(_HEADER.size) != _pack(segment.header):
                return
        segment.path.unlink()


def _attach(path: Path, geometry: Geometry, deadline_s: float) -> Segment | None:
    file = _open(path)
    if file is None:
        return None
    locks, segment = SegmentLocks(file, deadline_s), None
    try:
        with locks.exclusive():
            segment = _take(path, file, geometry, locks)
        return segment
    finally:
        if segment is None:
            locks.close()


def _take(path: Path, file: FileIO, geometry: Geometry, locks: SegmentLocks) -> Segment | None:
    header = _read_header(file, path)
    # What has the path by now is not what was opened.
    if not os.fstat(file.fileno()).st_nlink:
        return None
    if header.geometry == geometry:
        return _map(path, header, locks)
    if locks.is_shared():
        raise StoreUrlError(
            f"{path} is a block pool of {_say(header.geometry)} in use, not of {_say(geometry)}; "
            "give all processes the same settings, or stop those that use it"
        )
    path.unlink()
    return None


def _map(path: Path, header: Header, locks: SegmentLocks) -> Segment | None:
    # mmap duplicates the descriptor it is given, so it gets one of its own: a child that inherits the mapping must not
    # share the description that has the locks.
    file = _open(path)
    if file is None:
        return None
    with file:
        if _read_header(file, path) != header:
            return None
        memory = mmap.mmap(file.fileno(), size_bytes(header.geometry))
    geometry, slots = header.geometry, header.geometry.slots
    counts = np.frombuffer(memory, np.uint64, _COUNTS, _COUNTS_AT)
    words = np.frombuffer(memory, np.uint64, slots, _PAGE_BYTES)
    sequences = np.frombuffer(memory, np.uint64, slots, _PAGE_BYTES + _WORD_BYTES * slots)
    data_at, elements = _data_at(geometry), slots * PAGE * PAGE
    blocks = np.frombuffer(memory, geometry.dtype.numpy, elements, data_at).reshape(slots, PAGE, PAGE)
    scales = None
    if geometry.scaled:
        scales = np.frombuffer(memory, np.float32, slots * PAGE, data_at + elements).reshape(slots, PAGE)
    table = SlotTable(words, sequences, counts)
    seat = locks.take_seat()
    # Whoever had the seat before is gone; what it left unpublished must not pass as ours.
    table.recover(table.written_by(seat))
    return Segment(path, header, locks, seat, memory, table, SlotArrays(blocks, scales))


def _create(path: Path, geometry: Geometry) -> None:
    """Make the file without a name, whole, and then give it its name, unless another process was faster."""
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOTDIR}:
            raise StoreUrlError(
                f"{path.parent} cannot hold a block pool; want a folder in memory, as /dev/shm"
            ) from error
        raise
    with FileIO(descriptor, "r+") as file:
        # A page that has no memory yet would end the process that touches it when there is none left.
        os.posix_fallocate(descriptor, 0, size_bytes(geometry))
        header = _pack(Header(geometry, secrets.randbelow(2**64 - 1) + 1))
        file.write(header + _CHECKSUM.pack(zlib.crc32(header)))
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With a folder given, Python calls linkat with AT_SYMLINK_FOLLOW, as open(2) advises for such files.
            with suppress(FileExistsError):
                os.link(f"/proc/self/fd/{descriptor}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)


def _open(path: Path) -> FileIO | None:
    try:
        # Names in /dev/shm are anyone's to take; a link must not lead elsewhere, nor a pipe make us wait.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    file = FileIO(descriptor, "r+")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        file.close()
        raise StoreUnavailableError(f"{path} is not a file of this user alone; remove it or choose a name", "refused")
    return file


def _read_header(file: FileIO, path: Path) -> Header:
    data = os.pread(file.fileno(), _HEADER.size + _CHECKSUM.size, 0)
    if len(data) < _HEADER.size + _CHECKSUM.size or not data.startswith(_MAGIC):
        raise StoreVersionError(f"{path} is no block pool; remove it or choose another name")
    _, version, place, slots, pool = _HEADER.unpack_from(data)
    if version != LAYOUT_VERSION:
        raise StoreVersionError(f"{path} has layout {version}, this is layout {LAYOUT_VERSION}; remove it")
    if place >= len(_TYPES) or _CHECKSUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise StoreVersionError(f"{path} is damaged; remove it")
    header = Header(Geometry(slots, _TYPES[place]), pool)
    # Memory mapped beyond the end of a file ends the process that touches it.
    if os.fstat(file.fileno()).st_size != size_bytes(header.geometry):
        raise StoreVersionError(f"{path} is not as long as it says; remove it")
    return header


def _pack(header: Header) -> bytes:
    geometry = header.geometry
    return _HEADER.pack(_MAGIC, LAYOUT_VERSION, _TYPES.index(geometry.dtype), geometry.slots, header.pool)


def _data_at(geometry: Geometry) -> int:
    table = _PAGE_BYTES + 2 * _WORD_BYTES * geometry.slots
    return -(-table // _PAGE_BYTES) * _PAGE_BYTES


def _say(geometry: Geometry) -> str:
    return f"{geometry.slots} {geometry.dtype} slots"


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT}:
            raise StoreFullError(
                f"no room for the block pool {path}: {error.strerror}; "
                "make the pool smaller, or the folder larger (containers: --shm-size)"
            ) from error
        reason = "refused" if error.errno in {errno.EACCES, errno.EPERM, errno.ELOOP} else "io"
        raise StoreUnavailableError(f"cannot open the block pool {path}: {error.strerror}", reason) from error
