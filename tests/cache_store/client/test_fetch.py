import threading
import time

import pytest

from cache_store.client.fetch import Fetcher
from cache_store.errors import StoreUnavailableError
from cache_store.keys import PAGE
from cache_store.metrics import FetchEnd

TOKENS = list(range(4 * PAGE))
NAMES = ("mass/0", "mass/1", "kv/1")
# Longer than anything here takes; a test that waits for it has failed.
LONG_S = 30.0


@pytest.fixture
def fetcher(store):
    fetcher = Fetcher(store, threads=2, in_flight=4)
    yield fetcher
    fetcher.close()


def ended(fetch):
    """How a fetch ended, once it has."""
    until_s = time.monotonic() + LONG_S
    while fetch.end is None and time.monotonic() < until_s:
        time.sleep(0.001)
    return fetch.end


def fetching_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("crossfill-fetch")]


def test_coverage_and_then_each_layer_come(store, fetcher, namespace, made, counted):
    records = made(namespace, TOKENS, NAMES, pages=(0, 2))
    store.publish(namespace, TOKENS, records)
    fetch = fetcher.start("r", namespace, TOKENS, [*NAMES, "mass/2"], LONG_S)
    assert fetch.coverage(LONG_S) == store.match(namespace, TOKENS)
    assert fetch.take(1, LONG_S) == {
        "mass/1": {0: records[0][1], 2: records[2][1]},
        "kv/1": {0: records[0][2], 2: records[2][2]},
    }
    assert fetch.take(0, LONG_S) == {"mass/0": {0: records[0][0], 2: records[2][0]}}
    assert fetch.take(2, LONG_S) == {}, "a layer that nobody published is ready, and empty"
    assert ended(fetch) is FetchEnd.DONE
    assert fetch.take(0) is None, "records are handed out once"
    assert not fetch.ready(0)
    assert counted("fetches_total", end="done") == 1


def test_a_layer_is_ready_before_the_next_one_is_read(backend, store, fetcher, namespace, made, monkeypatch):
    store.publish(namespace, TOKENS, made(namespace, TOKENS, NAMES))
    turns = threading.Semaphore(0)
    read = backend.backend.read
    monkeypatch.setattr(backend.backend, "read", lambda *given: turns.acquire(timeout=LONG_S) and read(*given))
    fetch = fetcher.start("r", namespace, TOKENS, NAMES, LONG_S)
    assert fetch.coverage(LONG_S).contiguous_pages("kv/1") == 4
    assert not fetch.ready(0)
    turns.release()
    assert len(fetch.take(0, LONG_S)["mass/0"]) == 4
    assert not fetch.ready(1)
    assert fetch.take(1) is None
    turns.release()
    assert ended(fetch) is FetchEnd.DONE
    assert fetch.ready(1)


def test_a_backend_that_hangs_costs_the_deadline_and_no_more(backend, fetcher, namespace, counted):
    backend.hang()
    started_s = time.monotonic()
    fetch = fetcher.start("r", namespace, TOKENS, NAMES, deadline_s=0.05)
    assert fetch.coverage(LONG_S) is None
    assert fetch.take(0, LONG_S) is None
    assert time.monotonic() - started_s < LONG_S / 2
    assert fetch.end is FetchEnd.DEADLINE
    assert counted("fetches_total", end="deadline") == 1
    backend.go_on()
    assert fetcher.start("r", namespace, TOKENS, NAMES, LONG_S).coverage(LONG_S) is not None


def test_waiting_for_coverage_ends_before_the_deadline_if_asked(backend, fetcher, namespace):
    backend.hang()
    started_s = time.monotonic()
    fetch = fetcher.start("r", namespace, TOKENS, NAMES, deadline_s=LONG_S)
    assert fetch.coverage(0.02) is None
    assert fetch.coverage() is None
    assert time.monotonic() - started_s < LONG_S / 2
    assert fetch.end is None
    backend.go_on()
    assert fetch.coverage(LONG_S) is not None


def test_what_came_before_the_deadline_can_be_used_after_it(backend, store, namespace, made, monkeypatch):
    names = (*NAMES, "mass/2")
    store.publish(namespace, TOKENS, made(namespace, TOKENS, names))
    turns, now = threading.Semaphore(1), [0.0]
    read = backend.backend.read
    monkeypatch.setattr(backend.backend, "read", lambda *given: turns.acquire(timeout=LONG_S) and read(*given))
    fetcher = Fetcher(store, clock=lambda: now[0])
    fetch = fetcher.start("r", namespace, TOKENS, names, deadline_s=1.0)
    while not fetch.ready(0):
        time.sleep(0.001)
    now[0] = 2.0
    assert fetch.end is FetchEnd.DEADLINE
    turns.release(2)
    fetcher.close()
    assert fetch.coverage().contiguous_pages("mass/0") == 4
    assert len(fetch.take(0)["mass/0"]) == 4
    assert fetch.take(1, LONG_S) is None
    assert backend.calls["read"] <= 2, "what is late is not even asked for"


def test_threads_and_fetches_in_flight_are_bounded_while_the_backend_hangs(backend, fetcher, namespace, counted):
    before = len(fetching_threads())
    backend.hang()
    fetches = [fetcher.start(str(number), namespace, TOKENS, NAMES, LONG_S) for number in range(10)]
    assert [fetch.end for fetch in fetches] == [None] * 4 + [FetchEnd.BUSY] * 6
    assert counted("fetches_total", end="busy") == 6
    assert len(fetching_threads()) - before <= 2
    assert fetches[9].coverage(LONG_S) is None
    backend.go_on()
    assert [ended(fetch) for fetch in fetches[:4]] == [FetchEnd.DONE] * 4
    assert ended(fetcher.start("again", namespace, TOKENS, NAMES, LONG_S)) is FetchEnd.DONE


def test_what_waits_for_its_turn_is_bounded_in_bytes(store, namespace, made, counted):
    records = made(namespace, TOKENS, NAMES)
    store.publish(namespace, TOKENS, records)
    one_layer = sum(len(record.payload) for page in records.values() for record in page if record.layer == 0)
    fetcher = Fetcher(store, held_bytes=one_layer)
    whole = fetcher.start("whole", namespace, TOKENS, ["mass/0"], LONG_S)
    assert ended(whole) is FetchEnd.DONE
    cut = fetcher.start("cut", namespace, TOKENS, NAMES, LONG_S)
    assert ended(cut) is FetchEnd.BUSY
    assert cut.ready(0)
    assert not cut.ready(1)
    assert fetcher.start("refused", namespace, TOKENS, NAMES, LONG_S).end is FetchEnd.BUSY
    assert counted("fetches_total", end="busy") == 2
    # What is taken or given up makes room.
    assert whole.take(0)
    cut.cancel()
    again = fetcher.start("again", namespace, TOKENS, ["mass/0"], LONG_S)
    assert ended(again) is FetchEnd.DONE
    again.cancel()
    assert fetcher._held.size_bytes == 0
    fetcher.close()


def test_a_cancelled_fetch_reads_no_further_and_keeps_nothing(backend, store, fetcher, namespace, made, counted):
    store.publish(namespace, TOKENS, made(namespace, TOKENS, NAMES))
    finished = fetcher.start("done", namespace, TOKENS, NAMES, LONG_S)
    assert ended(finished) is FetchEnd.DONE
    assert finished.ready(0)
    finished.cancel()
    assert (finished.coverage(), finished.ready(0), finished.take(0)) == (None, False, None)

    reads = backend.calls["read"]
    backend.hang("read")
    running = fetcher.start("running", namespace, TOKENS, NAMES, LONG_S)
    assert running.coverage(LONG_S) is not None
    running.cancel()
    assert running.end is FetchEnd.CANCELLED
    backend.go_on()
    # Its thread is done with it when another fetch that needs both threads' turns has ended.
    for _ in range(4):
        assert ended(fetcher.start("later", namespace, TOKENS, ["map/9"], LONG_S)) is FetchEnd.DONE
    assert backend.calls["read"] <= reads + 1
    assert (running.coverage(), running.take(0)) == (None, None)
    assert counted("fetches_total", end="cancelled") == 1


def test_cancelling_one_that_waits_makes_room(backend, fetcher, namespace):
    backend.hang()
    fetches = [fetcher.start(str(number), namespace, TOKENS, NAMES, LONG_S) for number in range(4)]
    while backend.calls["lookup"] < 2:
        time.sleep(0.001)
    assert fetcher.start("5", namespace, TOKENS, NAMES, LONG_S).end is FetchEnd.BUSY
    fetches[3].cancel()
    assert fetcher.start("6", namespace, TOKENS, NAMES, LONG_S).end is None


def test_one_that_waited_in_vain_makes_room(backend, fetcher, namespace):
    backend.hang()
    fetches = [fetcher.start(str(number), namespace, TOKENS, NAMES, 0.05) for number in range(4)]
    assert [ended(fetch) for fetch in fetches] == [FetchEnd.DEADLINE] * 4
    # Two threads hang, two fetches never came to one.
    further = [fetcher.start(str(number), namespace, TOKENS, NAMES, LONG_S) for number in range(3)]
    assert [fetch.end for fetch in further] == [None, None, FetchEnd.BUSY]
    backend.go_on()
    assert ended(further[0]) is FetchEnd.DONE


def test_a_backend_that_is_away_ends_the_fetch_with_that_reason(backend, fetcher, namespace, counted, caplog):
    backend.error = StoreUnavailableError("connection refused", "refused")
    for number in range(5):
        fetch = fetcher.start(f"request-{number}", namespace, TOKENS, NAMES, LONG_S)
        assert fetch.coverage(LONG_S) is None
        assert fetch.end is FetchEnd.UNAVAILABLE
    assert counted("fetches_total", end="unavailable") == 5
    assert caplog.messages == ["request-0: the store did not answer: connection refused"]


@pytest.mark.parametrize("error", [RuntimeError("a defect"), SystemExit("a defect"), KeyboardInterrupt("a defect")])
def test_a_defect_ends_its_fetch_and_no_other_and_is_logged_once_a_minute(backend, fetcher, namespace, caplog, error):
    backend.error = error
    for number in range(3):
        started_s = time.monotonic()
        assert ended(fetcher.start(f"r{number}", namespace, TOKENS, NAMES, LONG_S)) is FetchEnd.FAILED
        assert time.monotonic() - started_s < LONG_S / 2
    assert caplog.messages == [f"r0: a fetch failed: {error!r}"]
    assert "Traceback" not in caplog.text
    backend.error = None
    assert ended(fetcher.start("r", namespace, TOKENS, NAMES, LONG_S)) is FetchEnd.DONE


def test_a_name_that_is_none_is_told_to_whoever_starts(fetcher, namespace):
    with pytest.raises(ValueError, match="no name of a record"):
        fetcher.start("r", namespace, TOKENS, ["mass"], LONG_S)


def test_after_close_nothing_is_started(fetcher, namespace):
    fetcher.close()
    assert fetcher.start("r", namespace, TOKENS, NAMES, LONG_S).end is FetchEnd.BUSY
