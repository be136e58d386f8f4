"""What was read of the store and not taken yet is held no longer than it may be wanted."""

from cache_store.config import StoreSettings
from engines.reuse.settings import ReuseSettings

from .conftest import LARGE, SMALL, make_pair
from .test_receiver import left  # noqa: F401  # a fixture
from .test_sender import TOKENS


def test_what_a_sender_that_is_not_taken_left_is_held_no_longer(left, start):  # noqa: F811
    other = LARGE.model_copy(update={"name": "other"})
    layers = tuple(sorted(set(make_pair().guided.values())))
    second = start(ReuseSettings(model=other, publish=layers, store=StoreSettings(url="memory://")), seed=3)
    second.arrive("second", TOKENS)
    second.prefill("second", TOKENS)
    pairs = (make_pair(), make_pair(sender=other))
    worker = start(ReuseSettings(model=SMALL, pairs=pairs, store=StoreSettings(url="memory://"), wait_s=30), seed=2)
    worker.arrive("r", TOKENS)
    worker.wait()
    assert worker.fetcher._held.size_bytes > 0
    assert worker.engine.admit("r", 0, len(TOKENS)) is None
    assert worker.fetcher._held.size_bytes == 0
