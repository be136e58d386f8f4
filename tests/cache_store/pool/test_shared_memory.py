import numpy as np
import pytest

from cache_store.errors import PoolRefusedError, StaleHandlesError, StoreUnavailableError
from cache_store.pool.geometry import SlotType
from cache_store.pool.handles import HANDLE_BYTES, Handles, join, unpack
from cache_store.pool.protocol import Eviction, PoolRefusal, Staleness
from cache_store.pool.reading import reading


def publish(pool, count, fill=None):
    """Allocate, write and publish slots."""
    handles = pool.allocate(count)
    if fill is not None:
        pool.storage.blocks[handles.slots] = fill
    pool.publish(handles)
    return handles


def die(pool):
    """Vanish as a killed process does: the kernel drops its locks, and nothing else happens."""
    pool._open.locks.close()
    pool._open = None


def states(pool):
    stats = pool.stats()
    assert stats.free + stats.writing + stats.published + stats.retrieved == stats.slots
    return stats.free, stats.writing, stats.published, stats.retrieved


def test_what_one_writes_another_reads_in_place(open_named):
    writer, reader = open_named(), open_named()
    handles = publish(writer, 3, fill=7)
    writer.storage.scales[handles.slots] = 0.5
    with reading(reader, unpack(handles.pack())) as slots:
        assert (reader.storage.blocks[slots] == 7).all()
        assert (reader.storage.scales[slots] == 0.5).all()


@pytest.mark.parametrize("dtype", SlotType)
def test_slots_do_not_overlap(open_named, dtype):
    pool = open_named(5, dtype)
    handles = pool.allocate(5)
    for slot in handles.slots:
        pool.storage.blocks[slot] = slot + 1
        if pool.storage.scales is not None:
            pool.storage.scales[slot] = slot + 100
    pool.publish(handles)
    assert pool.verify(handles).usable
    for slot in handles.slots:
        assert (pool.storage.blocks[slot] == slot + 1).all()
        if pool.storage.scales is not None:
            assert (pool.storage.scales[slot] == slot + 100).all()


def test_the_last_byte_of_a_pool_is_the_last_of_its_file(open_named):
    pool = open_named(3)
    pool.storage.scales[-1, -1] = -1.0
    path = pool._open.path
    assert path.read_bytes()[-4:] == np.float32(-1).tobytes()
    assert path.stat().st_size == pool.stats().size_bytes


def test_unpublished_slots_cannot_be_read(open_named):
    pool = open_named()
    handles = pool.allocate(2)
    assert pool.verify(handles).reasons == {Staleness.NOT_PUBLISHED: 2}
    with pytest.raises(StaleHandlesError, match="2 not_published"), reading(pool, handles):
        pytest.fail("the block must not run")


def test_retrieved_slots_go_first_then_the_oldest(open_named):
    pool = open_named(4)
    first, second, third, fourth = (publish(pool, 1) for _ in range(4))
    pool.retrieve(third)
    gone = []
    for _ in range(3):
        publish(pool, 1)
        gone.append([not pool.verify(handles).usable for handles in (first, second, third, fourth)])
    assert gone == [
        [False, False, True, False],
        [True, False, True, False],
        [True, True, True, False],
    ]
    assert pool.stats().evicted == {Eviction.RETRIEVED: 1, Eviction.UNUSED: 2}


def test_verifying_does_not_make_a_slot_the_first_to_go(open_named):
    pool = open_named(2)
    publish(pool, 1)
    newest = publish(pool, 1)
    pool.verify(newest)
    publish(pool, 1)
    assert pool.verify(newest).usable


def test_slots_that_are_read_go_no_sooner_than_others(open_named):
    pool = open_named(2)
    publish(pool, 1)
    newest = publish(pool, 1)
    with reading(pool, newest):
        publish(pool, 1)
    assert states(pool) == (0, 0, 1, 1)


def test_slots_being_written_are_never_given_away(open_named):
    writer, other = open_named(4), open_named(4)
    held = writer.allocate(3)
    published = publish(other, 1)
    with pytest.raises(PoolRefusedError) as refused:
        other.allocate(2)
    assert refused.value.reason is PoolRefusal.WRITING
    assert other.verify(published).usable, "a refused allocation evicts nothing"
    writer.publish(held)
    assert states(other) == (0, 0, 4, 0)
    assert other.stats().refused == {PoolRefusal.WRITING: 1, PoolRefusal.TOO_LARGE: 0}


def test_more_slots_than_there_are_is_refused_as_such(open_named):
    pool = open_named(4)
    with pytest.raises(PoolRefusedError, match="it has 4") as refused:
        pool.allocate(5)
    assert refused.value.reason is PoolRefusal.TOO_LARGE
    assert len(pool.allocate(4)) == 4


def test_no_slots_is_no_fault(open_named):
    pool = open_named()
    handles = publish(pool, 0)
    assert len(unpack(handles.pack())) == 0
    assert pool.retrieve(handles).usable
    assert pool.free(handles) == 0


def test_a_negative_number_of_slots_is_a_fault(open_named):
    with pytest.raises(ValueError, match="-1"):
        open_named().allocate(-1)


def test_a_slot_given_away_while_it_is_read_voids_the_reading(open_named):
    pool, other = open_named(2), open_named(2)
    handles = publish(pool, 1, fill=1)
    read = []
    with pytest.raises(StaleHandlesError, match="1 reused"), reading(pool, handles) as slots:
        read.append((publish(other, 2, fill=2), pool.storage.blocks[slots].copy()))
    assert (read[0][1] == 2).all(), "what a reader that does not check would use"
    assert pool.stats().stale[Staleness.REUSED] == 1


def test_one_stale_slot_leaves_the_others_unretrieved(open_named):
    pool = open_named(4)
    old, new = publish(pool, 1), publish(pool, 1)
    pool.free(old)
    check = pool.retrieve(join([old, new]))
    assert check.stale.tolist() == [True, False]
    assert states(pool) == (3, 0, 1, 0)
    assert pool.retrieve(join([old, new])[~check.stale]).usable
    assert states(pool) == (3, 0, 0, 1)


def test_an_error_while_reading_is_not_hidden_and_retrieves_nothing(open_named):
    pool = open_named()
    with pytest.raises(ZeroDivisionError), reading(pool, publish(pool, 1)):
        raise ZeroDivisionError
    assert states(pool) == (7, 0, 1, 0)


def test_freed_slots_are_stale_and_can_be_had_again(open_named):
    pool, other = open_named(2), open_named(2)
    published, mine = publish(pool, 1), pool.allocate(1)
    assert other.free(join([published, mine])) == 1, "another's unpublished slot stays"
    assert pool.free(join([published, mine])) == 1
    assert pool.free(join([published, mine])) == 0
    assert states(pool) == (2, 0, 0, 0)
    assert pool.verify(join([published, mine])).reasons == {Staleness.NOT_PUBLISHED: 2}
    assert pool.stats().freed == 2


def test_a_handle_named_twice_is_freed_once(open_named):
    pool = open_named()
    handles = publish(pool, 1)
    assert pool.free(join([handles, handles])) == 1


@pytest.mark.parametrize("fault", ["twice", "freed", "of-another"])
def test_only_own_unpublished_slots_can_be_published(open_named, fault):
    pool, other = open_named(), open_named()
    good, bad = pool.allocate(1), pool.allocate(1)
    publisher = pool
    if fault == "twice":
        pool.publish(bad)
    elif fault == "freed":
        pool.free(bad)
    else:
        publisher = other
    with pytest.raises(ValueError, match="not yet published"):
        publisher.publish(join([good, bad]))
    assert pool.verify(good).reasons == {Staleness.NOT_PUBLISHED: 1}
    pool.publish(good)


def test_handles_that_cannot_be_of_this_pool_are_stale(open_named):
    pool = open_named(4)
    good = publish(pool, 1)
    slots = np.array([-1, 4, 2**31 - 1, good.slots[0]], np.int32)
    outside = Handles(good.pool, slots, np.repeat(good.generations, 4))
    foreign = Handles(good.pool ^ 1, good.slots, good.generations)
    assert pool.verify(outside).stale.tolist() == [True, True, True, False]
    assert pool.verify(foreign).reasons == {Staleness.OTHER_POOL: 1}
    assert pool.free(foreign) == pool.free(outside[:3]) == 0
    assert pool.free(outside) == 1


def test_a_handle_of_zeros_is_stale(open_named):
    pool = open_named()
    zeros = Handles(unpack(pool.allocate(1).pack()).pool, np.zeros(1, np.int32), np.zeros(1, np.uint64))
    assert not pool.verify(zeros).usable


def test_handles_pack_into_20_bytes_and_12_for_each_more(open_named):
    handles = publish(open_named(), 3)
    again = unpack(handles.pack())
    assert len(handles[:1].pack()) == HANDLE_BYTES == 20
    assert len(handles.pack()) == 44
    assert (again.pool, again.slots.tolist()) == (handles.pool, handles.slots.tolist())
    assert again.generations.tolist() == handles.generations.tolist()


@pytest.mark.parametrize("size", [0, 7, 19, 21])
def test_other_bytes_are_no_handles(size):
    with pytest.raises(ValueError, match=f"{size} bytes"):
        unpack(bytes(size))


def test_handles_of_different_pools_do_not_join():
    one = Handles(1, np.zeros(1, np.int32), np.zeros(1, np.uint64))
    other = Handles(2, one.slots, one.generations)
    with pytest.raises(ValueError, match="one pool"):
        join([one, other])


def test_slots_of_a_dead_writer_come_back_when_they_are_needed(open_named):
    dead, living = open_named(4), open_named(4)
    published = publish(living, 1)
    left = dead.allocate(3)
    die(dead)
    assert states(living) == (0, 3, 1, 0)
    living.allocate(3)
    assert living.verify(published).usable, "before anything published is evicted"
    assert living.verify(left).reasons == {Staleness.REUSED: 3}
    assert living.stats().recovered == 3


def test_recover_takes_from_the_dead_alone(open_named):
    dead, living, asking = open_named(), open_named(), open_named()
    kept, own = living.allocate(2), asking.allocate(1)
    dead.publish(dead.allocate(1))
    dead.allocate(3)
    die(dead)
    assert asking.recover() == 3
    assert asking.recover() == 0
    living.publish(kept)
    asking.publish(own)
    assert states(asking) == (4, 0, 4, 0)


def test_whoever_takes_a_dead_writers_seat_does_not_inherit_its_slots(open_named):
    watching, dead = open_named(), open_named()
    left = dead.allocate(3)
    seat = dead._open.seat
    die(dead)
    newcomer = open_named()
    assert newcomer._open.seat == seat
    assert states(watching) == (8, 0, 0, 0)
    with pytest.raises(ValueError, match="publish"):
        newcomer.publish(left)


def test_closing_gives_unpublished_slots_back_and_keeps_published_ones(open_named):
    leaving, staying = open_named(), open_named()
    published = publish(leaving, 2, fill=3)
    leaving.allocate(3)
    leaving.close()
    leaving.close()
    assert states(staying) == (6, 0, 2, 0)
    with reading(staying, published) as slots:
        assert (staying.storage.blocks[slots] == 3).all()


def test_a_closed_pool_says_so(open_named):
    pool = open_named()
    handles = publish(pool, 1)
    pool.close()
    for use in (
        lambda: pool.allocate(1),
        lambda: pool.publish(handles),
        lambda: pool.verify(handles),
        lambda: pool.retrieve(handles),
        lambda: pool.free(handles),
        pool.recover,
        pool.stats,
        pool.unlink,
        lambda: pool.storage,
    ):
        with pytest.raises(StoreUnavailableError) as error:
            use()
        assert error.value.reason == "closed"


def test_a_view_outlives_the_pool(open_named):
    pool = open_named()
    handles = publish(pool, 1, fill=9)
    view = pool.storage.blocks[int(handles.slots[0])]
    pool.unlink()
    pool.close()
    assert (view == 9).all()


def test_stats_count_what_happened_in_all_processes(open_named):
    one, two = open_named(), open_named()
    publish(one, 5)
    handles = publish(two, 3)
    two.retrieve(handles)
    stats = one.stats()
    assert (stats.allocated, stats.published, stats.retrieved, stats.processes) == (8, 5, 3, 2)
    two.close()
    assert one.stats().processes == 1
