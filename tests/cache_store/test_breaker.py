"""The breaker: when it opens, whom it lets through, and how it closes again."""

import pytest

from cache_store.backends.breaker import Breaker, BreakerState


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures=3, delay_s=5.0, clock=clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.fail()


def test_it_admits_until_enough_calls_failed_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.admit()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    assert not breaker.admit()
    assert breaker.state is BreakerState.OPEN


def test_an_answer_in_between_starts_the_count_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeed()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_after_the_delay_one_probe_is_admitted(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 4.9
    assert not breaker.admit()
    clock.now_s += 0.2
    assert breaker.state is BreakerState.HALF_OPEN
    assert [breaker.admit() for _ in range(3)] == [True, False, False]


def test_a_probe_with_an_answer_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 6
    assert breaker.admit()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.admit() for _ in range(3)] == [True] * 3


def test_a_probe_without_answer_opens_it_for_the_delay_again(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 6
    assert breaker.admit()
    breaker.fail()
    clock.now_s += 4.9
    assert not breaker.admit()
    clock.now_s += 0.2
    assert breaker.admit()


def test_a_probe_that_never_reports_does_not_keep_it_open_for_ever(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 6
    assert breaker.admit()
    clock.now_s += 6
    assert breaker.admit()
