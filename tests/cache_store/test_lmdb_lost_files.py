"""LMDB's files cut off, deleted or replaced while they are open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import lmdb
import pytest

from cache_store.backends import lmdb_environment
from cache_store.backends.lmdb import LmdbBackend
from cache_store.errors import StoreUnavailableError

from .sample_pages import A, chain, key, look, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ABC = chain(A, "a", "b", "c")
LOST = "was deleted or replaced while it was open; try again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(folder: Path) -> Iterator[LmdbBackend]:
    backend = LmdbBackend(folder, deadline_s=30)
    put(backend, ABC)
    yield backend
    backend.close()


def replace(folder: Path) -> None:
    """Another store in its place, as another process finds it; the one that is open is nobody else's."""
    shutil.rmtree(folder)
    script = (
        "import sys; from pathlib import Path; from cache_store.backends.lmdb import LmdbBackend\n"
        "from tests.cache_store.sample_pages import A, page, put\n"
        "backend = LmdbBackend(Path(sys.argv[1]), deadline_s=30)\n"
        "put(backend, [page('new', A.scope)])\n"
        "backend.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)


# A plain function of the folder each; the last leaves the folder and takes the file alone.
TAKE = pytest.mark.parametrize(
    "take", [shutil.rmtree, replace, lambda folder: (folder / "data.mdb").unlink()], ids=["deleted", "replaced", "file"]
)


@TAKE
@pytest.mark.parametrize("change", ["flush", "publish", "evict", "release"])
def test_a_change_of_files_that_are_gone_is_refused(
    backend: LmdbBackend, folder: Path, take: Callable[[Path], object], change: str
) -> None:
    changes = {
        "flush": backend.flush,
        "publish": lambda: put(backend, ABC),
        "evict": lambda: backend.evict(1),
        "release": lambda: backend.release("reader"),
    }
    take(folder)
    with pytest.raises(StoreUnavailableError, match=LOST) as caught:
        changes[change]()
    assert caught.value.reason == "io"


@TAKE
def test_what_is_at_the_path_is_opened_by_the_next_call(
    backend: LmdbBackend, folder: Path, take: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    take(folder)
    with pytest.raises(StoreUnavailableError, match=LOST):
        backend.flush()
    found = [one is not None for one in look(backend, A, "a", "b", "c", "new")]
    assert found == [False, False, False, take is replace]
    assert "is opened again" in caplog.text
    assert put(backend, ABC).pages == 3
    assert backend.flush().pages == 3 + (take is replace)
    backend.close()
    other = LmdbBackend(folder, deadline_s=30)
    assert look(other, A, "a", "b", "c", "new") == [None] * 4
    other.close()


@TAKE
def test_reads_of_files_that_are_gone_end_within_a_while(
    backend: LmdbBackend, folder: Path, take: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    backend._environment._look_at_place_s = lmdb_environment.PLACE_S
    monkeypatch.setattr(lmdb_environment.time, "monotonic", lambda: now_s[0])
    take(folder)
    now_s[0] = lmdb_environment.PLACE_S - 0.01
    assert None not in look(backend, A, "a", "b", "c")
    now_s[0] = lmdb_environment.PLACE_S
    with pytest.raises(StoreUnavailableError, match=LOST) as caught:
        backend.read(A.scope, [(key("a"), "mass/0")])
    assert caught.value.reason == "io"
    assert look(backend, A, "a", "b", "c") == [None] * 3


def test_a_lock_file_that_was_deleted_keeps_others_out_no_longer_and_is_made_anew(
    backend: LmdbBackend, folder: Path
) -> None:
    (folder / "lock.mdb").unlink()
    with pytest.raises(StoreUnavailableError, match=LOST):
        put(backend, chain(A, "d"))
    assert put(backend, chain(A, "d")).pages == 1
    assert None not in look(backend, A, "a", "b", "c", "d")
    assert (folder / "lock.mdb").exists()


def test_what_cannot_be_opened_again_is_unavailable_until_it_can(backend: LmdbBackend, folder: Path) -> None:
    replace(folder)
    with lmdb.open(str(folder), max_dbs=20) as env:
        table = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"layout", (9).to_bytes(4, "big"), db=table)
    with pytest.raises(StoreUnavailableError, match=LOST):
        backend.flush()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match=r"layout 9.*delete the folder") as caught:
            backend.lookup(A.scope, [key("a")])
        assert caught.value.reason == "io"
    shutil.rmtree(folder)
    assert put(backend, ABC).pages == 3
    assert None not in look(backend, A, "a", "b", "c")


def test_a_store_whose_files_are_gone_can_be_closed(backend: LmdbBackend, folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(StoreUnavailableError, match=LOST):
        backend.flush()
    backend.close()
    assert not folder.exists()
    with pytest.raises(StoreUnavailableError) as caught:
        backend.stats()
    assert caught.value.reason == "closed"


def test_a_folder_that_is_moved_away_and_back_is_the_same_store(backend: LmdbBackend, folder: Path) -> None:
    aside = folder.with_name("aside")
    folder.rename(aside)
    with pytest.raises(StoreUnavailableError, match=LOST):
        put(backend, chain(A, "d"))
    aside.rename(folder)
    assert None not in look(backend, A, "a", "b", "c")
    assert put(backend, chain(A, "d")).pages == 1


@pytest.mark.parametrize("left", [0, 100, 4096, 8192])
def test_a_file_cut_below_its_first_pages_while_it_is_open_ends_no_process(folder: Path, left: int) -> None:
    script = (
        "import os, sys; from pathlib import Path; from cache_store.backends.lmdb import LmdbBackend\n"
        "from cache_store.errors import StoreUnavailableError\n"
        "from tests.cache_store.sample_pages import A, chain, key, put\n"
        "backend = LmdbBackend(Path(sys.argv[1]), deadline_s=30)\n"
        "put(backend, chain(A, 'a', 'b'))\n"
        "backend.lookup(A.scope, [key('a')])\n"
        "os.truncate(Path(sys.argv[1]) / 'data.mdb', int(sys.argv[2]))\n"
        "look, store = (lambda: backend.lookup(A.scope, [key('a')])), (lambda: put(backend, chain(A, 'a')))\n"
        "for call in (look, store, backend.flush):\n"
        "    try:\n"
        "        call()\n"
        "    except StoreUnavailableError as error:\n"
        "        print(error.reason)\n"
        "backend.close()\n"
        "print('closed')\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(left)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
    assert (result.returncode, result.stdout.split()) == (0, ["io", "io", "io", "closed"]), result.stderr
