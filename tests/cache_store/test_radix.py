import gc
import random
import threading
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store import radix
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


def require_sound(mirror):
    """Counts, holders and the order of use fit each other, and no two nodes stand where one would do."""
    nodes, root, order = mirror._nodes, mirror._root, []
    node = root.newer
    while node is not root:
        assert node.older.newer is node
        order.append(node)
        node = node.newer
    assert set(order) == set(nodes.values())
    assert len(order) == len(nodes)
    place = {node: number for number, node in enumerate([*order, root])}
    children = Counter(node.parent for node in order)
    assert mirror.pages == sum(len(node.keys) // 16 for node in order)
    for node in order:
        assert nodes[node.keys[:16]] is node
        assert node.holders
        assert place[node] < place[node.parent], "what is above is used whenever this is"
        assert node.parent is root or not node.holders & ~node.parent.holders
        assert node.children == children[node]
        only = node.older
        assert not (only.parent is node and node.children == 1 and only.holders == node.holders), "two that are one"
    assert root.children == children[root]


@contextmanager
def pauses(pause):
    """Removals look at one node at once, and call `pause` after each."""
    with patch.object(radix, "_NODES_AT_ONCE", 1), patch.object(radix, "time", SimpleNamespace(sleep=pause)):
        yield


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

    @precondition(lambda self: self.given)
    @rule(holder=holders, meanwhile=st.lists(st.tuples(holders, paths), max_size=8))
    def remove_while_others_insert(self, holder, meanwhile):
        """What is inserted between two steps of a removal counts, of the holder itself too."""
        left, fresh, before = list(meanwhile), 0, self.mirror.pages
        self.given.pop(holder, None)

        def pause(_seconds):
            nonlocal fresh
            if left:
                pages = self.mirror.pages
                self.insert(*left.pop())
                fresh += self.mirror.pages - pages
            for asked in ([0] * 12, *(path for _, path in meanwhile)):
                self.match(asked)

        with pauses(pause):
            assert self.mirror.remove(holder) == before + fresh - self.held_pages()

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
        require_sound(self.mirror)

    def held_pages(self):
        held = {key for all_given in self.given.values() for path in all_given for key in keys(path)}
        return len(held)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = UNHURRIED


@UNHURRIED
@given(
    inserts=st.lists(st.tuples(holders, paths), min_size=1, max_size=30),
    nodes=st.integers(1, 8),
    pages=st.integers(1, 20),
    removed=st.sampled_from(["a", "nobody"]),
)
def test_a_bounded_mirror_keeps_its_budget_and_tells_nothing_that_is_not_so(inserts, nodes, pages, removed):
    budget = nodes * NODE_BYTES + 16 * pages
    mirror = RadixMirror(budget)
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
        require_sound(mirror)
        for asked in (path, inserts[0][1]):
            told, so = mirror.match(keys(asked)).by_holder, everything.match(keys(asked)).by_holder
            assert all(pages <= so[holder] for holder, pages in told.items())
    if not forgotten:
        assert mirror.pages == everything.pages
    # Evictions between the steps of a removal take nodes from under it.
    left = list(inserts)
    with pauses(lambda _: left and mirror.insert("b", keys(left.pop()[1]))):
        mirror.remove(removed)
    require_sound(mirror)
    assert mirror.size_bytes <= budget
    assert all(removed not in mirror.match(keys(path)).by_holder for _, path in inserts)


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


def test_a_branch_that_is_evicted_leaves_one_node():
    trunk, one, two = keys([0] * 10), keys([0] * 10 + [1] * 5), keys([0] * 10 + [2] * 5)
    mirror = RadixMirror(3 * NODE_BYTES + 16 * 20)
    mirror.insert("a", two)
    mirror.insert("a", one)
    assert mirror.size_bytes == 3 * NODE_BYTES + 16 * 20
    assert mirror.insert("a", keys([0] * 10 + [1] * 11)) == 5
    assert mirror.size_bytes == NODE_BYTES + 16 * 21
    assert (mirror.match(trunk).longest, mirror.match(two).longest) == (10, 10)


def test_a_removed_holder_leaves_no_node_that_only_it_needed():
    mirror = RadixMirror(PLENTY)
    mirror.insert("a", keys([5] * 30))
    mirror.insert("b", keys([5] * 20))
    mirror.insert("a", keys([5] * 30))
    assert mirror.size_bytes == 2 * NODE_BYTES + 16 * 30
    assert mirror.remove("b") == 0
    assert mirror.size_bytes == NODE_BYTES + 16 * 30
    assert mirror.match(keys([5] * 30)).by_holder == {"a": 30}


def test_nodes_used_at_different_times_stay_apart():
    mirror = RadixMirror(PLENTY)
    mirror.insert("a", keys([5] * 30))
    mirror.insert("a", keys([6] * 5))
    # Only half of it is confirmed; the other half is to go first.
    mirror.insert("a", keys([5] * 20))
    assert mirror.size_bytes == 3 * NODE_BYTES + 16 * 35
    mirror.insert("a", keys([5] * 30))
    assert mirror.size_bytes == 2 * NODE_BYTES + 16 * 35


def test_nodes_that_a_removal_lets_be_one_become_one_though_others_are_used_meanwhile():
    mirror = RadixMirror(PLENTY)
    mirror.insert("c", keys([7] * 3))
    for holder in "ab":
        mirror.insert(holder, keys([5] * 30))
    mirror.insert("c", keys([6] * 5))
    mirror.insert("b", keys([5] * 20))
    meanwhile = [("b", keys([5] * 20)), ("c", keys([6] * 5))]

    def pause(_seconds):
        while meanwhile:
            mirror.insert(*meanwhile.pop(0))

    with pauses(pause):
        mirror.remove("a")
    assert mirror.size_bytes == 3 * NODE_BYTES + 16 * 38
    require_sound(mirror)


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
