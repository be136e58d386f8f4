from __future__ import annotations

import json
from statistics import fmean, pstdev
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.policy import Decision, Reason, Scores, decide_explicit, decide_routed, replay, standard_normals

LADDER = ("small", "large")
ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789._:-", min_size=1, max_size=128)
qualities = st.floats(0, 1)
taus = st.floats(-1, 1)
sigmas = st.floats(0, 1)


def decide(request_id: str, small: float, large: float, **options: Any) -> Decision:
    options = {"tau": 0.3, "sigma": 0.1} | options
    return decide_routed(request_id, "auto", LADDER, Scores({"small": small, "large": large}, "test"), **options)


@given(ids, qualities, qualities, taus, sigmas)
def test_rule_is_the_one_of_the_paper(request_id: str, small: float, large: float, tau: float, sigma: float) -> None:
    decision = decide(request_id, small, large, tau=tau, sigma=sigma)
    is_large = large + decision.noise["large"] > small + decision.noise["small"] + tau
    assert decision.model == ("large" if is_large else "small")
    assert decision.reason is (Reason.THRESHOLD_LARGE if is_large else Reason.THRESHOLD_SMALL)


@given(ids, qualities, qualities, st.floats(0, 1), taus, sigmas)
def test_a_better_large_model_never_loses_a_query(
    request_id: str, small: float, large: float, gain: float, tau: float, sigma: float
) -> None:
    if decide(request_id, small, large, tau=tau, sigma=sigma).model == "large":
        assert decide(request_id, small, large + gain, tau=tau, sigma=sigma).model == "large"
    else:
        assert decide(request_id, small + gain, large, tau=tau, sigma=sigma).model == "small"


@given(ids, qualities, qualities, taus, st.floats(0, 1), sigmas)
def test_a_higher_threshold_never_wins_the_large_model_a_query(
    request_id: str, small: float, large: float, tau: float, more: float, sigma: float
) -> None:
    if decide(request_id, small, large, tau=tau + more, sigma=sigma).model == "large":
        assert decide(request_id, small, large, tau=tau, sigma=sigma).model == "large"


@given(ids, qualities, qualities, taus)
def test_without_sigma_only_the_scores_count(request_id: str, small: float, large: float, tau: float) -> None:
    decision = decide(request_id, small, large, tau=tau, sigma=0.0)
    assert decision.noise == {"small": 0.0, "large": 0.0}
    assert decision.model == ("large" if large > small + tau else "small")


@given(ids, qualities, qualities, taus, st.floats(0.001, 1))
def test_threshold_flips_only_inside_noise_band(
    request_id: str, small: float, large: float, tau: float, sigma: float
) -> None:
    noisy = decide(request_id, small, large, tau=tau, sigma=sigma)
    plain = decide(request_id, small, large, tau=tau, sigma=0.0)
    if noisy.model != plain.model:
        assert abs(large - small - tau) <= abs(noisy.noise["large"] - noisy.noise["small"]) + 1e-9


def test_noise_does_flip_decisions_at_the_threshold() -> None:
    models = [decide(f"id-{number}", 0.5, 0.8).model for number in range(1000)]
    assert 400 < models.count("large") < 600


def test_noise_is_standard_normal_and_its_two_values_are_independent() -> None:
    pairs = [standard_normals(f"request-{number}") for number in range(20_000)]
    for values in zip(*pairs, strict=True):
        assert abs(fmean(values)) < 0.03
        assert abs(pstdev(values) - 1) < 0.03
        assert abs(sum(abs(value) < 1 for value in values) / len(values) - 0.6827) < 0.02
    assert abs(fmean(first * second for first, second in pairs)) < 0.03


def test_noise_of_an_id_is_a_fact() -> None:
    # Pinned: a logged decision must be replayable by any later version on any machine.
    small, large = standard_normals("req_0123456789abcdef0123456789abcdef")
    assert (round(small, 11), round(large, 11)) == (-1.33599405995, -1.90483763765)


@given(ids, qualities, qualities, taus, sigmas, st.sampled_from([(), ("small",), ("large",), LADDER]))
def test_replay_of_a_logged_decision_is_equal(
    request_id: str, small: float, large: float, tau: float, sigma: float, unavailable: tuple[str, ...]
) -> None:
    decision = decide(request_id, small, large, tau=tau, sigma=sigma, unavailable=unavailable)
    assert replay(json.loads(json.dumps(decision.to_json()))) == decision
    assert replay(json.loads(decision.to_header())) == decision
    assert replay(json.loads(json.dumps(decision.to_json(), sort_keys=True))) == decision


def test_explicit_decision_replays() -> None:
    decision = decide_explicit("r", "org/m", tau=0.3, sigma=0.1)
    assert replay(json.loads(decision.to_header())) == decision
    assert (decision.model, decision.reason, decision.requested) == ("org/m", Reason.EXPLICIT, "org/m")


@given(ids, qualities, qualities)
def test_the_only_available_model_is_taken_whatever_the_scores(request_id: str, small: float, large: float) -> None:
    for gone, left in (("small", "large"), ("large", "small")):
        decision = decide(request_id, small, large, unavailable={gone})
        assert (decision.model, decision.reason, decision.unavailable) == (left, Reason.ONLY_HEALTHY, (gone,))


@given(ids)
def test_header_is_compact_ascii(request_id: str) -> None:
    header = decide(request_id, 0.5, 0.5).to_header()
    assert header.isascii()
    assert header.isprintable()
    assert ": " not in header
