"""Guided requests and their dense shadows: what is kept, compared and given up."""

import pytest
import torch
from prometheus_client import CollectorRegistry

from engines.reuse.metrics import ReuseMetrics
from engines.reuse.settings import ShadowSettings
from engines.reuse.shadow import Shadows

EXACT = torch.tensor([2.0, 1.0, 0.0, float("-inf")])
NEAR = torch.tensor([2.01, 1.0, 0.0, float("-inf")])
FAR = torch.tensor([0.0, 1.0, 2.0, float("-inf")])


class Watched:
    """Shadows of one sender, and their counters."""

    def __init__(self, draws=(), **settings):
        self.registry = CollectorRegistry()
        drawn = iter(draws)
        told = ShadowSettings(**{"share": 1.0, "window": 8, **settings})
        self.shadows = Shadows(told, ["large"], ReuseMetrics(self.registry), lambda: next(drawn, 0.0))

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"crossfill_reuse_{name}", labels) or 0

    def serve(self, request, logits, *, sender="large"):
        assert self.shadows.pick(request, sender)
        self.shadows.note_last_chunk(request)
        assert self.shadows.is_due(request)
        return self.shadows.look(request, logits)

    def shadow(self, request, logits=EXACT):
        name = f"shadow-{request}"
        self.shadows.expect(name, {"crossfill": {"shadow_of": request}})
        self.shadows.note_last_chunk(name)
        assert self.shadows.is_due(name)
        return self.shadows.look(name, logits)


def test_a_share_of_requests_is_picked():
    watched = Watched(draws=(0.1, 0.3, 0.2, 0.29), share=0.3)
    assert [watched.shadows.pick(str(number), "large") for number in range(4)] == [True, False, True, True]
    none = Watched(draws=(0.0,), share=0.0)
    assert not none.shadows.pick("r", "large")
    assert not none.shadows.is_due("r")


def test_a_request_and_its_shadow_are_compared_over_the_whole_vocabulary():
    watched = Watched()
    assert watched.serve("r", FAR) is None
    assert watched.count("shadows_total", result="compared") == 0
    assert watched.shadow("r") is None
    assert watched.count("shadows_total", result="compared") == 1
    p = EXACT[:3].softmax(dim=0)
    want = float((p * (EXACT[:3].log_softmax(dim=0) - FAR[:3].log_softmax(dim=0))).sum())
    assert watched.count("shadow_divergence_nats_sum", sender="large") == pytest.approx(want, rel=1e-5)
    assert watched.count("shadow_disagreements_total", sender="large") == 1


def test_equal_distributions_do_not_diverge():
    watched = Watched()
    watched.serve("r", EXACT + 5)
    watched.shadow("r")
    assert watched.count("shadow_divergence_nats_sum", sender="large") == pytest.approx(0, abs=1e-6)
    assert watched.count("shadow_disagreements_total", sender="large") == 0


def test_drift_is_what_a_full_window_says_beyond_chance():
    watched = Watched(max_divergence=0.5)
    assert watched.count("drifted", sender="large") == 0
    found = []
    for number in range(8):
        watched.serve(str(number), FAR)
        found.append(watched.shadow(str(number)))
    assert found == [None] * 7 + ["large"]
    assert watched.count("drifted", sender="large") == 1


def test_a_few_bad_ones_among_good_ones_are_no_drift():
    watched = Watched(max_divergence=0.1)
    for number in range(40):
        watched.serve(str(number), FAR if number % 8 == 7 else NEAR)
        assert watched.shadow(str(number)) is None
    assert watched.count("shadow_divergence_nats_sum", sender="large") / 40 > 0.1
    assert watched.count("drifted", sender="large") == 0


def test_only_the_last_ones_decide():
    watched = Watched(max_divergence=0.5)
    for number in range(8):
        watched.serve(str(number), NEAR)
        watched.shadow(str(number))
    found = []
    for number in range(8, 16):
        watched.serve(str(number), FAR)
        found.append(watched.shadow(str(number)))
    # Not before most of the window is bad, though by then good ones are still counted.
    assert found[:4] == [None] * 4
    assert "large" in found


def test_what_waits_too_long_is_dropped_and_counted():
    watched = Watched()
    for number in range(17):
        watched.serve(str(number), EXACT)
    assert watched.count("shadows_total", result="dropped") == 1
    watched.shadow("0")
    assert watched.count("shadows_total", result="compared") == 0
    watched.shadow("1")
    assert watched.count("shadows_total", result="compared") == 1


def test_requests_that_are_gone_are_forgotten():
    watched = Watched()
    watched.shadows.pick("r-1", "large")
    watched.shadows.note_last_chunk("r-1")
    watched.shadows.expect("shadow-r-0", {"crossfill": {"shadow_of": "r-0"}})
    watched.shadows.forget("")
    for request in ("r-1", "shadow-r-0"):
        watched.shadows.note_last_chunk(request)
        assert not watched.shadows.is_due(request)


def test_an_answer_that_was_served_before_all_were_aborted_is_still_compared():
    watched = Watched()
    watched.serve("r", NEAR)
    watched.shadows.forget("")
    watched.shadow("r")
    assert watched.count("shadows_total", result="compared") == 1


@pytest.mark.parametrize("said", [None, {}, {"crossfill": "r"}, {"crossfill": {"shadow_of": 7}}])
def test_what_is_no_shadow_is_not_looked_at(said):
    watched = Watched()
    watched.serve("r", EXACT)
    watched.shadows.expect("other", said)
    watched.shadows.note_last_chunk("other")
    assert not watched.shadows.is_due("other")


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"max_divergence": 0}, {"window": 2}, {"windw": 8}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ShadowSettings(**wrong)
