"""Gradients through reuse, compared with what torch finds for plain formulas, and with differences."""

import pytest
import torch

from crossfill_kernels.blocks import index_of
from engines.calibration.gradients import Maps, exact, gated, gates, mapped
from engines.calibration.observation import Layer

BLOCKS, HEADS, KV_HEADS, DIM = 5, 4, 2, 16
TOKENS = 64 * BLOCKS
SCALE = DIM**-0.5


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def tensors(random):
    """Queries, keys and values of a context, and the slope of a loss in its output."""
    # Scores of some size, so that rows look at some keys more than at others.
    query, keys = 2 * random(TOKENS, HEADS, DIM), 2 * random(TOKENS, KV_HEADS, DIM)
    return query, keys, random(TOKENS, KV_HEADS, DIM), random(TOKENS, HEADS, DIM)


@pytest.fixture
def kept():
    """Blocks of every row: the first, the diagonal, and by head some between."""
    mask = torch.eye(BLOCKS, dtype=torch.bool).repeat(HEADS, 1, 1)
    mask[:, :, 0] = True
    mask[1, 4, 2] = mask[2, 3, 1] = mask[2, 4, 1] = mask[2, 4, 3] = True
    mask[3] = torch.ones(BLOCKS, BLOCKS).tril().bool()
    return mask


def spread(blocks):
    return blocks.repeat_interleave(64, dim=1).repeat_interleave(64, dim=2)


def plain(query, keys, values, opened):
    """Attention of every head, whose blocks count as much as their gates say."""
    keys, values = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * SCALE
    causal = torch.ones(TOKENS, TOKENS).tril()
    power = (scores - scores.detach().amax(dim=-1, keepdim=True)).exp() * causal * spread(opened)
    return torch.einsum("hnm,mhd->nhd", power / power.sum(dim=-1, keepdim=True), values)


def slopes(found, slope, *leaves):
    return torch.autograd.grad((found * slope).sum(), leaves)


def near(one, other, share=1e-4):
    return float((one - other).detach().abs().max()) <= share * float(other.detach().abs().max())


def index(kept):
    return index_of(kept, torch.arange(BLOCKS, dtype=torch.int32))


def test_dense_rows_have_the_gradients_of_the_plain_formula(tensors):
    *leaves, slope = (one.requires_grad_() for one in tensors)
    last = slice(TOKENS - 70, TOKENS)
    expected = plain(*leaves, torch.ones(HEADS, BLOCKS, BLOCKS))[last]
    found = exact(leaves[0][last], leaves[1], leaves[2], SCALE)
    with torch.no_grad():
        kernel = exact(leaves[0][last].contiguous(), leaves[1], leaves[2], SCALE)
    assert near(found, expected)
    assert near(kernel, expected)
    for one, other in zip(slopes(found, slope[last], *leaves), slopes(expected, slope[last], *leaves), strict=True):
        assert near(one, other)


@pytest.mark.parametrize("some", [False, True])
def test_mixed_maps_have_the_gradients_of_the_plain_formula(tensors, kept, random, some):
    query, keys, values, _ = tensors
    heads, slope = 3, random(TOKENS, 3, DIM)
    weights = random(HEADS, heads).softmax(dim=0).requires_grad_()
    # Three heads share one head of values.
    values = values[:, :1].contiguous().requires_grad_()
    maps = Maps(Layer(query, keys, SCALE), kept if some else None)
    whole = Layer(query, keys, SCALE).map(0, TOKENS) * (spread(kept) if some else 1)
    whole = whole / whole.sum(dim=-1, keepdim=True)
    expected = torch.einsum("kh,knm,md->nhd", weights, whole, values[:, 0])
    found = mapped(values, weights, maps)
    assert near(found, expected)
    for one, other in zip(slopes(found, slope, values, weights), slopes(expected, slope, values, weights), strict=True):
        assert near(one, other)


def test_leaving_out_blocks_of_a_map_changes_it_and_its_rows_still_sum_to_one(tensors, kept):
    layer = Layer(tensors[0], tensors[1], SCALE)
    whole, part = Maps(layer).rows(128, 256), Maps(layer, kept).rows(128, 256)
    assert torch.allclose(part.sum(dim=-1), torch.ones(HEADS, 128), atol=1e-5)
    assert float((whole[0] - part[0]).abs().max()) > 0.01
    assert torch.allclose(whole[3], part[3], atol=1e-6)
    assert not part[0, :64, 64:128].any()


def test_kept_blocks_have_the_gradients_of_the_plain_formula(tensors, kept):
    *leaves, slope = (one.requires_grad_() for one in tensors)
    opened = kept.float().requires_grad_()
    expected = plain(*leaves, opened)
    found = gated(*leaves, opened, index(kept), SCALE)
    assert near(found, expected)
    *mine, of_gates = slopes(found, slope, *leaves, opened)
    *other, of_opened = slopes(expected, slope, *leaves, opened)
    assert all(near(one, another) for one, another in zip(mine, other, strict=True))
    assert near(of_gates[kept], of_opened[kept])


def test_the_slope_of_a_shut_gate_is_what_opening_it_would_change(tensors, kept):
    query, keys, values, slope = tensors
    shut = torch.zeros_like(kept, dtype=torch.float32).requires_grad_()
    found = gated(query, keys, values, shut, index(kept), SCALE)
    (of_gates,) = slopes(found, slope, shut)
    for place in ((0, 3, 1), (1, 4, 1), (2, 4, 2)):
        assert not kept[place]
        more = kept.clone()
        more[place] = True
        change = float(((plain(query, keys, values, more.float()) - found) * slope).sum())
        assert abs(change) > 0.1
        assert float(of_gates[place]) == pytest.approx(change, rel=1e-3)
    assert not of_gates[~torch.ones(BLOCKS, BLOCKS).tril().bool().expand_as(kept)].any()


def test_gates_are_the_choice_and_trade_one_block_for_another():
    shares = torch.tensor([[0.3, 0.2, 0.12, 0.1, 0.01, 0.27]] * 6)[None].tril().requires_grad_()
    kept = torch.zeros(1, 6, 6, dtype=torch.bool)
    kept[0, :, 0] = kept[0, range(6), range(6)] = kept[0, 5, 1:3] = True
    # This row keeps all, and so has nothing to choose.
    kept[0, 3, :4] = True
    found = gates(shares, kept, 0.5)
    assert torch.equal(found, kept.float())
    wish = torch.zeros(1, 6, 6)
    wish[0, 5] = torch.tensor([9.0, 0.0, 0.0, 1.0, 0.0, 9.0])
    wish[0, 3] = 1.0
    (slope,) = slopes(found, wish, shares)
    assert not slope[0, :5].any()
    row = slope[0, 5].tolist()
    assert row[0] == row[5] == 0
    # The wish for one block alone is at the cost of the others, most of those that are as near to the end.
    assert row[3] > 0 > row[1] > row[2]
    assert sum(row) == pytest.approx(0, abs=1e-5)
    (slope,) = slopes(gates(shares, kept, 0.5), torch.ones(1, 6, 6), shares)
    assert float(slope.abs().max()) == pytest.approx(0, abs=1e-5)
