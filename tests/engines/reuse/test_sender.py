"""What a worker leaves: masses of whole row blocks of exact rows, however the prompt was cut."""

import pytest
import torch

import engines.reuse.layers as layers_module
from cache_store.errors import StoreUnavailableError
from cache_store.keys import page_keys
from cache_store.namespace import Namespace
from crossfill_kernels.block_mass import block_mass_reference
from crossfill_kernels.mix_mass import quantise_mass
from crossfill_kernels.rows import newest_rows, rows_at
from engines.reuse.asked import Asked, Mode
from engines.reuse.mass_records import unpack_masses

from .conftest import ALLOW, HEADS, LARGE, LAYERS, SCALE, make_pair

TOKENS = list(range(1000, 1000 + 5 * 64 + 20))
LEFT = sorted(set(make_pair().guided.values()))


def namespace(tenant="acme", salt=""):
    return Namespace(tenant, LARGE.name, LARGE.revision, LARGE.tokenizer, LARGE.template, salt)


def stored(store, tokens=TOKENS, of=None):
    """Names of the records of each page."""
    return [sorted(records) for records in store.match(of or namespace(), tokens).records]


def expected(worker, layer, count):
    """Masses of the first `count` row blocks by the reference, from the worker's own random inputs."""
    rows = count * 64
    query, key, value = (of[layer, :rows].double() for of in (worker.query, worker.key, worker.value))
    _, mass, _ = block_mass_reference(query, key, value, slice(0, rows), rows_at(range(rows)), scale=SCALE)
    return quantise_mass(mass)


def test_all_layers_that_are_wanted_are_left_of_every_whole_row_block(sender, store):
    sender.arrive("r", TOKENS)
    sender.prefill("r", TOKENS)
    assert stored(store) == [sorted(f"mass/{layer}" for layer in LEFT)] * 5
    assert sender.counted("published_row_blocks_total") == 5


@pytest.mark.parametrize("cuts", [(), (64, 128), (100, 164, 300), (10, 20, 30, 200), (63, 64, 65, 127, 128, 129)])
def test_masses_are_those_of_the_attention_however_the_prompt_is_cut(sender, store, cuts):
    sender.arrive("r", TOKENS)
    sender.prefill("r", TOKENS, cuts=cuts)
    pages = page_keys(namespace().scope, TOKENS)
    for layer in LEFT:
        found = store.read(namespace(), [(page, f"mass/{layer}") for page in pages])
        assert None not in found
        left, want = unpack_masses([dict(enumerate(found))], HEADS), expected(sender, layer, 5)
        assert torch.equal(left.offsets, want.offsets)
        # A sum in another order may fall on the other side of a step.
        assert int((left.codes.int() - want.codes.int()).abs().max()) <= 1


def test_a_last_chunk_of_a_few_rows_completes_a_row_block(sender, store):
    tokens = TOKENS[:320]
    sender.arrive("r", tokens)
    sender.prefill("r", tokens, cuts=(300,))
    assert all(stored(store, tokens))


def test_a_row_block_cut_by_a_prefix_hit_stays_out(sender, store):
    sender.arrive("r", TOKENS)
    sender.prefill("r", TOKENS, prefix=100)
    assert [bool(names) for names in stored(store)] == [False, False, True, True, True]


def test_rows_of_another_request_do_not_complete_a_row_block(sender, store):
    sender.arrive("a", TOKENS)
    sender.arrive("b", TOKENS)
    sender.wait()
    sender.compute("a", 0, 32, len(TOKENS))
    sender.compute("b", 32, 96, len(TOKENS))
    sender.wait()
    assert stored(store) == [[]] * 5
    # The control: the same rows of one request do.
    sender.compute("a", 32, 96, len(TOKENS))
    sender.wait()
    assert [bool(names) for names in stored(store)] == [True, False, False, False, False]


def test_what_the_store_has_is_not_published_again(sender, backend):
    for request in ("a", "b"):
        sender.arrive(request, TOKENS)
        sender.prefill(request, TOKENS)
    assert backend.calls["publish"] == 1
    longer = [*TOKENS, *range(128)]
    sender.arrive("c", longer)
    sender.prefill("c", longer)
    assert sender.counted("published_row_blocks_total") == 7


def test_tenants_and_salts_have_their_own(sender, store):
    for number, asked in enumerate((Asked(Mode.ALLOW, "bolt"), Asked(Mode.OFF, "acme", "s"))):
        sender.arrive(str(number), TOKENS, asked)
        sender.prefill(str(number), TOKENS)
    assert stored(store) == [[]] * 5
    assert all(stored(store, of=namespace("bolt")))
    assert all(stored(store, of=namespace("acme", "s")))


@pytest.mark.parametrize(("asked", "more"), [(None, {}), (ALLOW, {"supported": False})], ids=["no router", "images"])
def test_a_request_that_may_not_share_leaves_nothing(sender, backend, asked, more):
    sender.arrive("r", TOKENS, asked, **more)
    sender.prefill("r", TOKENS)
    assert (backend.calls["publish"], backend.calls["lookup"]) == (0, 0)


def test_nothing_that_was_begun_before_a_flush_is_left_after_it(sender, store, store_registry):
    sender.arrive("r", TOKENS)
    sender.wait()
    sender.compute("r", 0, 128, len(TOKENS))
    sender.wait()
    store.flush(tenant="somebody")
    sender.compute("r", 128, len(TOKENS), len(TOKENS))
    sender.wait()
    assert [bool(names) for names in stored(store)] == [True, True, False, False, False]
    dropped = store_registry.get_sample_value("crossfill_store_dropped_pages_total", {"reason": "flushed"})
    assert dropped == 3


def test_a_store_that_does_not_answer_costs_nothing_but_what_would_have_been_left(sender, backend, store):
    backend.error = StoreUnavailableError("away", "refused")
    sender.arrive("r", TOKENS)
    dense = sender.prefill("r", TOKENS)
    assert sender.counted("unpublished_row_blocks_total", reason="store_unknown") == 5
    backend.error = None
    sender.arrive("s", TOKENS)
    assert torch.equal(sender.prefill("s", TOKENS), dense)
    assert all(stored(store))


@pytest.mark.parametrize("cuts", [(), (100, 164, 300)])
def test_what_the_store_has_is_not_captured_again(sender, store, backend, cuts, monkeypatch):
    sender.arrive("r", TOKENS[:150])
    sender.prefill("r", TOKENS[:150])
    captured, compute = [], layers_module.block_mass

    def counting(query, keys, values, slots, rows, **more):
        captured.append((rows.last + 1 - rows.count, rows.last + 1))
        return compute(query, keys, values, slots, rows, **more)

    monkeypatch.setattr(layers_module, "block_mass", counting)
    sender.arrive("again", TOKENS[:150])
    sender.prefill("again", TOKENS[:150], cuts=tuple(cut for cut in cuts if cut < 150))
    assert captured == []
    published = backend.calls["publish"]
    # Two row blocks are there, and three more are wanted.
    sender.arrive("longer", TOKENS)
    sender.prefill("longer", TOKENS, cuts=cuts)
    assert set(captured) == ({(0, 340)} if not cuts else {(100, 164), (164, 300), (300, 340)})
    assert backend.calls["publish"] > published
    assert all(stored(store))


def test_masses_beyond_the_bound_are_dropped_and_counted(sender, backend):
    sender.sender._most_bytes = 1
    sender.arrive("r", TOKENS)
    sender.prefill("r", TOKENS)
    assert sender.counted("unpublished_row_blocks_total", reason="queue_full") == 5
    assert backend.calls["publish"] == 0


def test_a_request_that_is_gone_leaves_what_it_had_computed(sender, store):
    sender.arrive("r", TOKENS)
    sender.wait()
    sender.compute("r", 0, 130, len(TOKENS))
    sender.engine.forget("r")
    sender.wait()
    assert [bool(names) for names in stored(store)] == [True, True, False, False, False]


def test_layers_that_nobody_wants_are_computed_without_masses(sender):
    sender.arrive("r", TOKENS)
    sender.wait()
    sender.engine.admit("r", 0, len(TOKENS))
    chunk = sender.engine.chunk("r", newest_rows(128, 128), sender.slots[:128])
    out = torch.empty(128, HEADS, sender.query.shape[-1])
    for layer in range(LAYERS + 2):
        sender.engine.layers.attend(
            chunk, layer, sender.query[layer, :128], sender.keys[layer], sender.values[layer], scale=SCALE, out=out
        )
    assert sorted(chunk.masses) == LEFT
