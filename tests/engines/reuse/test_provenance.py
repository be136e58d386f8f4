"""Exact is what was computed from exact rows only; nothing else is ever left for others."""

import torch

from engines.reuse.provenance import Provenance

from .conftest import ALLOW
from .test_sender import TOKENS, namespace

SLOTS = torch.tensor([7, 3, 9, 1, 8, 2])


def hops(provenance, slots=SLOTS):
    return [provenance.hops_of(int(slot)) for slot in slots]


def test_rows_after_a_guided_one_are_as_approximate():
    provenance = Provenance(16)
    provenance.extend(SLOTS[:4], 0, guided_from=2)
    provenance.extend(SLOTS[4:], provenance.hops_of(int(SLOTS[3])), guided_from=None)
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


def test_hops_add_up_to_no_more_than_a_byte_holds():
    provenance = Provenance(16)
    provenance.extend(SLOTS, 255, guided_from=0, hops=300)
    assert hops(provenance) == [255] * 6


def test_what_stands_on_guided_rows_is_not_left_for_others(sender, start, receive, store):
    """A model that is both receiver and sender: its turn after a guided one is computed on approximate keys."""
    sender.arrive("sender", TOKENS)
    sender.prefill("sender", TOKENS)
    both = sender.engine._settings.model_copy(update={"model": receive().engine._settings.model, "publish": (2, 3)})
    both = both.model_copy(update={"pairs": receive().engine._settings.pairs, "wait_s": 30})
    worker, own = start(both, seed=2), namespace()
    own = type(own)("acme", "small", "r2", "t", "c")
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
