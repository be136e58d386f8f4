"""Exact is what was computed from exact rows only; nothing else is ever left for others."""

import torch

from cache_store.namespace import Namespace
from engines.reuse.provenance import Provenance

from .conftest import ALLOW
from .test_sender import TOKENS

SLOTS = torch.tensor([7, 3, 9, 1, 8, 2])


def hops(provenance, slots=SLOTS):
    return [provenance.hops_of(slot[None]) for slot in slots]


def test_rows_after_a_guided_one_are_as_approximate():
    provenance = Provenance(16)
    provenance.extend(SLOTS[:4], 0, guided_from=2)
    provenance.extend(SLOTS[4:], provenance.hops_of(SLOTS[:4]), guided_from=None)
    assert hops(provenance) == [0, 0, 1, 1, 1, 1]


def test_a_slot_that_is_used_again_is_what_was_written_last():
    provenance = Provenance(16)
    provenance.extend(SLOTS, 0, guided_from=0)
    provenance.extend(SLOTS[:3], 0, guided_from=None)
    assert hops(provenance) == [0, 0, 0, 1, 1, 1]


def test_answers_are_as_exact_as_their_prompts():
    provenance = Provenance(16)
    provenance.extend(torch.tensor([4]), 0, guided_from=0)
    provenance.decode(torch.tensor([5, 6]), torch.tensor([4, 7]))
    assert hops(provenance, torch.tensor([5, 6])) == [1, 0]


def test_a_prefix_is_as_approximate_as_any_of_its_rows():
    """SGLang gives a request the slots of another one's equal prefix, whatever stood in its own."""
    provenance = Provenance(16)
    provenance.extend(SLOTS[:2], 0, guided_from=0)
    provenance.extend(SLOTS[2:], 0, guided_from=None)
    assert provenance.hops_of(SLOTS) == 1
    assert provenance.hops_of(SLOTS[2:]) == 0
    assert provenance.hops_of(SLOTS[:0]) == 0


def test_a_decode_finds_the_slots_of_the_newest_row_and_the_one_before(receive):
    worker, table = receive(), torch.tensor([[9, 9, 9, 9], [4, 5, 6, 0], [7, 8, 0, 0]])
    worker.engine.provenance.extend(torch.tensor([5]), 0, guided_from=0)
    worker.engine.note_decode(table, torch.tensor([1, 2]), torch.tensor([3, 2]))
    assert hops(worker.engine.provenance, torch.tensor([6, 8])) == [1, 0]


def test_what_stands_on_guided_rows_is_not_left_for_others(sender, start, receive, store):
    """A model that is both receiver and sender: its turn after a guided one is computed on approximate keys."""
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS)
    both = sender.engine._settings.model_copy(update={"model": receive().engine._settings.model, "publish": (2, 3)})
    both = both.model_copy(update={"pairs": receive().engine._settings.pairs, "wait_s": 30})
    worker, own = start(both, seed=2), Namespace("acme", "small", "r2", "t", "c")
    worker.arrive("r", TOKENS)
    worker.prefill("r", TOKENS)
    longer = [*TOKENS, *range(200)]
    worker.arrive("next", longer, ALLOW)
    worker.prefill("next", longer, prefix=len(TOKENS))
    assert not store.match(own, longer).names
    # The control: exact rows of the same worker are left.
    other = list(range(50_000, 50_200))
    worker.slots = worker.slots.flip(0)
    worker.arrive("exact", other)
    worker.prefill("exact", other)
    assert store.match(own, other).names == {"mass/2", "mass/3"}


def test_exact_rows_behind_anothers_approximate_prefix_are_not_left(sender, start, receive, store):
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS)
    small = receive().engine._settings
    both = small.model_copy(update={"publish": (2, 3)})
    worker = start(both, seed=2)
    worker.arrive("guided", TOKENS)
    worker.prefill("guided", TOKENS)
    longer = [*TOKENS, *range(200)]
    # Computed densely elsewhere; then SGLang joined its prefix with the guided request's slots.
    worker.engine.provenance.extend(worker.slots[320:400].long(), 0, None)
    worker.arrive("next", longer)
    worker.prefill("next", longer, prefix=400)
    assert not store.match(Namespace("acme", "small", "r2", "t", "c"), longer).names
