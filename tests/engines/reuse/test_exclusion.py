"""A sender whose answers have drifted: nothing more is planned with it, and others take its place."""

import pytest
import torch

from cache_store.config import StoreSettings
from engines.reuse.refusal import Refusal
from engines.reuse.settings import ReuseSettings

from .conftest import LONG_S, SMALL, make_pair
from .test_receiver import TOTAL, dense, refused
from .test_sender import TOKENS


@pytest.fixture
def left(sender):
    """The sender has left the masses of all whole row blocks."""
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS)
    return sender


def test_a_sender_that_is_excluded_guides_nothing_more(left, receive):
    worker = receive()
    worker.arrive("planned", TOKENS)
    worker.wait()
    assert worker.engine.admit("planned", 0, TOTAL) is None
    assert worker.engine.sender_of("planned") == "large"
    worker.arrive("waiting", TOKENS)
    worker.engine.exclude("large", Refusal.DRIFTED)
    worker.arrive("late", TOKENS)
    out = worker.prefill("waiting", TOKENS)
    torch.testing.assert_close(out, worker.prefill("late", TOKENS))
    torch.testing.assert_close(out, dense(receive))
    assert refused(worker, Refusal.DRIFTED) == 2
    assert worker.engine.sender_of("late") is None
    # What was planned before goes on.
    assert worker.engine.sender_of("planned") == "large"


def test_another_sender_takes_the_place_of_one_that_is_excluded(left, start, store):
    other = make_pair().sender.model_copy(update={"name": "other", "revision": "r3"})
    pairs = (make_pair(), make_pair(sender=other))
    worker = start(
        ReuseSettings(model=SMALL, pairs=pairs, store=StoreSettings(url="memory://"), wait_s=LONG_S, wait_share=1e6),
        seed=2,
    )
    worker.engine.exclude("other", Refusal.DRIFTED)
    worker.arrive("small", TOKENS)
    worker.prefill("small", TOKENS)
    assert worker.counted("requests_total", mode="guided", reason="none") == 1
