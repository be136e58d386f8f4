"""LMDB when its disk, its file or its clock lets it down."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import pytest

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.opening import open_backend
from cache_store.backends.protocol import AnchorPool, Limits, PageWrite
from cache_store.errors import RecordFault, RecordRefusedError, StoreUnavailableError, StoreUrlError, StoreVersionError
from cache_store.records import Kind, RecordOf, decode, record_name

from .lmdb_process import SCOPE, digest, true_page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMY = Limits(2**30, 2**30)
PROGRAM = Path(__file__).parent / "lmdb_process.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def fill(folder: Path, pages: int) -> list[PageWrite]:
    """A closed store with a chain of pages."""
    written: list[PageWrite] = []
    for number in range(pages):
        written.append(true_page(str(number), written[-1].key if written else SCOPE.scope))
    backend = LmdbBackend(folder, deadline_s=30)
    backend.publish(SCOPE, written, ROOMY)
    backend.close()
    return written


def large_page(name: str, size_bytes: int = 200_000) -> PageWrite:
    return PageWrite(digest(name)[:16], SCOPE.scope, digest(name), {"kv/0": os.urandom(size_bytes)})


# A filled folder, other versions, other starts of the machine


def test_a_filled_folder_is_there_at_once_when_opened_again(folder: Path) -> None:
    written = fill(folder, 50)
    backend = LmdbBackend(folder, deadline_s=30)
    found = backend.lookup(SCOPE.scope, [page.key for page in written]).digests
    assert all(page is not None for page in found)
    (stats,) = backend.stats().scopes
    assert stats.pages == 50
    assert stats.size_bytes == backend.stats().size_bytes > 0
    backend.close()


def test_another_layout_is_refused_and_left_alone(folder: Path) -> None:
    fill(folder, 1)
    with lmdb.open(str(folder), max_dbs=20) as env:
        table = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"layout", (9).to_bytes(4, "big"), db=table)
    before = (folder / "data.mdb").read_bytes()
    with pytest.raises(StoreVersionError, match="layout 9"):
        LmdbBackend(folder, deadline_s=30)
    assert (folder / "data.mdb").read_bytes() == before


def test_timed_leases_of_another_start_of_the_machine_are_void_and_pins_are_not(folder: Path) -> None:
    timed, pinned = true_page("timed", SCOPE.scope), true_page("pinned", SCOPE.scope)
    backend = LmdbBackend(folder, deadline_s=30, boot_id="first", clock=lambda: 1e6)
    backend.publish(SCOPE, [timed, pinned], ROOMY)
    backend.lease(SCOPE.scope, [timed.key], "reader", 3600)
    backend.lease(SCOPE.scope, [pinned.key], "operator", None)
    backend.close()
    backend = LmdbBackend(folder, deadline_s=30, boot_id="first", clock=lambda: 1e6)
    assert backend.stats().leased_pages == 2
    backend.close()
    backend = LmdbBackend(folder, deadline_s=30, boot_id="second", clock=lambda: 5.0)
    assert backend.stats().leased_pages == 1
    backend.evict(2**30)
    assert [page.key for _, page in backend.scan()] == [pinned.key]
    backend.close()


def test_a_clock_that_jumps_changes_no_order_of_eviction(folder: Path) -> None:
    now_s = [1e6]
    backend = LmdbBackend(folder, deadline_s=30, clock=lambda: now_s[0])
    pages = [true_page(name, SCOPE.scope) for name in "abc"]
    for page, jump in zip(pages, (1e9, -1.5e9, 1e6), strict=True):
        now_s[0] = max(0.0, now_s[0] + jump)
        backend.publish(SCOPE, [page], ROOMY)
    for left in ([1, 2], [2], []):
        backend.evict(1)
        stored = {page.key for _, page in backend.scan()}
        assert stored == {pages[number].key for number in left}
    backend.close()


# A disk without room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, where the rights to mount one are there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system takes rights")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_up(backend: LmdbBackend) -> tuple[list[PageWrite], StoreUnavailableError]:
    """Publish until there is no room; what was stored, and the error."""
    stored: list[PageWrite] = []
    for number in range(100):
        page = large_page(str(number))
        try:
            backend.publish(SCOPE, [page], ROOMY)
        except StoreUnavailableError as error:
            return stored, error
        stored.append(page)
    pytest.fail("it was never full")


def check_holds(backend: LmdbBackend, stored: list[PageWrite]) -> None:
    found = {page.key: dict(page.records) for _, page in backend.scan()}
    assert found == {page.key: page.records for page in stored}
    assert backend.stats().scopes[0].pages == len(stored)


def test_a_full_disk_refuses_and_writes_nothing_half(small_disk: Path) -> None:
    backend = LmdbBackend(small_disk / "store", deadline_s=30)
    stored, error = fill_up(backend)
    assert error.reason == "full"
    assert len(stored) > 5
    check_holds(backend, stored)
    backend.close()
    backend = LmdbBackend(small_disk / "store", deadline_s=30)
    check_holds(backend, stored)
    backend.close()


def test_a_full_map_refuses_and_a_smaller_budget_helps(folder: Path) -> None:
    backend = LmdbBackend(folder, map_bytes=4 * 2**20, deadline_s=30)
    stored, error = fill_up(backend)
    assert error.reason == "full"
    assert "map_bytes" in str(error)
    check_holds(backend, stored)
    backend.evict(2**20)
    assert backend.publish(SCOPE, [large_page("new")], ROOMY).pages == 1
    backend.close()


def test_a_limit_on_the_size_of_files_refuses_like_a_full_disk(folder: Path) -> None:
    LmdbBackend(folder, deadline_s=30).close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
            backend = LmdbBackend(folder, deadline_s=30)
            stored, error = fill_up(backend)
            check_holds(backend, stored)
            status = 0 if error.reason == "full" and stored else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# A file that was altered


def test_a_flipped_byte_of_a_record_is_refused_when_it_is_read(folder: Path) -> None:
    (page,) = fill(folder, 1)
    name = record_name(Kind.MASS, 3)
    with (folder / "data.mdb").open("r+b") as file:
        data = file.read()
        at = data.index(page.records[name]) + 300
        file.seek(at)
        file.write(bytes([data[at] ^ 0x10]))
    backend = LmdbBackend(folder, deadline_s=30)
    (found,) = backend.read(SCOPE.scope, [(page.key, name)])
    assert found is not None
    with pytest.raises(RecordRefusedError) as caught:
        decode(found, RecordOf(Kind.MASS, 3), tokens_digest=page.tokens_digest)
    assert caught.value.fault is RecordFault.CHECKSUM
    assert backend.quarantine(SCOPE.scope, page.key, name)
    assert backend.read(SCOPE.scope, [(page.key, name)]) == [None]
    backend.close()


def test_bytes_flipped_anywhere_never_give_a_wrong_record(folder: Path) -> None:
    fill(folder, 20)
    whole, dice, read, refused = (folder / "data.mdb").read_bytes(), random.Random(7), 0, 0
    check = (
        "import sys; from pathlib import Path; from cache_store.backends.lmdb import LmdbBackend\n"
        "from cache_store.errors import *; from cache_store.records import *\n"
        "count = refused = 0\n"
        "try:\n"
        "    backend = LmdbBackend(Path(sys.argv[1]), deadline_s=30)\n"
        "    for _, page in backend.scan():\n"
        "        for layer in range(10):\n"
        "            try:\n"
        "                data = page.records[record_name(Kind.MASS, layer)]\n"
        "                decode(data, RecordOf(Kind.MASS, layer), tokens_digest=page.tokens_digest)\n"
        "                count += 1\n"
        "            except (RecordRefusedError, KeyError):\n"
        "                refused += 1\n"
        "except StoreError:\n"
        "    pass\n"
        "print(count, refused)\n"
    )
    for _ in range(8):
        altered = bytearray(whole)
        for _ in range(40):
            altered[dice.randrange(2 * 4096, len(altered))] ^= 1 << dice.randrange(8)
        (folder / "data.mdb").write_bytes(altered)
        result = subprocess.run([sys.executable, "-c", check, str(folder)], check=False, capture_output=True, text=True)
        # LMDB's own pages carry no checksums: a process may end by a signal, but not by an error of Python's.
        assert result.returncode <= 0, result.stderr
        counts = [int(word) for word in result.stdout.split()] or [0, 0]
        read, refused = read + counts[0], refused + counts[1]
    assert (read > 0, refused > 0) == (True, True)


@pytest.mark.parametrize("table", ["tenants", "pages", "scopes", "meta"])
def test_altered_counters_are_an_error_with_its_remedy(folder: Path, table: str) -> None:
    fill(folder, 1)
    backend = LmdbBackend(folder, deadline_s=30)

    def alter(txn: lmdb.Transaction[memoryview]) -> None:
        row = backend._environment.tables[table]
        with backend._environment.view() as view, view.cursor(row) as cursor:
            keys = [bytes(key) for key, _ in cursor]
        for key in keys:
            txn.put(key, bytes(8), db=row)

    backend._writer.change(alter, 30)
    with pytest.raises(StoreUnavailableError, match=r"damaged.*delete the folder") as caught:
        backend.stats() if table in {"scopes", "meta"} else backend.evict(2**30)
    assert caught.value.reason == "io"
    backend.close()


# Of what LMDB itself does not miss the store's own note of the length tells.
@pytest.mark.parametrize(
    ("part", "message"), [(0.1, b"cannot be used"), (0.5, b"cannot be used"), (0.9, b"was cut off")]
)
def test_a_file_that_was_cut_off_is_refused_when_it_is_opened(folder: Path, part: float, message: bytes) -> None:
    fill(folder, 50)
    # The length is noted with the next change.
    fill(folder, 50)
    data = folder / "data.mdb"
    os.truncate(data, int(data.stat().st_size * part) // 4096 * 4096)
    for _ in range(2):
        result = subprocess.run([sys.executable, str(PROGRAM), "look", str(folder)], check=True, stdout=subprocess.PIPE)
        assert result.stdout.startswith(b"StoreUnavailableError io")
        assert message in result.stdout


def test_a_file_that_is_cut_off_while_it_is_open_is_refused(folder: Path) -> None:
    written = fill(folder, 50)
    backend = LmdbBackend(folder, deadline_s=30)
    os.truncate(folder / "data.mdb", 3 * 4096)
    for operation in (
        lambda: backend.lookup(SCOPE.scope, [page.key for page in written]),
        lambda: backend.publish(SCOPE, written, ROOMY),
        backend.stats,
    ):
        with pytest.raises(StoreUnavailableError, match="cut off") as caught:
            operation()
        assert caught.value.reason == "io"
    backend.close()


def test_a_file_that_is_no_store_is_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "data.mdb").write_bytes(os.urandom(100_000))
    with pytest.raises(StoreUnavailableError) as caught:
        LmdbBackend(folder, deadline_s=30)
    assert caught.value.reason == "io"


# Compaction, one process's own use, URLs


def test_compaction_gives_the_disk_back_and_keeps_every_byte(folder: Path) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    kept = [large_page(f"kept {number}") for number in range(5)]
    for number in range(20):
        backend.publish(SCOPE, [large_page(str(number))], ROOMY)
    backend.publish(SCOPE, kept, ROOMY)
    backend.put_anchor(AnchorPool(SCOPE, "slot"), "anchor", b"bytes")
    backend.evict(20 * 200_000)
    before = (folder / "data.mdb").stat().st_size
    freed = backend.compact().size_bytes
    after = (folder / "data.mdb").stat().st_size
    assert before - after == freed > 2**20
    check_holds(backend, kept)
    assert backend.anchors(AnchorPool(SCOPE, "slot")) == {"anchor": b"bytes"}
    backend.close()
    backend = LmdbBackend(folder, deadline_s=30)
    check_holds(backend, kept)
    backend.close()


def test_nobody_else_can_read_the_files(folder: Path) -> None:
    before = os.umask(0o022)
    try:
        backend = LmdbBackend(folder, deadline_s=30)
        backend.publish(SCOPE, [large_page("a")], ROOMY)
        for _ in range(2):
            modes = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}
            assert modes.pop(folder.name) == 0o700
            assert {"data.mdb", "lock.mdb"} < set(modes)
            assert set(modes.values()) == {0o600}
            backend.compact()
        backend.close()
    finally:
        os.umask(before)


def test_what_a_killed_compaction_left_is_cleared_by_the_next(folder: Path) -> None:
    written = fill(folder, 5)
    (folder / "compact").mkdir()
    (folder / "compact" / "data.mdb").write_bytes(b"half a copy")
    backend = LmdbBackend(folder, deadline_s=30)
    backend.compact()
    assert not (folder / "compact").exists()
    check_holds(backend, written)
    backend.close()


def test_lookups_change_nothing_on_disk(folder: Path) -> None:
    written = fill(folder, 5)
    backend = LmdbBackend(folder, deadline_s=30)
    before = backend._environment.env.info()["last_txnid"]
    for _ in range(20):
        backend.lookup(SCOPE.scope, [page.key for page in written])
    assert backend._environment.env.info()["last_txnid"] == before
    backend.close()


def test_a_store_that_is_open_in_this_process_is_refused_a_second_time(folder: Path) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    with pytest.raises(StoreUnavailableError, match="already open") as caught:
        LmdbBackend(folder, deadline_s=30)
    assert caught.value.reason == "refused"
    assert backend.stats().size_bytes == 0
    backend.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError) as caught:
        LmdbBackend(tmp_path / "file" / "store")
    assert caught.value.reason == "io"


def test_a_url_opens_the_store_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    written = fill(folder, 2)
    backend = open_backend(f"lmdb://{tmp_path}/with%20space?map_bytes=1073741824", deadline_s=30)
    assert backend.lookup(SCOPE.scope, [written[1].key]).digests[0] is not None
    backend.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("lmdb://relative/path", "lmdb:///absolute"),
        ("lmdb:///", "lmdb:///absolute"),
        ("lmdb:///x?mapbytes=1", "did you mean 'map_bytes'"),
        ("lmdb:///x?map_bytes=many", "whole number"),
        ("lmdb:///x?map_bytes=0", "whole number"),
        ("lmdb:///x?map_bytes=1&map_bytes=2", "once"),
        ("lmdb:///x?map_bytes", "name=value"),
        ("memory://host", "neither host nor path"),
        ("memory://?map_bytes=1", "there are none"),
        ("memcached://x", "no kind of store"),
        ("", "no kind of store"),
    ],
)
def test_a_wrong_url_is_told_with_its_remedy(url: str, message: str) -> None:
    with pytest.raises(StoreUrlError, match=message):
        open_backend(url)
