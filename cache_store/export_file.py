"""Pages in a file, to carry from one store to another.

The file is a magic number and frames: kind (1 byte), length (4 bytes, little-endian), that many bytes, and a checksum
of 16 bytes over the frame and the checksum before it, so that no frame can be altered, moved or left out unseen. Frames
are a namespace (JSON), for the pages behind it; a page; and the end, which counts the pages. A name that ends in `.zst`
makes the whole of it one Zstandard stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cache_store.backends.protocol import PageWrite, ScopeInfo
from cache_store.errors import ExportFileError
from cache_store.keys import DIGEST_BYTES, KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAGIC = b"CrossfillStore\x00\x01"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME = struct.Struct("<BI")
_PAGE = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{DIGEST_BYTES}sH")
_RECORD = struct.Struct("<HI")
_COUNT = struct.Struct("<Q")
_CHECKSUM_BYTES = 16
# Far above any page. What claims to be larger is no frame, and a small compressed file cannot become a large one.
_MOST_FRAME_BYTES = 2**28


class _Frame(IntEnum):
    SCOPE = 1
    PAGE = 2
    END = 3


def write_export(path: Path, pages: Iterable[tuple[ScopeInfo, PageWrite]]) -> int:
    """Write pages in their order into `path`, which is there when all of it is; how many.

    Raises:
        ExportFileError: the file cannot be written, what is there is no regular file, or `read_export` would refuse it.
    """
    handle, name = -1, ""
    try:
        # A file takes the place of what is there, so a link, a pipe or a device would be lost.
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise ExportFileError(f"{path}: is there and is no regular file; name another")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as raw:
            with _compressing(path, raw) as file:
                count = _write_frames(path, file, pages)
            raw.flush()
            os.fsync(raw.fileno())
        Path(name).replace(path)
    except OSError as error:
        raise ExportFileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if name:
            Path(name).unlink(missing_ok=True)
    return count


def read_export(path: Path) -> Iterator[tuple[ScopeInfo, PageWrite]]:
    """The pages of `path`, each when its frame was found right; the whole is right when the iterator ends.

    Raises:
        ExportFileError: the file cannot be read, or is not what `write_export` wrote.
    """
    try:
        with path.open("rb") as raw, _decompressing(path, raw) as file:
            yield from _read_frames(path, file)
    except OSError as error:
        raise ExportFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _write_frames(path: Path, file: BinaryIO, pages: Iterable[tuple[ScopeInfo, PageWrite]]) -> int:
    file.write(MAGIC)
    checksum, scope, count = b"", None, 0

    def write(kind: _Frame, data: bytes) -> None:
        nonlocal checksum
        if len(data) > _MOST_FRAME_BYTES:
            raise ExportFileError(f"{path}: {len(data)} bytes of one page are more than an export can hold")
        checksum = _checksum(checksum, kind, data)
        file.write(_FRAME.pack(kind, len(data)) + data + checksum)

    for info, page in pages:
        if info != scope:
            scope = info
            try:
                _check_scope(info)
            except ValueError as error:
                raise ExportFileError(f"{path}: cannot hold the namespace {info.scope.hex()}: {error}") from None
            write(_Frame.SCOPE, _pack_scope(info))
        write(_Frame.PAGE, _pack_page(page))
        count += 1
    write(_Frame.END, _COUNT.pack(count))
    return count


def _read_frames(path: Path, file: BinaryIO) -> Iterator[tuple[ScopeInfo, PageWrite]]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ExportFileError(f"{path}: is no export of this version of Crossfill")
    scope, count, checksum = None, 0, b""
    while True:
        kind, data, checksum = _read_frame(path, file, checksum)
        try:
            if kind == _Frame.END:
                break
            if kind == _Frame.SCOPE:
                scope = _unpack_scope(data)
                continue
            page = _unpack_page(data)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ExportFileError(f"{path}: frame behind page {count} cannot be understood: {error!r}") from error
        if scope is None:
            raise ExportFileError(f"{path}: has a page without a namespace")
        count += 1
        yield scope, page
    if data != _COUNT.pack(count) or file.read(1):
        raise ExportFileError(f"{path}: does not end where it says that it ends")


def _read_frame(path: Path, file: BinaryIO, before: bytes) -> tuple[_Frame, bytes, bytes]:
    head = _read_whole(path, file, _FRAME.size)
    number, length = _FRAME.unpack(head)
    if number not in set(_Frame) or length > _MOST_FRAME_BYTES:
        raise ExportFileError(f"{path}: was altered since it was written")
    kind, data = _Frame(number), _read_whole(path, file, length)
    checksum = _read_whole(path, file, _CHECKSUM_BYTES)
    if checksum != _checksum(before, kind, data):
        raise ExportFileError(f"{path}: was altered since it was written")
    return kind, data, checksum


def _read_whole(path: Path, file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ExportFileError(f"{path}: is cut off")
    return data


def _checksum(before: bytes, kind: _Frame, data: bytes) -> bytes:
    digest = hashlib.blake2b(before, digest_size=_CHECKSUM_BYTES, person=b"crossfill-export")
    digest.update(_FRAME.pack(kind, len(data)))
    digest.update(data)
    return digest.digest()


def _pack_scope(info: ScopeInfo) -> bytes:
    fields = {"scope": info.scope.hex(), "tenant": info.tenant, "model": info.model, "revision": info.revision}
    return json.dumps(fields).encode()


def _unpack_scope(data: bytes) -> ScopeInfo:
    fields = json.loads(data)
    info = ScopeInfo(bytes.fromhex(fields["scope"]), fields["tenant"], fields["model"], fields["revision"])
    _check_scope(info)
    return info


def _check_scope(info: ScopeInfo) -> None:
    """Raise ValueError for a namespace that no store should be given."""
    if len(info.scope) != KEY_BYTES:
        raise ValueError(f"want a scope of {KEY_BYTES} bytes, got {len(info.scope)}")
    for text in (info.tenant, info.model, info.revision):
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"tenant, model and revision must be printable text, {text!r} is not")


def _pack_page(page: PageWrite) -> bytes:
    parts = [_PAGE.pack(page.key, page.parent, page.tokens_digest, len(page.records))]
    for name, data in page.records.items():
        parts += (_RECORD.pack(len(name.encode()), len(data)), name.encode(), data)
    return b"".join(parts)


def _unpack_page(data: bytes) -> PageWrite:
    key, parent, digest, count = _PAGE.unpack_from(data)
    if parent == key:
        raise ValueError("the page is its own parent, so it could never be evicted")
    records, at = {}, _PAGE.size
    for _ in range(count):
        name_bytes, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        name = data[at : at + name_bytes].decode()
        records[name] = data[at + name_bytes : at + name_bytes + size]
        at += name_bytes + size
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, records end at {at}")
    return PageWrite(key, parent, digest, records)


@contextmanager
def _compressing(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if path.suffix != ".zst":
        yield raw
        return
    try:
        import zstandard
    except ImportError as error:
        raise ExportFileError(f"{path}: needs the package zstandard; or give a name without .zst") from error
    with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as file:
        yield file


@contextmanager
def _decompressing(path: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    is_compressed = raw.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
    raw.seek(0)
    if not is_compressed:
        yield raw
        return
    try:
        import zstandard
    except ImportError as error:
        raise ExportFileError(f"{path}: is compressed, which needs the package zstandard") from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw, closefd=False) as file:
            yield file
    except zstandard.ZstdError as error:
        raise ExportFileError(f"{path}: was altered since it was written: {error}") from error
