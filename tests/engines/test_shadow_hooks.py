"""A shadow prefill as SGLang sees it: made when nothing else is to do, given up for real requests, never heard of."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from engines.hooks import SchedulerHooks
from engines.reuse.settings import ShadowSettings
from engines.reuse.shadow import Shadow
from engines.reuse.shadow_metrics import ShadowMetrics
from engines.shadow_hooks import ShadowHooks

from .test_hooks import Engine, batch, forward, received, request


@pytest.fixture
def hooks():
    """Both kinds, with a real shadow of everything and an engine that guides everything by `large`."""
    part = ShadowHooks()
    hooks = SchedulerHooks(part)
    part.engine = hooks.engine = Engine()
    hooks.engine.sender_of = lambda _: "large"
    metrics = ShadowMetrics(["large"], CollectorRegistry())
    part.shadow = Shadow(ShadowSettings(share=1.0), ["large"], metrics, lambda _: None, draw=lambda: 0.0)
    return hooks


@pytest.fixture
def part(hooks):
    return hooks._shadow


class Scheduler:
    """Makes requests as SGLang's does, and calls the hook on its aborts."""

    def __init__(self, hooks, idle=True):
        self.hooks, self.idle, self.made, self.aborted = hooks, idle, [], []

    def is_fully_idle(self):
        return self.idle

    def handle_generate_request(self, wanted):
        made = SimpleNamespace(rid=wanted.rid, wanted=wanted, sampling_params=wanted.sampling_params)
        self.hooks.after_create(made, self, wanted)
        self.made.append(made)

    def abort_request(self, abort):
        self.hooks.before_abort(self, abort)
        self.aborted.append(abort.rid)


def guide(hooks, part, rid="r"):
    """A guided request of two tokens, prefilled in one chunk."""
    made = request(rid=rid)
    made.is_prefill_only = False
    hooks.after_batch(forward(), None, batch(made))
    sampled(part, rid)


def sampled(part, rid, length=2, is_extend=True):
    logits = SimpleNamespace(next_token_logits=torch.tensor([[1.0, 0.0]]))
    mode = SimpleNamespace(is_extend=lambda: is_extend)
    chunk = SimpleNamespace(forward_mode=mode, rids=[rid], seq_lens_cpu=torch.tensor([length]))
    part.before_sample(None, logits, chunk)


def test_an_idle_scheduler_prefills_the_prompt_of_a_guided_request(hooks, part):
    guide(hooks, part)
    scheduler = Scheduler(hooks)
    hooks.engine.calls.clear()
    part.before_idle(scheduler)
    [made] = scheduler.made
    wanted = made.wanted
    assert (list(wanted.input_ids), wanted.stream, wanted.return_logprob) == ([1, 2], False, False)
    assert (wanted.sampling_params.max_new_tokens, wanted.sampling_params.custom_params) == (1, None)
    # Never said to anybody, and never found in the prefix cache.
    assert (made.finished_output, made.skip_radix_cache_insert) == (True, True)
    assert hooks.engine.calls == []
    sampled(part, made.rid)
    assert not part.shadow.has_work


def test_a_shadow_prefill_is_planned_by_nobody(hooks, part):
    guide(hooks, part)
    scheduler = Scheduler(hooks)
    part.before_idle(scheduler)
    hooks.engine.calls.clear()
    [made] = scheduler.made
    hooks.after_retract(None, made)
    other = request(rid="other")
    other.is_prefill_only = False
    hooks.after_batch(forward(count=2), None, batch(made, other))
    assert {call[1] for call in hooks.engine.calls if len(call) > 1} == {"other"}


@pytest.mark.parametrize("idle", [True, False])
def test_only_an_idle_scheduler_is_given_work(hooks, part, idle):
    guide(hooks, part)
    scheduler = Scheduler(hooks, idle=idle)
    part.before_idle(scheduler)
    assert len(scheduler.made) == idle


def test_without_a_drawn_request_an_idle_scheduler_stays_so(hooks, part):
    scheduler = Scheduler(hooks)
    part.before_idle(scheduler)
    hooks.after_create(request(), scheduler, received())
    assert (scheduler.made, scheduler.aborted) == ([], [])


def test_a_real_request_interrupts_and_the_next_pause_begins_again(hooks, part):
    guide(hooks, part)
    scheduler = Scheduler(hooks)
    part.before_idle(scheduler)
    hooks.after_create(request(rid="real"), scheduler, received())
    [first] = scheduler.made
    assert scheduler.aborted == [first.rid]
    assert ("arrive", "real") in [call[:2] for call in hooks.engine.calls]
    part.before_idle(scheduler)
    assert len(scheduler.made) == 2
    # One that was given up is still none of the clients'.
    assert part.is_own(first)


def test_decodes_and_dense_requests_are_not_compared(hooks, part):
    made = request()
    made.is_prefill_only = False
    hooks.after_batch(forward(), None, batch(made))
    sampled(part, "r", is_extend=False)
    assert not part.shadow.has_work
    hooks.engine.sender_of = lambda _: None
    guide(hooks, part, rid="dense")
    assert not part.shadow.has_work


def test_aborts_and_new_weights_are_told(hooks, part):
    guide(hooks, part)
    scheduler = Scheduler(hooks)
    part.before_idle(scheduler)
    hooks.before_abort(scheduler, SimpleNamespace(abort_all=True, rid=""))
    assert part.shadow.running is None
    assert part.shadow.has_work
    hooks.before_weights(None)
    assert not part.shadow.has_work


def test_tokens_are_those_of_the_prompt_and_no_later_ones(hooks, part):
    made = request()
    made.is_prefill_only = False
    made.full_untruncated_fill_ids = array("q", [7, 8, 9])
    hooks.after_batch(forward(), None, batch(made))
    made.full_untruncated_fill_ids.append(10)
    sampled(part, "r", length=3)
    scheduler = Scheduler(hooks)
    part.before_idle(scheduler)
    assert list(scheduler.made[0].wanted.input_ids) == [7, 8, 9]
