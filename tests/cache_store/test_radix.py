import gc
import random
import threading
import tracemalloc
from hashlib import blake2b
from itertools import accumulate

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.radix import NODE_BYTES, HeldPages, RadixMirror

PLENTY = 2**30
# How long an example takes is not what is tested.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Few different pages, so that prefixes meet, part and end within each other.
paths = st.lists(st.integers(0, 2), min_size=0, max_size=12)
holders = st.sampled_from(["a", "b", "c"])


def keys(path):
    """Chained keys, as pages have them."""
    chained = accumulate(path, lambda key, page: blake2b(key + bytes([page]), digest_size=16).digest(), initial=b"")
    return list(chained)[1:]


def prefix_length(one, two):
    return next((index for index, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))


class AgainstADictionary(RuleBasedStateMachine):
    """The mirror with room for everything, and the list of what each holder was given."""

    def __init__(self):
        super().__init__()
        self.mirror = RadixMirror(PLENTY)
        self.given = {}

    @rule(holder=holders, path=paths)
    def insert(self, holder, path):
        assert self.mirror.insert(holder, keys(path)) == 0
        self.given.setdefault(holder, []).append(path)

    @precondition(lambda self: self.given)
    @rule(holder=holders)
    def remove(self, holder):
        before = self.held_pages()
        self.given.pop(holder, None)
        assert self.mirror.remove(holder) == before - self.held_pages()

    @rule(path=paths)
    def match(self, path):
        lengths = {
            holder: max(prefix_length(path, given) for given in all_given) for holder, all_given in self.given.items()
        }
        expected = {holder: pages for holder, pages in lengths.items() if pages}
        assert self.mirror.match(keys(path)) == HeldPages(expected)

    @invariant()
    def counts(self):
        assert self.mirror.pages == self.held_pages()

    def held_pages(self):
        held = {key for all_given in self.given.values() for path in all_given for key in keys(path)}
        return len(held)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = UNHURRIED


@UNHURRIED
@given(
    inserts=st.lists(st.tuples(holders, paths), min_size=1, max_size=30),
    pages=st.integers(1, 20),
)
def test_a_bounded_mirror_keeps_its_budget_and_tells_nothing_that_is_not_so(inserts, pages):
    mirror, budget = RadixMirror(2 * NODE_BYTES + 16 * pages), 2 * NODE_BYTES + 16 * pages
    everything = RadixMirror(PLENTY)
    forgotten = 0
    for holder, path in inserts:
        before = mirror.pages
        fresh = len(path) - mirror.match(keys(path)).longest
        evicted = mirror.insert(holder, keys(path))
        assert mirror.pages == before + fresh - evicted
        everything.insert(holder, keys(path))
        forgotten += evicted
        assert mirror.size_bytes <= budget
        for asked in (path, inserts[0][1]):
            told, so = mirror.match(keys(asked)).by_holder, everything.match(keys(asked)).by_holder
            assert all(pages <= so[holder] for holder, pages in told.items())
    if not forgotten:
        assert mirror.pages == everything.pages


def test_the_leaf_used_least_recently_goes_first_and_from_its_end():
    shared, one, two = keys([0] * 10), keys([0] * 10 + [1] * 5), keys([0] * 10 + [2] * 5)
    mirror = RadixMirror(3 * NODE_BYTES + 16 * 20)
    mirror.insert("a", one)
    mirror.insert("a", two)
    assert mirror.size_bytes == 3 * NODE_BYTES + 16 * 20
    mirror.insert("a", one)
    # Two pages more are two fewer at the end of the branch that was not confirmed since.
    assert mirror.insert("a", [*one, *keys([0] * 10 + [1] * 7)[-2:]]) == 2
    assert mirror.match(two).longest == 13
    assert mirror.match(one).longest == 15
    # Without the second insert of `one`, that one goes.
    control = RadixMirror(3 * NODE_BYTES + 16 * 20)
    control.insert("a", one)
    control.insert("a", two)
    control.insert("a", [*two, *keys([0] * 10 + [2] * 7)[-2:]])
    assert (control.match(one).longest, control.match(two).longest) == (13, 15)
    assert control.match(shared).longest == 10


def test_looking_does_not_keep_a_leaf():
    mirror = RadixMirror(2 * NODE_BYTES + 16 * 20)
    mirror.insert("a", keys([1] * 10))
    mirror.insert("a", keys([2] * 10))
    mirror.match(keys([1] * 10))
    mirror.insert("a", keys([2] * 14))
    assert (mirror.match(keys([1] * 10)).longest, mirror.match(keys([2] * 14)).longest) == (6, 14)


def test_a_prefix_larger_than_the_budget_is_cut():
    mirror = RadixMirror(NODE_BYTES + 16 * 8)
    assert mirror.insert("a", keys([1] * 20)) == 12
    assert mirror.match(keys([1] * 20)).longest == 8
    tiny = RadixMirror(0)
    assert tiny.insert("a", keys([1] * 3)) == 3
    assert (tiny.pages, tiny.size_bytes) == (0, 0)


def test_a_growing_conversation_stays_one_node():
    mirror = RadixMirror(PLENTY)
    for length in range(1, 40):
        mirror.insert("a", keys([5] * length))
    assert mirror.size_bytes == NODE_BYTES + 16 * 39
    # A second holder of a part of it makes two.
    mirror.insert("b", keys([5] * 20))
    assert mirror.size_bytes == 2 * NODE_BYTES + 16 * 39
    assert mirror.match(keys([5] * 50)).by_holder == {"a": 39, "b": 20}


def test_a_removed_holder_that_returns_holds_nothing_of_before():
    mirror = RadixMirror(PLENTY)
    mirror.insert("a", keys([1] * 5))
    mirror.insert("b", keys([1] * 3))
    assert mirror.remove("a") == 2
    assert mirror.remove("a") == 0
    assert mirror.match(keys([1] * 5)).by_holder == {"b": 3}
    mirror.insert("a", keys([1] * 1))
    assert mirror.match(keys([1] * 5)).by_holder == {"a": 1, "b": 3}


def test_keys_that_collide_end_a_prefix_and_break_nothing():
    rng = random.Random(3)
    few = [bytes([number]) * 16 for number in range(6)]
    mirror = RadixMirror(6 * NODE_BYTES)
    for _ in range(3000):
        path = [rng.choice(few) for _ in range(rng.randrange(8))]
        mirror.insert(rng.choice("abc"), path)
        assert mirror.match(path).longest <= len(path)
        if rng.random() < 0.05:
            mirror.remove(rng.choice("abc"))
    for holder in "abc":
        mirror.remove(holder)
    assert (mirror.pages, mirror.size_bytes) == (0, 0)


def test_memory_is_what_is_counted():
    rng = random.Random(1)
    # Short prefixes, each with a node of its own: the worst case a page.
    tracemalloc.start()
    mirror, peak = RadixMirror(PLENTY), 0.0
    for _ in range(40_000):
        mirror.insert("a", [rng.randbytes(16)])
        if mirror.pages > 1000:
            peak = max(peak, tracemalloc.get_traced_memory()[0] / mirror.size_bytes)
    gc.collect()
    used, counted = tracemalloc.get_traced_memory()[0], mirror.size_bytes
    tracemalloc.stop()
    assert peak <= 1
    assert used > counted / 2, "the count is far too high"


def test_threads_that_insert_and_look_see_whole_prefixes():
    mirror, wrong = RadixMirror(60 * NODE_BYTES), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(400):
            path = keys([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
            mirror.insert(str(seed), path)
            told = mirror.match(path).longest
            if not 0 <= told <= len(path):
                wrong.append(told)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for seed in range(4):
        mirror.remove(str(seed))
    assert mirror.size_bytes == 0
