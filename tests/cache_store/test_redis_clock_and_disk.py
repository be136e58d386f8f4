"""A Redis server whose clock jumps, and one whose disk takes nothing more."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from cache_store.backends.redis import RedisBackend
from cache_store.errors import StoreUnavailableError

from .redis_audit import audit
from .sample_pages import A, key, page, put, there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .redis_server import RedisServer

    Start = Callable[..., RedisServer]
    Jump = Callable[[float], None]

DAY_S = 86_400.0
# The server asks this function for the time of day; the file says by how much it is off.
SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(now, zone);
  FILE *file = fopen(getenv("CLOCK_OFF_BY"), "r");
  long seconds = 0;
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  now->tv_sec += seconds;
  return result;
}
"""


@pytest.fixture
def jumping(
    start_redis: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RedisBackend, RedisServer, Jump]]:
    """A store, its server, and what sets the server's clock so many seconds off."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (apt-get install gcc)")
    source, library, off_by = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "off_by"
    source.write_text(SHIFTED_CLOCK)
    off_by.write_text("0")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("CLOCK_OFF_BY", str(off_by))
        server = start_redis()
    client = server.client()

    def jump(seconds: float) -> None:
        before, written = client.time()[0], tmp_path / "written"
        written.write_text(str(int(seconds)))
        written.replace(off_by)
        # A clock that did not jump would make the tests say nothing.
        assert abs(client.time()[0] - time.time() - seconds) < DAY_S / 2, before

    backend = RedisBackend.from_url(server.url(), deadline_s=30)
    yield backend, server, jump
    backend.close()


def test_a_server_whose_clock_jumps_ahead_ends_leases_and_takes_nothing_else(
    jumping: tuple[RedisBackend, RedisServer, Jump],
) -> None:
    backend, server, jump = jumping
    put(backend, [page(name, A.scope) for name in ("timed", "pinned", "free")])
    backend.lease(A.scope, [key("timed")], "reader", 3600)
    backend.lease(A.scope, [key("pinned")], "operator", None)
    assert backend.stats().leased_pages == 2
    jump(DAY_S)
    assert there(backend, A, "timed", "pinned", "free") == ["timed", "pinned", "free"]
    assert backend.lookup(A.scope, [key("timed")]).digests != [None]
    assert backend.stats().leased_pages == 1
    assert backend.lease(A.scope, [key("free")], "reader", 3600) == 1
    assert backend.evict(2**40).pages == 1
    jump(2 * DAY_S)
    assert backend.evict(2**40).pages == 1
    assert there(backend, A, "timed", "pinned", "free") == ["pinned"]
    audit(backend, server.client())


def test_a_server_whose_clock_jumps_back_ends_no_lease_and_new_ones_end_by_the_new_time(
    jumping: tuple[RedisBackend, RedisServer, Jump],
) -> None:
    backend, server, jump = jumping
    jump(10 * DAY_S)
    put(backend, [page(name, A.scope) for name in ("before", "after", "free")])
    backend.lease(A.scope, [key("before")], "reader", 60)
    jump(0)
    assert backend.lease(A.scope, [key("after")], "later reader", 60) == 1
    assert backend.evict(2**40).pages == 1
    jump(DAY_S)
    assert backend.evict(2**40).pages == 1
    assert there(backend, A, "before", "after", "free") == ["before"]
    # By the old time it lasts; whoever holds it, or a flush, can still end it.
    assert backend.release("reader") == 1
    assert backend.evict(2**40).pages == 1
    audit(backend, server.client())


def test_a_server_whose_clock_jumps_evicts_in_the_order_of_use(
    jumping: tuple[RedisBackend, RedisServer, Jump],
) -> None:
    backend, server, jump = jumping
    for name, seconds in (("a", 10 * DAY_S), ("b", -10 * DAY_S), ("c", 5 * DAY_S), ("d", 0)):
        jump(seconds)
        put(backend, [page(name, A.scope)])
    for name, seconds in (("c", 20 * DAY_S), ("b", -20 * DAY_S)):
        jump(seconds)
        backend.lookup(A.scope, [key(name)])
    for left in ("bcd", "bc", "b", ""):
        jump(len(left) * DAY_S)
        backend.evict(1)
        assert there(backend, A, *"abcd") == list(left)
    audit(backend, server.client())


def test_a_server_whose_disk_takes_nothing_more_is_unavailable_and_loses_nothing(
    start_redis: Start, tmp_path: Path
) -> None:
    server = start_redis()
    backend = RedisBackend.from_url(server.url(), deadline_s=30)
    put(backend, [page("a", A.scope)])
    client = server.client()
    # Its file cannot be written where there is a folder of that name; it then takes no writes, as with a full disk.
    (tmp_path / "redis-0" / "dump.rdb").mkdir()
    client.config_set("save", "3600 1")
    client.bgsave()
    until_s = time.monotonic() + 30
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok" and time.monotonic() < until_s:
        time.sleep(0.01)
    # To read is a use, which is written down, so reads are refused too.
    for call in (
        lambda: put(backend, [page("b", A.scope)]),
        lambda: backend.lookup(A.scope, [key("a")]),
        lambda: backend.read(A.scope, [(key("a"), "mass/0")]),
    ):
        with pytest.raises(StoreUnavailableError, match="disk") as caught:
            call()
        assert caught.value.reason == "io"
    client.config_set("save", "")
    assert put(backend, [page("b", A.scope)]).pages == 1
    assert there(backend, A, "a", "b") == ["a", "b"]
    audit(backend, client)
    backend.close()
