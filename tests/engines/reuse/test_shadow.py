"""Which guided requests are compared, when, and what becomes of those that are not."""

import itertools

import pytest
import torch
from prometheus_client import CollectorRegistry

from engines.reuse.settings import ShadowSettings
from engines.reuse.shadow import _MOST_HELD, _MOST_TRIES, Shadow
from engines.reuse.shadow_metrics import ShadowMetrics

TOKENS = list(range(100))
SAME, OTHER = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])


class Watch:
    """A shadow with what it counts, whom it excludes, and a clock and draws of our own."""

    def __init__(self, draws=(0.0,), **settings):
        self.registry, self.excluded, self.now = CollectorRegistry(), [], 0.0
        draw = itertools.cycle(draws)
        settings = ShadowSettings(**{"share": 1.0, "window": 8, **settings})
        senders = ("large", "larger")
        self.shadow = Shadow(
            settings,
            senders,
            ShadowMetrics(senders, self.registry),
            self.excluded.append,
            draw=lambda: next(draw),
            clock=lambda: self.now,
        )

    def dropped(self, reason):
        labels = {"result": "dropped", "reason": reason}
        return self.registry.get_sample_value("crossfill_reuse_shadow_prefills_total", labels) or 0

    def compared(self, sender="large"):
        name = "crossfill_reuse_shadow_divergence_nats_count"
        return self.registry.get_sample_value(name, {"sender": sender})

    def drifted(self, sender="large"):
        return self.registry.get_sample_value("crossfill_reuse_drifted", {"sender": sender})

    def guide(self, request_id="r", sender="large", tokens=TOKENS, logits=SAME):
        """A guided request from its first chunk to its last."""
        self.shadow.offer(request_id, tokens, sender)
        self.shadow.take(request_id, len(tokens), logits)

    def prefill(self, logits=SAME):
        """What an idle worker does; the prompt that it computed, or None."""
        prefill = self.shadow.begin()
        if prefill is not None:
            self.shadow.take(prefill.request_id, len(prefill.tokens), logits)
        return prefill and list(prefill.tokens)


def test_a_drawn_request_is_prefilled_again_and_compared():
    watch = Watch()
    watch.guide()
    assert watch.shadow.has_work
    assert watch.prefill() == TOKENS
    assert watch.compared() == 1
    assert watch.registry.get_sample_value("crossfill_reuse_shadow_agreements_total", {"sender": "large"}) == 1
    assert not watch.shadow.has_work
    assert not watch.shadow.wants_logits
    assert watch.prefill() is None


def test_a_disagreement_is_measured():
    watch = Watch()
    watch.guide()
    watch.prefill(OTHER)
    total = watch.registry.get_sample_value("crossfill_reuse_shadow_divergence_nats_sum", {"sender": "large"})
    assert total == pytest.approx(0.364, abs=0.01)
    assert watch.registry.get_sample_value("crossfill_reuse_shadow_agreements_total", {"sender": "large"}) == 0


def test_the_share_decides_who_is_drawn():
    watch = Watch(draws=(0.1, 0.3, 0.29, 0.9), share=0.3)
    for number in range(4):
        watch.guide(f"r{number}", tokens=[number])
    assert [watch.prefill(), watch.prefill(), watch.prefill()] == [[0], [2], None]
    off = Watch(share=0.0)
    off.guide()
    assert off.prefill() is None


def test_logits_of_the_whole_prompt_count_and_no_others():
    watch = Watch()
    watch.shadow.offer("r", TOKENS, "large")
    watch.shadow.take("other", 100, OTHER)
    watch.shadow.take("r", 64, OTHER)
    assert not watch.shadow.has_work
    guided = SAME.clone()
    watch.shadow.take("r", 100, guided)
    # As sampling does.
    guided.fill_(7)
    prefill = watch.shadow.begin()
    watch.shadow.take(prefill.request_id, 64, OTHER)
    assert watch.compared() == 0
    watch.shadow.take(prefill.request_id, 100, SAME)
    assert watch.compared() == 1
    assert watch.registry.get_sample_value("crossfill_reuse_shadow_divergence_nats_sum", {"sender": "large"}) < 1e-9


def test_long_prompts_are_not_compared():
    watch = Watch(max_tokens=99)
    watch.guide()
    assert watch.prefill() is None
    assert watch.dropped("too_long") == 1


def test_few_requests_are_held():
    watch = Watch()
    for number in range(_MOST_HELD + 3):
        watch.guide(f"r{number}")
    assert watch.dropped("queue_full") == 3
    assert sum(watch.prefill() is not None for _ in range(_MOST_HELD + 3)) == _MOST_HELD


def test_what_waited_long_is_dropped():
    watch = Watch()
    watch.guide("old")
    watch.shadow.offer("never ended", TOKENS, "large")
    watch.now = 400.0
    watch.guide("young", tokens=[5])
    watch.now = 700.0
    assert watch.prefill() == [5]
    assert watch.dropped("late") == 2
    assert not watch.shadow.wants_logits


def test_real_requests_interrupt_and_after_some_tries_it_is_given_up():
    watch = Watch()
    watch.guide()
    ids = set()
    for _ in range(_MOST_TRIES):
        ids.add(watch.shadow.begin().request_id)
        assert watch.shadow.is_own(watch.shadow.running)
        watch.shadow.forget(watch.shadow.running)
        assert watch.shadow.running is None
    assert watch.shadow.begin() is None
    assert watch.dropped("busy") == 1
    # SGLang may still hold one that was given up when the next begins.
    assert len(ids) == _MOST_TRIES


def test_an_aborted_request_is_not_compared_unless_its_prefill_has_ended():
    watch = Watch()
    watch.shadow.offer("gone", TOKENS, "large")
    watch.guide("answering", tokens=[1])
    watch.shadow.forget("gone")
    watch.shadow.forget("answering")
    assert watch.dropped("aborted") == 1
    assert watch.prefill() == [1]


def test_a_prefill_that_ends_without_logits_is_dropped():
    watch = Watch()
    watch.guide()
    assert watch.shadow.begin() is not None
    assert watch.shadow.begin() is None
    assert watch.dropped("failed") == 1
    watch.guide()
    watch.prefill(torch.full((3,), float("nan")))
    assert watch.dropped("failed") == 2
    assert watch.compared() == 0


def test_nothing_is_compared_across_a_change_of_weights():
    watch = Watch()
    watch.guide("waits")
    watch.shadow.offer("is prefilled", TOKENS, "large")
    watch.shadow.stop()
    watch.guide("later")
    assert watch.prefill() is None
    assert watch.dropped("weights_changed") == 2


def test_a_pair_that_drifts_is_excluded_once_and_the_other_is_not(caplog):
    watch = Watch(max_divergence=0.1)
    for number in range(10):
        watch.guide(f"a{number}")
        watch.guide(f"b{number}", sender="larger")
        watch.prefill(OTHER)
        watch.prefill(SAME)
    assert watch.excluded == ["large"]
    assert (watch.drifted("large"), watch.drifted("larger")) == (1, 0)
    [record] = [one for one in caplog.records if "drifted" in one.getMessage()]
    assert "last 8" in record.getMessage()
    # Nothing more of it is drawn; the other goes on.
    assert (watch.compared("large"), watch.compared("larger")) == (8, 10)


def test_a_pair_that_does_not_is_left_alone():
    watch = Watch(max_divergence=0.5)
    for number in range(20):
        watch.guide(f"r{number}")
        watch.prefill(OTHER)
    assert watch.excluded == []
    assert watch.compared() == 20
