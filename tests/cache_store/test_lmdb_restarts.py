"""LMDB from one process to the next: what is there is found again, no space leaks, and another budget is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.lmdb import LmdbBackend
from cache_store.backends.protocol import Limits
from cache_store.records import Kind, RecordOf, decode, record_name

from .lmdb_process import LAYERS, SCOPE, true_page

if TYPE_CHECKING:
    from cache_store.backends.protocol import PageWrite

PROGRAM = Path(__file__).parent / "lmdb_process.py"
RESTARTS, ROOMY = 20, Limits(2**30, 2**30)
# Of the writer that `publish_for_ever`, and by how much a file may be larger than its budget (docs/store.md).
BUDGET, SPACE = 2**20, 1.4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def file_bytes(folder: Path) -> int:
    return (folder / "data.mdb").stat().st_size


def write_and_kill(folder: Path, lines: int) -> None:
    """Let a process publish so many chains of pages, and kill it while it goes on."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "publish_for_ever", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline() == "published\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_pages(backend: LmdbBackend) -> int:
    """Every page has all its records, and each is what it should be; how many pages."""
    found = 0
    for _, page in backend.scan():
        for layer in range(LAYERS):
            data = page.records[record_name(Kind.MASS, layer)]
            decode(data, RecordOf(Kind.MASS, layer), tokens_digest=page.tokens_digest)
        found += 1
    assert backend.stats().scopes[0].pages == found
    return found


def chain(names: range) -> list[PageWrite]:
    written: list[PageWrite] = []
    for name in names:
        written.append(true_page(str(name), written[-1].key if written else SCOPE.scope))
    return written


def test_twenty_restarts_after_a_kill_find_their_pages_and_leak_no_space(folder: Path) -> None:
    sizes = []
    for _ in range(RESTARTS):
        write_and_kill(folder, 40)
        backend = LmdbBackend(folder, deadline_s=30)
        # More was published than fits, so each process evicted what the one before it had left.
        assert check_pages(backend) >= 100
        assert BUDGET * 0.9 < backend.stats().size_bytes <= BUDGET
        backend.close()
        sizes.append(file_bytes(folder))
    assert max(sizes) < BUDGET * SPACE
    # Less than a page of the file for each restart.
    assert sizes[-1] - sizes[0] < RESTARTS * 4096
    backend = LmdbBackend(folder, deadline_s=30)
    backend.evict(2**30)
    assert backend.stats().size_bytes == 0
    backend.compact()
    backend.close()
    assert file_bytes(folder) < BUDGET / 10


def test_a_page_published_before_a_kill_is_found_after_it(folder: Path) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    pages = chain(range(10))
    backend.publish(SCOPE, pages, ROOMY)
    backend.close()
    write_and_kill(folder, 1)
    backend = LmdbBackend(folder, deadline_s=30)
    digests = backend.lookup(SCOPE.scope, [page.key for page in pages]).digests
    assert digests == [page.tokens_digest for page in pages]
    # The control: one that nobody published is not.
    assert backend.lookup(SCOPE.scope, [true_page("other", b"").key]).digests == [None]
    assert check_pages(backend) > 10
    backend.close()


def test_a_budget_that_was_lowered_between_two_runs_is_kept_by_the_first_publish(folder: Path) -> None:
    backend = LmdbBackend(folder, deadline_s=30)
    backend.publish(SCOPE, chain(range(1000)), ROOMY)
    before = backend.stats().size_bytes
    backend.close()
    lower = Limits(before // 10, 2**30)
    backend = LmdbBackend(folder, deadline_s=30)
    assert backend.stats().size_bytes == before
    (new,) = chain(range(5000, 5001))
    published = backend.publish(SCOPE, [new], lower)
    assert (published.pages, backend.stats().size_bytes) == (1, before - published.evicted_bytes + before // 1000)
    assert backend.stats().size_bytes <= lower.budget_bytes
    # From the leaves: what is left is the beginning of the chain.
    left = check_pages(backend)
    assert left > 50
    digests = backend.lookup(SCOPE.scope, [page.key for page in chain(range(left - 1))]).digests
    assert None not in digests
    full, sizes = file_bytes(folder), set()
    for start in range(10_000, 11_000, 50):
        backend.publish(SCOPE, chain(range(start, start + 50)), lower)
        assert backend.stats().size_bytes <= lower.budget_bytes
        sizes.add(file_bytes(folder))
    # Of the space that became free, not more of the disk; LMDB uses it from the change after the next.
    assert len(sizes) == 1
    assert sizes.pop() < full + 2 * 50 * before // 1000
    assert backend.compact().size_bytes > full / 2
    backend.close()
    assert file_bytes(folder) < lower.budget_bytes * SPACE


# Leases and a clock that jumps


def open_at(folder: Path, now_s: list[float]) -> LmdbBackend:
    return LmdbBackend(folder, deadline_s=30, clock=lambda: now_s[0])


def test_a_clock_that_jumps_ahead_ends_leases_and_takes_nothing_else(folder: Path) -> None:
    now_s = [1e6]
    backend = open_at(folder, now_s)
    timed, pinned, free = pages = [true_page(name, SCOPE.scope) for name in ("timed", "pinned", "free")]
    backend.publish(SCOPE, pages, ROOMY)
    backend.lease(SCOPE.scope, [timed.key], "reader", 3600)
    backend.lease(SCOPE.scope, [pinned.key], "operator", None)
    now_s[0] += 1e9
    assert backend.stats().leased_pages == 1
    assert None not in backend.lookup(SCOPE.scope, [page.key for page in pages]).digests
    assert backend.lease(SCOPE.scope, [free.key], "reader", 60) == 1
    assert backend.evict(2**30).pages == 1
    now_s[0] += 61
    assert backend.evict(2**30).pages == 1
    assert [page.key for _, page in backend.scan()] == [pinned.key]
    backend.close()


def test_a_clock_that_jumps_back_ends_no_lease_and_new_ones_end_by_the_new_time(folder: Path) -> None:
    now_s = [1e6]
    backend = open_at(folder, now_s)
    before, after, free = pages = [true_page(name, SCOPE.scope) for name in ("before", "after", "free")]
    backend.publish(SCOPE, pages, ROOMY)
    backend.lease(SCOPE.scope, [before.key], "reader", 60)
    now_s[0] = 10.0
    backend.lease(SCOPE.scope, [after.key], "later reader", 60)
    assert backend.evict(2**30).pages == 1
    now_s[0] += 61
    assert backend.evict(2**30).pages == 1
    assert [page.key for _, page in backend.scan()] == [before.key]
    # By the old time it lasts; whoever holds it, or a flush, can still end it.
    assert backend.release("reader") == 1
    assert backend.evict(2**30).pages == 1
    assert backend.publish(SCOPE, [free], ROOMY).pages == 1
    backend.close()
