from __future__ import annotations

import json
from itertools import combinations
from statistics import fmean, pstdev
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.decision.noise import standard_normals
from router.decision.policy import Decision, Reason, Rule, Scores, Situation, decide_explicit, decide_routed, replay

LADDER = ("small", "large")
ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789._:-", min_size=1, max_size=128)
qualities = st.floats(0, 1)
taus = st.floats(-1, 1)
sigmas = st.floats(0, 1)


def decide(
    request_id: str, small: float, large: float, *, tau: float = 0.3, sigma: float = 0.1, **options: Any
) -> Decision:
    scores = Scores({"small": small, "large": large}, "test")
    return decide_routed(request_id, "auto", LADDER, scores, Rule(tau, sigma), **options)


def climb(quality: dict[str, float], tau: float | tuple[float, ...], **options: Any) -> Decision:
    """The decision without noise among models in the order of `quality`."""
    rule = Rule(tau, 0.0, options.pop("cost_weight", 0.0), options.pop("ttft_weight", 0.0))
    return decide_routed("r", "auto", tuple(quality), Scores(quality, "test"), rule, **options)


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


# Multiples of 1/64 add up without rounding, so that ties are ties.
exact = st.integers(-64, 64).map(lambda number: number / 64)
names = ("a", "b", "c", "d", "e")


@given(st.lists(exact, min_size=2, max_size=5), st.data())
def test_chosen_rung_has_the_best_utility_above_its_threshold_and_the_weaker_wins_ties(
    qualities: list[float], data: st.DataObject
) -> None:
    quality = dict(zip(names, qualities, strict=False))
    tau = tuple(data.draw(st.lists(exact, min_size=len(quality) - 1, max_size=len(quality) - 1)))
    unavailable = data.draw(st.sets(st.sampled_from(list(quality)), max_size=len(quality) - 2))
    heights = {name: sum(tau[:rung]) for rung, name in enumerate(quality)}
    usable = [name for name in quality if name not in unavailable]
    decision = climb(quality, tau, unavailable=unavailable)
    assert decision.model == max(usable, key=lambda name: quality[name] - heights[name])
    place = {usable[-1]: Reason.THRESHOLD_LARGE, usable[0]: Reason.THRESHOLD_SMALL}
    assert decision.reason is place.get(decision.model, Reason.THRESHOLD_MIDDLE)


def test_one_tau_counts_once_for_every_pair_of_neighbours() -> None:
    quality = {"a": 0.0, "b": 0.25, "c": 0.5}
    assert climb(quality, 0.25).model == "a"
    assert climb(quality, 0.125).model == "c"
    assert climb(quality, (0.125, 0.375)).model == "b"
    assert climb(quality, (0.125, 0.375)).reason is Reason.THRESHOLD_MIDDLE
    # Over a rung that dropped out both thresholds count.
    assert climb(quality, (0.125, 0.375), unavailable={"b"}).model == "a"
    assert climb(quality, (0.125, 0.25), unavailable={"b"}).model == "c"


def test_noise_of_more_models_begins_as_that_of_two_and_is_independent() -> None:
    samples = [standard_normals(f"request-{number}", 5) for number in range(5000)]
    assert all(values[:2] == standard_normals(f"request-{number}") for number, values in enumerate(samples))
    columns = list(zip(*samples, strict=True))
    for first, second in combinations(columns, 2):
        assert abs(fmean(x * y for x, y in zip(first, second, strict=True))) < 0.06
    assert all(abs(pstdev(column) - 1) < 0.05 for column in columns)
    # Pinned, as the first two are.
    assert round(standard_normals("req_0123456789abcdef0123456789abcdef", 3)[2], 11) == 0.90998780221


def test_cost_and_expected_ttft_count_by_their_weights() -> None:
    quality = {"a": 0.5, "b": 1.0}
    cost, ttft = {"a": 0.001, "b": 0.003}, Situation(expected_ttft_s={"a": 0.5, "b": 2.5})
    assert climb(quality, 0.25, cost=cost, situation=ttft).model == "b"
    dear = climb(quality, 0.25, cost=cost, cost_weight=200.0)
    assert (dear.model, dear.cost, dear.cost_weight) == ("a", cost, 200.0)
    slow = climb(quality, 0.25, situation=ttft, ttft_weight=0.25)
    assert (slow.model, slow.expected_ttft_s, slow.ttft_weight) == ("a", {"a": 0.5, "b": 2.5}, 0.25)


def test_expected_ttft_counts_only_if_every_usable_model_has_one() -> None:
    quality = {"a": 0.5, "b": 1.0, "c": 0.0}
    known = Situation(expected_ttft_s={"a": 0.5, "b": 2.5})
    assert climb(quality, 0.25, situation=known, ttft_weight=0.25).model == "b"
    assert climb(quality, 0.25, situation=known, ttft_weight=0.25, unavailable={"c"}).model == "a"


def test_pinned_model_is_kept_while_it_is_usable() -> None:
    quality = {"a": 0.0, "b": 0.0, "c": 1.0}
    kept = climb(quality, 0.1, situation=Situation(pinned="b"))
    assert (kept.model, kept.reason, kept.pinned, kept.scores) == ("b", Reason.STICKY, "b", quality)
    moved = climb(quality, 0.1, situation=Situation(pinned="b"), unavailable={"b"})
    assert (moved.model, moved.reason, moved.pinned) == ("c", Reason.THRESHOLD_LARGE, "b")
    alone = climb(quality, 0.1, situation=Situation(pinned="b"), unavailable={"b", "c"})
    assert (alone.model, alone.reason) == ("a", Reason.ONLY_HEALTHY)
    unknown = climb(quality, 0.1, situation=Situation(pinned="gone"))
    assert (unknown.model, unknown.pinned) == ("c", "gone")


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    ladder = names[: draw(st.integers(2, 5))]
    some = st.sets(st.sampled_from(ladder))
    weights = st.sampled_from([0.0, 0.1, 30.0])
    steps = st.lists(taus, min_size=len(ladder) - 1, max_size=len(ladder) - 1).map(tuple)
    rule = Rule(draw(st.one_of(taus, steps)), draw(sigmas), draw(weights), draw(weights))
    scores = Scores({name: draw(qualities) for name in ladder}, "test", draw(st.sampled_from([None, "why"])))
    return decide_routed(
        draw(ids),
        "auto",
        ladder,
        scores,
        rule,
        cost={name: draw(st.floats(0, 1)) for name in draw(some)},
        situation=Situation(
            draw(st.sampled_from([None, *ladder, "gone"])), {name: draw(st.floats(0, 100)) for name in draw(some)}
        ),
        unavailable=draw(some),
    )


@given(decisions())
def test_replay_of_any_logged_decision_is_equal(decision: Decision) -> None:
    assert replay(json.loads(json.dumps(decision.to_json()))) == decision
    assert replay(json.loads(decision.to_header())) == decision


def test_header_has_only_what_applies() -> None:
    told = json.loads(decide("r", 0.5, 0.5).to_header())
    assert not {"cost", "cost_weight", "expected_ttft_s", "ttft_weight", "pinned"} & set(told)
