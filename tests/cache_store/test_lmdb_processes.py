"""LMDB between processes: killed, hung, forked, of another PID namespace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.protocol import Limits
from cache_store.errors import ForeignProcessError, StoreUnavailableError
from cache_store.records import Kind, RecordOf, decode, record_name

from .lmdb_process import LAYERS, SCOPE, true_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parent / "lmdb_process.py"
ROOMY = Limits(2**30, 2**30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that does something to the store, and waits for its first line."""
    running: list[subprocess.Popen[str]] = []

    def start_one(what: str, *before: str, line: str | None = None) -> subprocess.Popen[str]:
        command = [*before, sys.executable, str(PROGRAM), what, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        if line is not None:
            assert process.stdout is not None
            assert process.stdout.readline() == line + "\n"
        return process

    yield start_one
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def end(process: subprocess.Popen[str]) -> str:
    """What a process that ends by itself said."""
    said, _ = process.communicate(timeout=60)
    return said


def can_unshare() -> bool:
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.run([unshare, "--pid", "--fork", "true"], check=False).returncode == 0


def test_a_writer_killed_at_any_moment_leaves_whole_records(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    checked = 0
    for round_number in range(12):
        process = start("publish_for_ever", line="published")
        time.sleep(0.003 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        backend = LmdbBackend(folder, deadline_s=30)
        counted = 0
        for _, page in backend.scan():
            assert len(page.records) == LAYERS
            for layer in range(LAYERS):
                data = page.records[record_name(Kind.MASS, layer)]
                decode(data, RecordOf(Kind.MASS, layer), tokens_digest=page.tokens_digest)
            counted += 1
        stats = backend.stats()
        assert stats.scopes[0].pages == counted
        assert stats.size_bytes <= 2**20
        checked += counted
        backend.close()
    assert checked > 100
    backend = LmdbBackend(folder, deadline_s=30)
    backend.evict(2**30)
    assert backend.stats().size_bytes == 0
    backend.close()


def test_a_writers_lock_held_elsewhere_costs_a_change_its_deadline_and_reads_nothing(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    before, given_up, after = (true_page(name, SCOPE.scope) for name in ("before", "given up", "after"))
    backend.publish(SCOPE, [before], ROOMY)
    backend._deadline_s = 0.2
    holder = start("hold_writers_lock", line="holding")
    with pytest.raises(StoreUnavailableError, match="writers' lock") as caught:
        backend.publish(SCOPE, [given_up], ROOMY)
    assert caught.value.reason == "timeout"
    assert backend.lookup(SCOPE.scope, [before.key]).digests[0] is not None
    holder.kill()
    holder.wait()
    backend._deadline_s = 30
    backend.publish(SCOPE, [after], ROOMY)
    found = backend.lookup(SCOPE.scope, [before.key, given_up.key, after.key]).digests
    assert [page is not None for page in found] == [True, False, True]
    backend.close()


def test_closing_while_the_writers_lock_is_held_elsewhere_ends(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    backend._deadline_s = 0.2
    start("hold_writers_lock", line="holding")
    backend.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        backend.stats()


def test_opening_while_the_writers_lock_is_held_elsewhere_is_given_up(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    start("hold_writers_lock", line="holding")
    with pytest.raises(StoreUnavailableError) as caught:
        LmdbBackend(folder, deadline_s=0.2)
    assert caught.value.reason == "timeout"


def test_two_processes_that_publish_the_same_pages_lose_no_record(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    processes = [start("publish_shared") for _ in range(2)]
    for process in processes:
        end(process)
        assert process.returncode == 0
    backend = LmdbBackend(folder, deadline_s=30)
    pages = [page for _, page in backend.scan()]
    assert len(pages) == 20
    for page in pages:
        assert {f"kv/{process.pid}" for process in processes} < set(page.records)
        assert len(page.records) == LAYERS + 2
    backend.close()


def test_a_lease_of_a_dead_reader_ends_by_time(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    backend = LmdbBackend(folder, deadline_s=30, clock=lambda: now_s)
    backend.publish(SCOPE, [true_page("p", SCOPE.scope)], ROOMY)
    reader = start("lease", line="1")
    assert reader.wait() == 9
    assert backend.stats().leased_pages == 1
    assert backend.evict(2**30).pages == 0
    now_s += 120
    assert backend.stats().leased_pages == 0
    assert backend.evict(2**30).pages == 1
    backend.close()


def test_what_a_killed_reader_kept_from_reuse_is_freed_after_some_changes(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    reader = start("read_for_ever", line="reading")
    reader.kill()
    reader.wait()
    assert str(reader.pid) in backend._environment.env.readers()
    for _ in range(256):
        backend.release("nobody")
    assert str(reader.pid) not in backend._environment.env.readers()
    backend.close()


@pytest.mark.skipif(not can_unshare(), reason="making a PID namespace takes rights")
def test_processes_of_another_pid_namespace_are_refused_while_the_store_is_open(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    refused = end(start("look", "unshare", "--pid", "--fork"))
    assert refused.startswith("ForeignProcessError")
    assert "PID namespace" in refused
    assert end(start("look")) == "0 pages\n"
    backend.close()
    assert end(start("look", "unshare", "--pid", "--fork")) == "0 pages\n"


def test_a_process_of_another_pid_namespace_that_has_it_open_keeps_this_one_out(folder: Path) -> None:
    theirs = LmdbBackend(folder, pid_namespace=1, deadline_s=30)
    with pytest.raises(ForeignProcessError):
        LmdbBackend(folder, pid_namespace=2, deadline_s=30)
    theirs.close()
    LmdbBackend(folder, pid_namespace=2, deadline_s=30).close()


def test_a_killed_process_of_another_pid_namespace_keeps_nobody_out(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    keeper = start("keep_open", line="open")
    with pytest.raises(ForeignProcessError):
        LmdbBackend(folder, pid_namespace=1, deadline_s=30)
    keeper.kill()
    keeper.wait()
    LmdbBackend(folder, pid_namespace=1, deadline_s=30).close()


def test_a_forked_child_is_told_to_open_the_store_again(folder: Path) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    page = true_page("p", SCOPE.scope)
    backend.publish(SCOPE, [page], ROOMY)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            backend.lookup(SCOPE.scope, [page.key])
        except ForeignProcessError:
            backend.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.lookup(SCOPE.scope, [page.key]).digests[0] is not None
    backend.close()


def test_compaction_is_refused_while_another_process_has_the_store_open(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    backend.publish(SCOPE, [true_page(str(number), SCOPE.scope) for number in range(100)], ROOMY)
    backend.evict(2**30)
    keeper = start("keep_open", line="open")
    with pytest.raises(StoreUnavailableError, match="other processes") as caught:
        backend.compact()
    assert caught.value.reason == "refused"
    keeper.kill()
    keeper.wait()
    assert backend.compact().size_bytes > 0
    assert backend.stats().size_bytes == 0
    backend.close()


def test_use_by_one_process_is_known_to_another_after_it_closed(folder: Path) -> None:
    first = LmdbBackend(folder, deadline_s=30)
    old, new = true_page("old", SCOPE.scope), true_page("new", SCOPE.scope)
    first.publish(SCOPE, [old], ROOMY)
    first.publish(SCOPE, [new], ROOMY)
    first.lookup(SCOPE.scope, [old.key])
    first.close()
    second = LmdbBackend(folder, deadline_s=30)
    second.evict(1)
    assert [page.key for _, page in second.scan()] == [old.key]
    second.close()
