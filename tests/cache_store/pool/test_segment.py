import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from cache_store.errors import StoreFullError, StoreUnavailableError, StoreUrlError, StoreVersionError
from cache_store.pool import segment
from cache_store.pool.geometry import Geometry, SlotType
from cache_store.pool.locks import SEATS
from cache_store.pool.protocol import Staleness
from cache_store.pool.shared_memory import FOLDER, open_pool, remove_abandoned

SMALL = Geometry(8, SlotType.UINT8)


@pytest.fixture
def path(pool_name):
    return FOLDER / f"crossfill-pool-{pool_name}"


def test_a_pool_takes_all_of_its_memory_at_once_and_only_its_user_can_open_it(open_named, path):
    pool = open_named(100)
    status = path.stat()
    assert status.st_blocks * 512 >= pool.stats().size_bytes == status.st_size
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize("dtype", SlotType)
def test_a_budget_gives_as_many_slots_as_fit(dtype):
    geometry = Geometry.within(10**6, dtype)
    assert geometry.slots * geometry.slot_bytes <= 10**6 < (geometry.slots + 1) * geometry.slot_bytes


@pytest.mark.parametrize("slots", [0, -1, 2**31])
def test_impossible_numbers_of_slots_are_refused(slots):
    with pytest.raises(StoreUrlError, match=str(slots)):
        Geometry(slots, SlotType.UINT8)


def test_too_little_room_is_one_clear_error_and_leaves_nothing(pool_name, path):
    room = os.statvfs(FOLDER)
    if not room.f_blocks:
        pytest.skip("this /dev/shm has no limit")
    slots = room.f_blocks * room.f_frsize // Geometry(1, SlotType.UINT8).slot_bytes + 1
    with pytest.raises(StoreFullError, match="--shm-size"):
        open_pool(pool_name, Geometry(slots, SlotType.UINT8))
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "é"])
def test_names_that_cannot_be_a_file_are_refused(name):
    with pytest.raises(StoreUrlError, match="cannot name a block pool"):
        open_pool(name, SMALL)


@pytest.mark.parametrize("folder", ["/nowhere", "/proc", "/etc/passwd"])
def test_a_folder_that_cannot_hold_a_pool_is_refused(folder):
    with pytest.raises((StoreUrlError, StoreUnavailableError), match=folder):
        open_pool("x", SMALL, folder=Path(folder))


def test_what_was_published_survives_all_of_its_processes(open_named):
    pool = open_named()
    handles = pool.allocate(1)
    pool.publish(handles)
    pool.close()
    assert open_named().verify(handles).usable


@pytest.mark.parametrize("other", [(9, SlotType.UINT8), (8, SlotType.BFLOAT16)], ids=["slots", "type"])
def test_another_geometry_is_refused_while_the_pool_is_in_use_and_replaces_it_afterwards(open_named, other):
    pool = open_named(8)
    handles = pool.allocate(1)
    pool.publish(handles)
    with pytest.raises(StoreUrlError, match="8 uint8 slots in use, not of"):
        open_named(*other)
    assert pool.verify(handles).usable
    pool.close()
    replaced = open_named(*other)
    assert replaced.stats().slots == replaced.stats().free == other[0]
    assert replaced.verify(handles).reasons == {Staleness.OTHER_POOL: 1}


@pytest.mark.parametrize(
    ("where", "what", "message"),
    [
        (0, b"other", "no block pool"),
        (8, b"\x63", "layout 99"),
        (16, b"\x01", "damaged"),
        (12, b"\x63", "damaged"),
    ],
)
def test_what_is_no_pool_of_this_version_is_refused_and_left_alone(open_named, pool_name, path, where, what, message):
    open_named().close()
    content = bytearray(path.read_bytes())
    content[where : where + len(what)] = what
    path.write_bytes(content)
    with pytest.raises(StoreVersionError, match=message):
        open_named()
    assert pool_name not in remove_abandoned()
    assert path.read_bytes() == bytes(content)


@pytest.mark.parametrize("size", [0, 20, 4096, 42_000])
def test_a_truncated_file_is_refused(open_named, path, size):
    open_named().close()
    os.truncate(path, size)
    with pytest.raises(StoreVersionError):
        open_named()


@pytest.mark.parametrize("kind", ["readable", "link", "pipe", "folder"])
def test_a_file_that_others_could_have_put_there_is_refused(open_named, path, tmp_path, kind):
    if kind == "readable":
        open_named().close()
        path.chmod(0o644)
    elif kind == "link":
        open_named().close()
        shutil.move(path, tmp_path / "target")
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    try:
        with pytest.raises(StoreUnavailableError, match=str(path)):
            open_named()
    finally:
        if kind == "folder":
            path.rmdir()


def test_a_removed_pool_is_another_one_to_whoever_opens_it_next(open_named):
    old = open_named()
    handles = old.allocate(1)
    old.publish(handles)
    old.unlink()
    new = open_named()
    assert old.verify(handles).usable
    assert new.verify(handles).reasons == {Staleness.OTHER_POOL: 1}
    old.unlink()
    assert open_named().stats().processes == 2, "the old pool does not remove the new one"


def test_only_pools_without_a_living_process_are_removed(open_named, pool_name, path):
    pool = open_named()
    assert pool_name not in remove_abandoned()
    pool.close()
    assert pool_name in remove_abandoned()
    assert not path.exists()
    assert remove_abandoned(folder=Path("/nowhere")) == []


def test_processes_that_open_a_pool_at_once_open_the_same(pool_name):
    pools, start = [], threading.Barrier(8)

    def enter():
        start.wait()
        pools.append(open_pool(pool_name, SMALL))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({pool._pool for pool in pools}) == 1
        assert len({pool._open.seat for pool in pools}) == 8
        assert pools[0].stats().processes == 8
    finally:
        for pool in pools:
            pool.close()


def test_a_pool_is_never_seen_half_made(open_named, path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(segment.os, "link", stop)
    with pytest.raises(KeyboardInterrupt):
        open_named()
    assert not path.exists()


def test_a_pool_that_is_removed_while_it_is_opened_is_made_again(open_named, path, monkeypatch):
    open_named().close()
    first = path.stat().st_ino
    real, calls = segment._open, []

    def open_then_lose(name):
        file = real(name)
        calls.append(name)
        if len(calls) == 1:
            name.unlink()
        return file

    monkeypatch.setattr(segment, "_open", open_then_lose)
    assert open_named().stats().free == 8
    assert path.stat().st_ino != first


def test_a_pool_that_takes_the_name_while_another_one_is_opened_is_not_removed(open_named, path, monkeypatch):
    open_named(9).close()
    real, made = segment._open, []

    def open_then_replace(name):
        file = real(name)
        if not made:
            name.unlink()
            segment._create(name, SMALL)
            made.append(name.stat().st_ino)
        return file

    monkeypatch.setattr(segment, "_open", open_then_replace)
    open_named(8)
    assert [path.stat().st_ino] == made


def test_there_are_only_so_many_seats(open_named):
    pools = [open_named() for _ in range(SEATS)]
    with pytest.raises(StoreUnavailableError) as error:
        open_named()
    assert error.value.reason == "full"
    assert pools[0].stats().processes == SEATS
    pools[7].close()
    assert open_named()._open.seat == 7


def test_opening_and_closing_leaves_no_descriptors(open_named):
    open_named()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        open_named().close()
    for _ in range(5):
        with pytest.raises(StoreUrlError):
            open_named(9)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_pool_that_takes_longer_to_make_than_others_are_waited_for_is_opened_all_the_same(
    pool_name, path, monkeypatch
):
    create = segment._create

    def slowly(*arguments):
        time.sleep(0.3)
        create(*arguments)

    monkeypatch.setattr(segment, "_create", slowly)
    with open_pool(pool_name, Geometry(2, SlotType.UINT8), deadline_s=0.1) as pool:
        assert pool.stats().slots == 2
