"""What becomes of a change of an LMDB store whose caller waits no longer."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cache_store.backends import lmdb_flush, lmdb_pages
from cache_store.backends.lmdb import LmdbBackend
from cache_store.errors import StoreUnavailableError

from .sample_pages import A, chain, put, there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PROGRAM = Path(__file__).parent / "lmdb_process.py"


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LmdbBackend]:
    opened = LmdbBackend(tmp_path / "store", deadline_s=30)
    put(opened, chain(A, "a", "b"))
    yield opened
    opened.close()


@pytest.fixture
def holder(tmp_path: Path, backend: LmdbBackend) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the writers' lock of the backend."""
    assert backend.stats().size_bytes
    command = [sys.executable, str(PROGRAM), "hold_writers_lock", str(tmp_path / "store")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    yield process
    process.kill()
    process.communicate()


def slow(do: Callable[..., Any], go_on: threading.Event) -> Callable[..., Any]:
    def wait_and_do(*arguments: Any) -> Any:
        assert go_on.wait(30)
        return do(*arguments)

    return wait_and_do


def test_a_flush_that_has_begun_is_made_though_it_takes_longer_than_the_deadline(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(lmdb_flush, "flush", slow(lmdb_flush.flush, go_on))
    backend._deadline_s = 0.1
    with pytest.raises(StoreUnavailableError, match="it is being made, and will hold") as caught:
        backend.flush()
    assert caught.value.reason == "timeout"
    go_on.set()
    backend._deadline_s = 30
    backend.release("nobody")
    assert there(backend, A, "a", "b") == []


def test_a_publish_that_has_begun_is_undone_if_its_caller_waits_no_longer(
    backend: LmdbBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(lmdb_pages, "publish", slow(lmdb_pages.publish, go_on))
    backend._deadline_s = 0.1
    with pytest.raises(StoreUnavailableError, match="it takes longer"):
        put(backend, chain(A, "c"))
    go_on.set()
    backend._deadline_s = 30
    backend.release("nobody")
    assert there(backend, A, "a", "b", "c") == ["a", "b"]


class _Content:
    def __call__(self, change: object) -> None:
        raise AssertionError


def test_changes_that_were_given_up_leave_nothing_behind(backend: LmdbBackend, holder: subprocess.Popen[str]) -> None:
    backend._deadline_s = 0.05
    left = []
    for _ in range(4):
        content = _Content()
        left.append(weakref.ref(content))
        with pytest.raises(StoreUnavailableError, match="writers' lock"):
            backend._change(content)
        del content
    assert [content() for content in left] == [None] * 4
    assert not backend._writer._jobs
    holder.kill()
    holder.wait()
    backend._deadline_s = 30
    assert put(backend, chain(A, "c")).pages == 1


def test_an_interrupted_flush_is_not_made_and_closing_waits_no_longer_for_the_lock(
    tmp_path: Path, backend: LmdbBackend, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shell that runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        backend.flush()
    timer.join()
    signal.signal(signal.SIGINT, before)
    waited: list[float] = []
    join = backend._writer._thread.join

    def counted(timeout: float) -> None:
        waited.append(timeout)
        join(timeout)

    monkeypatch.setattr(backend._writer._thread, "join", counted)
    backend.close()
    assert len(waited) == 1
    assert waited[0] <= 1.0
    holder.kill()
    holder.wait()
    command = [sys.executable, str(PROGRAM), "look", str(tmp_path / "store")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "2 pages\n"
