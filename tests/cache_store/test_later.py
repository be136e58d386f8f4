"""A store that is opened when it is first asked."""

import threading

import pytest

from cache_store.backends.memory import MemoryBackend
from cache_store.errors import StoreUnavailableError, StoreVersionError
from cache_store.later import Later


class Opening:
    """Opens a store in memory, or fails as it is told; counts its calls."""

    def __init__(self):
        self.calls, self.error, self.now_s = 0, None, 100.0

    def __call__(self):
        self.calls += 1
        if self.error:
            raise self.error
        return MemoryBackend()

    def later(self):
        return Later(self, pause_s=5, clock=lambda: self.now_s)


def test_nothing_is_opened_until_it_is_asked_for_and_then_once():
    opening = Opening()
    later = opening.later()
    assert opening.calls == 0
    assert later.backend() is later.backend()
    assert opening.calls == 1


def test_after_a_failure_it_is_tried_again_when_the_pause_is_over():
    opening = Opening()
    later = opening.later()
    opening.error = StoreUnavailableError("refused", "refused")
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="refused"):
            later.backend()
    assert opening.calls == 1
    opening.now_s += 5
    opening.error = None
    assert later.backend().stats().size_bytes == 0


def test_each_failure_is_an_exception_of_its_own():
    opening = Opening()
    later = opening.later()
    opening.error = StoreUnavailableError("refused", "refused")
    told = []
    for _ in range(3):
        with pytest.raises(StoreUnavailableError) as caught:
            later.backend()
        told.append(caught.value)
    assert len(set(map(id, told))) == 3


def test_whatever_keeps_it_from_opening_makes_it_unavailable():
    opening = Opening()
    opening.error = StoreVersionError("of another version")
    with pytest.raises(StoreUnavailableError, match="of another version") as refused:
        opening.later().backend()
    assert refused.value.reason == "version"


def test_while_one_opens_it_nobody_else_waits():
    begun, go_on = threading.Event(), threading.Event()

    def slowly():
        begun.set()
        assert go_on.wait(30)
        return MemoryBackend()

    later = Later(slowly)
    thread = threading.Thread(target=later.backend)
    thread.start()
    assert begun.wait(30)
    with pytest.raises(StoreUnavailableError) as busy:
        later.backend()
    go_on.set()
    thread.join()
    assert busy.value.reason == "opening"
    assert later.backend().stats().size_bytes == 0


def test_what_is_closed_is_opened_no_more():
    opening = Opening()
    later = opening.later()
    open_one = later.backend()
    later.close()
    with pytest.raises(StoreUnavailableError):
        open_one.stats()
    never = opening.later()
    never.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        never.backend()
