"""The correction ops together, as an engine uses them: factor, match, weigh, correct, and a hop further."""

import pytest
import torch

from crossfill_kernels.anchor_distance import anchor_distance
from crossfill_kernels.anchor_weights import anchor_weights, normalised_entropy
from crossfill_kernels.lowrank_correct import lowrank_correct
from crossfill_kernels.lowrank_factor import lowrank_factor
from crossfill_kernels.ridge_correct import ridge_correct
from crossfill_kernels.ridge_fit import RidgeSums
from crossfill_kernels.rope_rerotate import rope_rerotate, rotate_keys, rotation_by

LENGTH, HEADS, DIM, ANCHORS = 40, 2, 16, 3
WIDTH = HEADS * DIM
INV_FREQ = 1.0 / 1e4 ** (torch.arange(0, DIM, 2).float() / DIM)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def aligned(keys, moved):
    out = torch.empty_like(keys)
    rope_rerotate(keys, moved, INV_FREQ, out=out)
    return out


def pool_of(matrices, rank):
    factors = [lowrank_factor(matrix.flatten(1), rank) for matrix in matrices]
    return torch.stack([f.left for f in factors]), torch.stack([f.right for f in factors])


def corrected(source, bases, deltas, rank, moved):
    """KVCMAS for one layer's keys: the corrected cache, the weights."""
    far = anchor_distance(source, *pool_of(bases, rank))
    weights = anchor_weights(far, temperature=0.01, scale="sqrt_dim", numbers=source.numel())
    out = torch.full_like(source, float("nan"))
    lowrank_correct(source, *pool_of(deltas, rank), weights, out=out, rotation=rotation_by(moved, INV_FREQ))
    return out, weights


@pytest.mark.parametrize("which", range(ANCHORS))
def test_a_segment_that_equals_an_anchor_at_full_rank_gets_its_exact_target(which):
    bases, targets = normal(2, ANCHORS, LENGTH, HEADS, DIM).unbind()
    deltas = [target - aligned(base, 300) for base, target in zip(bases, targets, strict=True)]
    # The ranks are beyond those of the matrices.
    out, weights = corrected(bases[which], bases, deltas, WIDTH + 3, moved=300)
    torch.testing.assert_close(out, targets[which], atol=1e-5, rtol=1e-5)
    assert weights.sum().item() == pytest.approx(1.0)
    assert normalised_entropy(weights) < 1e-6
    uncorrected = aligned(bases[which], 300)
    assert (uncorrected - targets[which]).abs().max() > 0.1


def test_a_second_hop_starts_from_what_the_first_one_gave():
    first, second, third = normal(3, LENGTH, HEADS, DIM).unbind()
    other = normal(LENGTH, HEADS, DIM, seed=1)
    to_second, to_third = second - aligned(first, 300), third - aligned(second, -120)
    hop, _ = corrected(first, [first, other], [to_second, other], WIDTH, moved=300)
    chained, _ = corrected(hop, [second, other], [to_third, other], WIDTH, moved=-120)
    torch.testing.assert_close(chained, third, atol=1e-4, rtol=1e-4)


def test_an_anchor_learned_at_one_offset_serves_at_another_by_turning_its_right_factor():
    source, change = normal(2, LENGTH, HEADS, DIM).unbind()
    target = aligned(source + change, 77)
    left, right = pool_of([change], WIDTH)
    turned = torch.empty(WIDTH, HEADS, DIM)
    rotate_keys(right[0].view(WIDTH, HEADS, DIM), rotation_by(77, INV_FREQ), out=turned)
    out = torch.empty_like(source)
    rotation = rotation_by(77, INV_FREQ)
    lowrank_correct(source, left, turned.flatten(1)[None], torch.ones(1), out=out, rotation=rotation)
    torch.testing.assert_close(out, target, atol=1e-5, rtol=1e-5)


def test_a_ridge_map_learned_from_dense_prefills_corrects_a_segment_that_is_like_none_of_them():
    truth = normal(WIDTH, 4, seed=2) @ normal(4, WIDTH, seed=3) / WIDTH
    sums = RidgeSums(WIDTH)
    for seed in range(4, 9):
        x = aligned(normal(LENGTH, HEADS, DIM, seed=seed), 300).flatten(1)
        sums.add(x, x @ truth)
    source = normal(LENGTH, HEADS, DIM, seed=20)
    out = torch.full((2 * LENGTH, HEADS, DIM), float("nan"))
    slots = torch.randperm(2 * LENGTH)[:LENGTH]
    ridge_correct(source, sums.solve(0.0, rank=4), out=out, rotation=rotation_by(300, INV_FREQ), out_slots=slots)
    x = aligned(source, 300).flatten(1)
    torch.testing.assert_close(out[slots].flatten(1), x + x @ truth, atol=1e-5, rtol=1e-5)
    assert (x @ truth).abs().max() > 0.1
