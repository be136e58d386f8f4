from __future__ import annotations

import pytest

from router.sessions.prefill_rate import PrefillRates


def test_a_configured_rate_is_taken_as_it_is() -> None:
    rates = PrefillRates({"m": 1234.0})
    for _ in range(50):
        rates.observe("m", 1000, 10)
    assert rates.tokens_per_s("m") == 1234.0


def test_a_rate_is_unknown_until_enough_was_seen() -> None:
    rates = PrefillRates({"m": None})
    seen = []
    for _ in range(6):
        seen.append(rates.tokens_per_s("m"))
        rates.observe("m", 1000, 0.5)
    assert seen == [None] * 5 + [pytest.approx(2000)]
    assert rates.tokens_per_s("other") is None


def test_short_prefills_and_impossible_times_teach_nothing() -> None:
    rates = PrefillRates({"m": None})
    for _ in range(20):
        rates.observe("m", 127, 0.5)
        rates.observe("m", 1000, 0.0)
        rates.observe("m", 1000, -1.0)
    assert rates.tokens_per_s("m") is None


def test_long_prefills_count_most() -> None:
    # Each answer takes 50 ms beside its prefill; the mean of the single rates would be far too low.
    rates = PrefillRates({"m": None})
    for tokens in [200, 200, 200, 20_000] * 5:
        rates.observe("m", tokens, 0.05 + tokens / 10_000)
    assert rates.tokens_per_s("m") == pytest.approx(10_000, rel=0.1)


def test_the_estimate_follows_a_change() -> None:
    rates = PrefillRates({"m": None})
    for _ in range(300):
        rates.observe("m", 1000, 1.0)
    for _ in range(200):
        rates.observe("m", 1000, 0.1)
    assert rates.tokens_per_s("m") == pytest.approx(10_000, rel=0.2)
