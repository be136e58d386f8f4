"""What a worker takes: where it looks is what the sender's masses say, and everything else is dense, with a reason."""

import time

import pytest
import torch

from cache_store.backends.protocol import Limits, PageWrite
from cache_store.config import StoreSettings
from cache_store.errors import StoreUnavailableError
from cache_store.keys import page_keys
from cache_store.records import Kind, Record
from cache_store.store import scope_info
from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import NativeLibraryError
from crossfill_kernels.guided_attention import guided_attention_reference
from crossfill_kernels.mix_mass import mix_mass
from crossfill_kernels.rows import rows_at
from crossfill_kernels.select_blocks import select_blocks
from engines.reuse import layers as layers_module
from engines.reuse.asked import Asked, Mode
from engines.reuse.refusal import Refusal
from engines.reuse.settings import ReuseSettings

from .conftest import HEADS, LARGE, LAYERS, SCALE, SMALL, make_pair
from .test_sender import TOKENS, expected, namespace

# Pages 0 … 4 are whole; the last rows stand in page 5.
TOTAL, GUIDED = len(TOKENS), range(2, LAYERS - 1)


@pytest.fixture
def left(sender):
    """The sender has left the masses of all whole row blocks."""
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS)
    return sender


def dense(receive):
    worker = receive()
    worker.arrive("dense", TOKENS, Asked(Mode.OFF, "acme"))
    return worker.prefill("dense", TOKENS)


def refused(worker, reason):
    return worker.counted("requests_total", mode=reason.mode, reason=reason.value)


def assert_dense(worker, out, receive, reason):
    """That the request was computed as without reuse, and why."""
    torch.testing.assert_close(out, dense(receive))
    assert refused(worker, reason) == 1
    assert worker.counted("requests_total", mode="guided", reason="none") == 0


def test_all_mass_is_dense_attention(left, receive):
    worker = receive(top_p=1.0)
    before = dispatch.calls().get(("guided_attention", "native"), 0)
    worker.arrive("r", TOKENS)
    out = worker.prefill("r", TOKENS)
    assert dispatch.calls()["guided_attention", "native"] - before == len(GUIDED)
    torch.testing.assert_close(out, dense(receive), atol=1e-5, rtol=1e-5)
    assert worker.counted("row_blocks_total", outcome="guided") == 5


@pytest.mark.parametrize("cuts", [(), (128,), (100, 200, 330)])
def test_guided_layers_look_where_the_senders_masses_say(left, receive, cuts):
    worker = receive(top_p=0.6)
    worker.arrive("r", TOKENS)
    out, reference = worker.prefill("r", TOKENS, cuts=cuts), dense(receive)
    uniform = torch.full((HEADS, HEADS), 1 / HEADS)
    for layer in range(LAYERS):
        if layer not in GUIDED:
            torch.testing.assert_close(out[layer], reference[layer])
            continue
        masses = expected(left, layer + 2, 5)
        index = select_blocks(mix_mass(masses, uniform, 5), top_p=0.6)
        query, keys, values = (of[layer] for of in (worker.query, worker.key, worker.value))
        rows, slots = rows_at(range(320)), slice(0, 320)
        want = guided_attention_reference(query[:320], keys, values, slots, rows, index, scale=SCALE)
        torch.testing.assert_close(out[layer, :320], want, atol=1e-5, rtol=1e-5)
        # Random masses are even, so that much is left out; and the tail is dense.
        assert not torch.allclose(out[layer, :320], reference[layer, :320], atol=1e-2)
        torch.testing.assert_close(out[layer, 320:], reference[layer, 320:])


def test_row_blocks_that_nobody_left_are_dense_between_guided_ones(sender, receive):
    # The sender has the first two pages and part of the third in its cache.
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS, prefix=150)
    worker = receive(top_p=0.6)
    worker.arrive("r", TOKENS)
    out, reference = worker.prefill("r", TOKENS), dense(receive)
    for layer in GUIDED:
        torch.testing.assert_close(out[layer, :192], reference[layer, :192])
        assert not torch.allclose(out[layer, 192:320], reference[layer, 192:320], atol=1e-2)
    assert worker.counted("row_blocks_total", outcome="guided") == 2
    assert worker.counted("row_blocks_total", outcome="uncovered") == 4


@pytest.mark.parametrize("cuts", [(), (64,), (100,), (128,), (200,)])
def test_rows_that_look_everywhere_although_they_are_guided_are_exact(left, receive, cuts):
    worker = receive(top_p=0.01)
    worker.arrive("r", TOKENS)
    out, reference = worker.prefill("r", TOKENS, cuts=cuts), dense(receive)
    assert worker.counted("row_blocks_total", outcome="guided") == 5
    torch.testing.assert_close(out[:, :128], reference[:, :128], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out[2, 128:192], reference[2, 128:192], atol=1e-2)
    slots = worker.slots.long()
    assert [worker.engine.provenance.hops_of(slots[:count]) for count in (128, 129, TOTAL)] == [0, 1, 1]


def test_only_what_the_own_cache_lacks_is_guided(left, receive):
    worker = receive()
    worker.arrive("r", TOKENS)
    worker.prefill("r", TOKENS, prefix=100)
    assert worker.engine.provenance.hops_of(worker.slots[:TOTAL].long()) == 1
    assert worker.counted("row_blocks_total", outcome="guided") == 4


def test_a_prompt_that_ends_with_a_page_has_its_last_page_dense(sender, receive):
    tokens = TOKENS[:320]
    sender.arrive("sender", tokens)
    sender.prefill("sender", tokens)
    worker = receive()
    worker.arrive("r", tokens)
    worker.prefill("r", tokens)
    assert worker.counted("row_blocks_total", outcome="guided") == 4


@pytest.mark.parametrize(
    ("asked", "more", "tokens", "changes", "reason"),
    [
        (Asked(Mode.OFF, "acme"), {}, TOKENS, {}, Refusal.OFF),
        (None, {}, TOKENS, {}, Refusal.NO_ROUTER),
        (Asked(Mode.ALLOW, "acme"), {"supported": False}, TOKENS, {}, Refusal.UNSUPPORTED),
        (Asked(Mode.ALLOW, "acme"), {}, TOKENS, {"min_tokens": 4096}, Refusal.TOO_SHORT),
        (Asked(Mode.ALLOW, "acme"), {}, TOKENS, {"min_tokens": 321}, Refusal.TOO_LITTLE),
        (Asked(Mode.ALLOW, "acme"), {}, TOKENS, {"max_density": 0.05}, Refusal.TOO_DENSE),
        (Asked(Mode.ALLOW, "bolt"), {}, TOKENS, {}, Refusal.NOTHING_STORED),
        (Asked(Mode.ALLOW, "acme", "salt"), {}, TOKENS, {}, Refusal.NOTHING_STORED),
        (Asked(Mode.ALLOW, "acme"), {}, [7, *TOKENS[1:]], {}, Refusal.NOTHING_STORED),
    ],
    ids=["off", "no router", "images", "short", "little", "dense", "tenant", "salt", "tokens"],
)
def test_a_refused_prefill_is_dense_and_says_why(left, receive, asked, more, tokens, changes, reason):
    worker = receive(**changes)
    worker.arrive("r", tokens, asked, **more)
    out = worker.prefill("r", tokens)
    assert_dense(worker, out, receive, reason)


def test_a_prompt_that_is_cached_has_nothing_to_guide(left, receive):
    worker = receive()
    worker.arrive("r", TOKENS)
    worker.wait()
    worker.compute("r", 320, TOTAL, TOTAL)
    assert refused(worker, Refusal.CACHED) == 1


def test_a_worker_without_a_pair_takes_nothing(left):
    left.arrive("again", TOKENS)
    left.prefill("again", TOKENS)
    assert refused(left, Refusal.NO_PAIR) == 2


def test_a_store_that_hangs_costs_the_wait_and_no_more(left, receive, backend):
    worker = receive(wait_s=0.01)
    backend.hang("lookup")
    worker.arrive("r", TOKENS)
    out = worker.compute("r", 0, TOTAL, TOTAL)
    backend.go_on()
    assert_dense(worker, out, receive, Refusal.STORE_SLOW)
    assert 0.005 < worker.counted("waited_seconds_total") < 5


def test_a_store_that_is_away_is_a_fallback(left, receive, backend):
    worker = receive()
    backend.error = StoreUnavailableError("away", "refused")
    worker.arrive("r", TOKENS)
    out = worker.prefill("r", TOKENS)
    backend.error = None
    assert_dense(worker, out, receive, Refusal.STORE_UNAVAILABLE)


def test_layers_that_come_late_are_dense_until_they_have_come(left, receive, backend):
    worker = receive(top_p=0.6, wait_s=0.05)
    reads, read = [], backend.backend.read

    def third_hangs(*arguments):
        reads.append(arguments)
        if len(reads) == 3:
            backend.hang("third")
            backend.open["third"].wait(30)
        return read(*arguments)

    backend.backend.read = third_hangs
    worker.arrive("r", TOKENS)
    while len(reads) < 3:
        time.sleep(0.001)
    # The first two row blocks keep all that they have: the first block and the diagonal.
    first = worker.compute("r", 0, 256, TOTAL)
    backend.go_on()
    worker.wait()
    second = worker.compute("r", 256, TOTAL, TOTAL)
    reference = dense(receive)
    late = GUIDED[2]
    torch.testing.assert_close(first[late], reference[late, :256])
    assert not torch.allclose(first[GUIDED[0]], reference[GUIDED[0], :256], atol=1e-2)
    assert not torch.allclose(second[late, :64], reference[late, 256:320], atol=1e-2)
    assert worker.counted("missed_layers_total", reason="late") == 1


def put(store, layer, payload):
    """Records of all pages whose payload is no masses."""
    pages = page_keys(namespace().scope, TOKENS)
    records = {
        index: [Record(Kind.MASS, layer, (HEADS, index + 1), "mass8", page.tokens_digest, payload)]
        for index, page in enumerate(pages)
    }
    store.publish(namespace(), TOKENS, records)


def test_one_layer_that_is_no_masses_is_dense(left, receive, store):
    put(store, GUIDED[0] + 2, b"?")
    worker = receive(top_p=0.6)
    worker.arrive("r", TOKENS)
    out, reference = worker.prefill("r", TOKENS), dense(receive)
    torch.testing.assert_close(out[GUIDED[0]], reference[GUIDED[0]])
    assert not torch.allclose(out[GUIDED[1]], reference[GUIDED[1]], atol=1e-2)
    assert worker.counted("missed_layers_total", reason="malformed") == 1


def test_masses_of_which_no_layer_can_be_read_are_a_fallback(left, receive, store):
    for layer in GUIDED:
        put(store, layer + 2, b"?")
    worker = receive()
    worker.arrive("r", TOKENS)
    out = worker.prefill("r", TOKENS)
    assert_dense(worker, out, receive, Refusal.MALFORMED)


def test_a_page_that_goes_between_lookup_and_read_makes_its_layers_dense(left, receive, store, backend):
    worker = receive(top_p=0.6)
    backend.hang("read")
    before = backend.calls["read"]
    worker.arrive("r", TOKENS)
    pages = page_keys(namespace().scope, TOKENS)
    while backend.calls["read"] == before:
        time.sleep(0.001)
    backend.backend.quarantine(namespace().scope, pages[2].key, f"mass/{GUIDED[0] + 2}")
    backend.go_on()
    out, reference = worker.prefill("r", TOKENS), dense(receive)
    torch.testing.assert_close(out[GUIDED[0]], reference[GUIDED[0]])
    assert worker.counted("missed_layers_total", reason="gone") == 1


def test_a_kernel_that_fails_is_a_dense_layer(left, receive, monkeypatch):
    def fail(*_, **__):
        raise NativeLibraryError("broken")

    monkeypatch.setattr(layers_module, "guided_attention", fail)
    worker = receive()
    worker.arrive("r", TOKENS)
    out = worker.prefill("r", TOKENS)
    torch.testing.assert_close(out, dense(receive))
    assert worker.counted("missed_layers_total", reason="kernel") == len(GUIDED)


def test_what_a_request_that_requires_reuse_surely_lacks_is_known_at_its_arrival(left, receive):
    worker = receive()
    worker.arrive("found", TOKENS, Asked(Mode.REQUIRE, "acme"))
    worker.arrive("nothing", TOKENS, Asked(Mode.REQUIRE, "bolt"))
    worker.arrive("short", TOKENS[:60], Asked(Mode.REQUIRE, "acme"))
    assert worker.engine.preview("found") is None
    assert worker.engine.preview("nothing") is Refusal.NOTHING_STORED
    assert worker.engine.preview("short") is Refusal.TOO_SHORT
    assert worker.engine.admit("nothing", 0, TOTAL) is Refusal.NOTHING_STORED


def test_the_sender_that_left_more_is_taken(left, start, store):
    other = LARGE.model_copy(update={"name": "other"})
    pairs = (make_pair(sender=other), make_pair())
    settings = ReuseSettings(model=SMALL, pairs=pairs, store=StoreSettings(url="memory://"), wait_s=30)
    worker = start(settings, seed=2)
    worker.arrive("r", TOKENS)
    worker.prefill("r", TOKENS)
    worker.arrive("s", TOKENS)
    worker.wait()
    worker.engine.admit("s", 0, TOTAL)
    assert worker.engine.outcome("s").endswith("sender=large")


def test_shuffled_masses_of_the_right_density_are_not_the_same(left, receive):
    """The control of the tests above: they can tell one mask from another."""
    masses = expected(left, GUIDED[0] + 2, 5)
    mixed = mix_mass(masses, torch.eye(HEADS), 5)
    shuffled = BlockMass(mixed.mass[:, :, torch.tensor([2, 0, 1, 4, 3])], mixed.blocks, mixed.totals)
    assert not torch.equal(select_blocks(mixed, top_p=0.6).columns, select_blocks(shuffled, top_p=0.6).columns)


def test_a_request_waits_at_most_half_of_what_it_may_save(left, receive, backend):
    worker = receive(wait_s=30.0, wait_share=0.5)
    worker.arrive("fast", TOKENS[:65], Asked(Mode.OFF, "acme"))
    worker.prefill("fast", TOKENS[:65])
    assert worker.engine.layers.pace_s is not None
    backend.hang("lookup")
    worker.arrive("r", TOKENS)
    worker.compute("r", 0, TOTAL, TOTAL)
    backend.go_on()
    assert refused(worker, Refusal.STORE_SLOW) == 1
    # These 340 rows take milliseconds, so nobody waits for seconds.
    assert worker.counted("waited_seconds_total") < 10


def test_a_worker_whose_weights_change_takes_and_leaves_nothing_more(sender, left, receive, store):
    worker = receive()
    worker.arrive("known", TOKENS)
    worker.engine.stop(Refusal.WEIGHTS_CHANGED)
    worker.arrive("new", TOKENS)
    for request in ("known", "new"):
        worker.prefill(request, TOKENS)
    assert refused(worker, Refusal.WEIGHTS_CHANGED) == 2
    other = list(range(9000, 9200))
    sender.arrive("known", other)
    sender.wait()
    sender.compute("known", 0, 64, len(other))
    sender.wait()
    sender.engine.stop(Refusal.WEIGHTS_CHANGED)
    sender.compute("known", 64, len(other), len(other))
    sender.wait()
    assert [bool(records) for records in store.match(namespace(), other).records] == [True, False, False]


def test_a_record_that_was_altered_makes_its_layer_dense_and_is_taken_away(left, receive, backend, store):
    page = page_keys(namespace().scope, TOKENS)[2]
    name = f"mass/{GUIDED[0] + 2}"
    [data] = backend.backend.read(namespace().scope, [(page.key, name)])
    write = PageWrite(page.key, page.parent, page.tokens_digest, {name: data[:-1] + bytes([data[-1] ^ 1])})
    backend.backend.publish(scope_info(namespace()), [write], Limits(2**30, 2**30))
    worker = receive(top_p=0.6)
    worker.arrive("r", TOKENS)
    out, reference = worker.prefill("r", TOKENS), dense(receive)
    torch.testing.assert_close(out[GUIDED[0]], reference[GUIDED[0]])
    assert not torch.allclose(out[GUIDED[1]], reference[GUIDED[1]], atol=1e-2)
    assert worker.counted("missed_layers_total", reason="gone") == 1
    assert store.stats().quarantined == 1


def test_requests_of_one_batch_wait_together_as_long_as_one(left, receive, backend):
    worker = receive(wait_s=0.2)
    backend.hang("lookup")
    for number in range(8):
        worker.arrive(str(number), TOKENS)
    worker.engine.begin_batch()
    for number in range(8):
        assert worker.engine.admit(str(number), 0, TOTAL) is Refusal.STORE_SLOW
    backend.go_on()
    assert worker.counted("waited_seconds_total") < 8 * 0.2 / 2


def test_a_request_whose_prompt_sglang_replaced_is_forgotten(left, receive):
    worker = receive()
    worker.arrive("r", TOKENS)
    worker.compute("r", 0, 1, 1)
    assert refused(worker, Refusal.UNSUPPORTED) == 1
    assert not worker.engine._known
    worker.arrive("short", TOKENS[:60], Asked(Mode.REQUIRE, "acme"))
    assert worker.engine.admit("short", 0, 1) is Refusal.TOO_SHORT
    assert worker.engine.outcome("short") == "none; reason=too_short"


def test_masses_that_cannot_be_computed_are_not_left(sender, store, monkeypatch):
    def fail(*_, **__):
        raise NativeLibraryError("broken")

    sender.arrive("before", TOKENS, Asked(Mode.OFF, "other"))
    dense_rows = sender.prefill("before", TOKENS)
    monkeypatch.setattr(layers_module, "block_mass", fail)
    sender.arrive("r", TOKENS)
    torch.testing.assert_close(sender.prefill("r", TOKENS), dense_rows, atol=1e-5, rtol=1e-5)
    assert not store.match(namespace(), TOKENS).names
