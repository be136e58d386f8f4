import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels.blocks import MapStorage, PackedMap
from crossfill_kernels.map_attention.cost import Work, choose_form, costs, count_work


def packed_of(kept):
    """A map that keeps the (column block, head) pairs of each row block; its storage is empty, nothing reads it."""
    senders = 3
    columns = [sorted(c * senders + h for c, h in row) for row in kept]
    offsets = torch.tensor([0, *torch.tensor([len(c) for c in columns]).cumsum(0).tolist()], dtype=torch.int32)
    flat = torch.tensor([c for row in columns for c in row], dtype=torch.int32)
    blocks = torch.arange(len(kept), dtype=torch.int32)
    return PackedMap(senders, blocks, offsets, flat, torch.zeros_like(flat), MapStorage(torch.zeros(0, 64, 64)))


pairs = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    kept=st.lists(pairs, min_size=1, max_size=4),
    nonzero=st.lists(st.booleans(), min_size=12, max_size=12),
    data=st.data(),
)
def test_counts_are_those_of_a_walk_over_the_map(kept, nonzero, data):
    chosen = sorted(data.draw(st.sets(st.integers(0, len(kept) - 1))))
    weights = torch.tensor(nonzero).view(3, 4).float()
    got = count_work(packed_of(kept), torch.tensor(chosen, dtype=torch.int64), weights, kv_heads=2, dim=64)
    mixed = products = stored = terms = 0
    for row in chosen:
        for column in {c for c, _ in kept[row]}:
            heads = [h for c, h in kept[row] if c == column]
            for group in ((0, 1), (2, 3)):
                used = [k for k in heads if any(weights[k, h] for h in group)]
                stored += len(used)
                mixed += 2 * bool(used)
            for h in range(4):
                mine = [k for k in heads if weights[k, h]]
                terms += len(mine)
                products += bool(mine)
    assert got == Work(dim=64, mixed=mixed, products=products, kept=stored, terms=terms, group=2)


def work(**changes):
    # 9 sender and 9 receiver heads, 3 KV heads, density .10 and union .25 of 2,080 causal blocks, no weight zero.
    counts = {"dim": 64, "mixed": 9 * 520, "products": 9 * 520, "kept": 3 * 1872, "terms": 9 * 1872, "group": 3}
    return Work(**(counts | changes))


def test_dense_weights_mix_while_heads_share_their_blocks():
    assert choose_form(work()) == "mix"


def test_dense_weights_multiply_first_where_the_union_is_wide():
    assert choose_form(work(mixed=9 * 900, products=9 * 900)) == "values_first"


def test_few_weights_are_walked_alone():
    assert choose_form(work(mixed=9 * 500, products=9 * 310, kept=3 * 1500, terms=2 * 1872)) == "sparse"


def test_no_form_is_free_and_work_costs():
    base = costs(work())
    for count, forms in {
        "mixed": {"mix"},
        "kept": {"mix", "values_first"},
        "products": {"sparse"},
        "terms": {"sparse"},
        "dim": {"mix", "values_first", "sparse"},
    }.items():
        more = costs(work(**{count: 2 * getattr(work(), count)}))
        assert {form for form in base if more[form] > base[form]} == forms, count


@pytest.mark.parametrize("senders", [4, 9, 16])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("overlap", [1.2, 2.0, 4.0])
def test_dense_weights_follow_the_measured_rule(senders, kv_heads, overlap):
    """Mix first when n·u < m·ρ·n_v, away from the point where both cost the same."""
    receivers = kv_heads * 3
    stored = senders * 200
    union = int(stored / overlap)
    mixed, kept = receivers * union, kv_heads * stored
    counted = Work(dim=64, mixed=mixed, products=mixed, kept=kept, terms=receivers * stored, group=3)
    if mixed < 0.9 * kept:
        assert choose_form(counted) == "mix"
    elif mixed > 1.1 * kept:
        assert choose_form(counted) == "values_first"
