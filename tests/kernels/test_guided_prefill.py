"""The ops of guided prefill in a row: a sender's masses, published, mixed, chosen from, attended to by a receiver."""

import pytest
import torch

from crossfill_kernels.block_mass import block_mass
from crossfill_kernels.guided_attention import guided_attention
from crossfill_kernels.mix_mass import mix_mass, quantise_mass
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.select_blocks import select_blocks

HEADS, COLUMNS, SCALE = 6, 10, 0.25


@pytest.fixture
def sender(attention_case):
    """Heads of KV head 0 look mostly at column block 2, those of KV head 1 at block 5."""
    case = attention_case(range(64 * COLUMNS), 64 * COLUMNS, heads=HEADS, scattered=True, seed=1)
    case.query[:, :, 0] = 4.0
    for kv_head, column in enumerate((2, 5)):
        case.keys[case.slots[64 * column : 64 * column + 64], kv_head, 0] = 4.0
    return case


@pytest.fixture
def masses(sender):
    out = sender.empty_out()
    return block_mass(sender.query, sender.keys, sender.values, sender.slots, sender.rows, scale=SCALE, out=out)


def guided(case, index):
    out = case.empty_out()
    guided_attention(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE, out=out)
    return out


def exact(case):
    return paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)


def published(masses, weights):
    return mix_mass(quantise_mass(masses), weights, COLUMNS)


@pytest.mark.usefixtures("native_variant")
def test_all_of_the_mass_is_exact_attention(sender, masses):
    index = select_blocks(masses, top_p=1.0)
    torch.testing.assert_close(guided(sender, index), exact(sender), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("native_variant")
def test_the_error_falls_with_the_mass_that_is_kept(sender, masses):
    want = exact(sender)
    errors, densities = [], []
    for top_p in (0.3, 0.6, 0.9, 0.97):
        index = select_blocks(published(masses, torch.eye(HEADS)), top_p=top_p)
        errors.append(float((guided(sender, index) - want).norm() / want.norm()))
        densities.append(int(index.offsets[-1]))
    assert errors == sorted(errors, reverse=True)
    assert densities == sorted(densities)
    assert errors[-1] < 0.1 < errors[0]


@pytest.mark.usefixtures("native_variant")
def test_masses_of_the_same_head_keep_more_than_those_of_another(sender, masses):
    want = exact(sender)
    own = select_blocks(published(masses, torch.eye(HEADS)), top_p=0.8)
    shuffled = select_blocks(published(masses, torch.eye(HEADS).roll(3, dims=1)), top_p=0.8)
    assert (guided(sender, own) - want).norm() < 0.5 * (guided(sender, shuffled) - want).norm()
