import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.mix_mass import (
    QuantisedMass,
    mix_mass,
    mix_mass_reference,
    quantise_mass,
    quantise_mass_reference,
)
from crossfill_kernels.mix_mass.codes import fractions, thresholds
from crossfill_kernels.select_blocks import select_blocks


def probabilities(heads, length, seed=0):
    """Causal maps [heads, length, length] whose rows sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(heads, length, length, generator=generator)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def masses_of(maps):
    """Block masses of dense maps whose length is a multiple of 64."""
    heads, length, _ = maps.shape
    blocks = length // 64
    mass = maps.view(heads, blocks, 64, blocks, 64).sum(dim=(2, 4)).contiguous()
    return BlockMass(mass, torch.arange(blocks, dtype=torch.int32), torch.full((blocks,), 64.0))


def random_masses(blocks, heads=3, seed=0, power=8):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1
    # In float64 and never 0: a list of which every mass underflows has no shares.
    mass = torch.rand(heads, len(blocks), columns, generator=generator).double().clamp(min=1e-4) ** power
    mass = mass.masked_fill(torch.arange(columns) > numbers[:, None], 0.0)
    mass = (mass / mass.sum(dim=2, keepdim=True) * 64).float()
    return BlockMass(mass, numbers, torch.full((len(blocks),), 64.0))


def random_weights(senders, receivers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(senders, receivers, generator=generator) * (
        torch.rand(senders, receivers, generator=generator) < 0.7
    )


def dense(mass, columns):
    """Quantised masses as float64 [H, R, columns]."""
    return mix_mass_reference(mass, torch.eye(mass.heads), columns).mass.double()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.sets(st.integers(0, 40), max_size=8),
    heads=st.integers(1, 4),
    receivers=st.integers(1, 5),
    beyond=st.integers(0, 3),
    keep=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    power=st.sampled_from([0, 8, 60]),
    seed=st.integers(0, 2**20),
)
@pytest.mark.usefixtures("native_variant")
def test_native_equals_reference_for_any_shape(blocks, heads, receivers, beyond, keep, power, seed):
    mass = random_masses(sorted(blocks), heads, seed, power)
    got, want = quantise_mass(mass, keep=keep), quantise_mass_reference(mass, keep=keep)
    for name in ("offsets", "columns", "codes"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    weights, columns = random_weights(heads, receivers, seed), mass.mass.shape[2] + beyond
    mixed, expected = mix_mass(got, weights, columns), mix_mass_reference(got, weights, columns)
    torch.testing.assert_close(mixed.mass, expected.mass, atol=1e-5, rtol=1e-5)
    assert torch.equal(mixed.totals, torch.ones(len(blocks)))
    assert torch.equal(mixed.blocks, mass.blocks)


@pytest.mark.usefixtures("native_variant")
def test_a_code_is_near_what_it_stands_for():
    mass = masses_of(probabilities(4, 640))
    shares = mass.mass.double() / 64
    got = dense(quantise_mass(mass, keep=1.0), 10)
    stored = got > 0
    assert bool((stored == (shares > 2 ** (-255.5 / 16))).all())
    assert float((got / shares)[stored].sub(1).abs().max()) <= 0.0219


def test_codes_are_fractions_of_a_row():
    assert float(fractions()[255]) == 1.0
    assert bool((thresholds() < fractions()).all())
    assert bool((thresholds()[1:] > fractions()[:-1]).all())


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.98])
@pytest.mark.usefixtures("native_variant")
def test_the_kept_share_is_reached_with_the_fewest(keep):
    mass = random_masses([3, 20, 33])
    quantised = quantise_mass(mass, keep=keep)
    for entry in range(9):
        head, row = divmod(entry, 3)
        mine = slice(int(quantised.offsets[entry]), int(quantised.offsets[entry + 1]))
        kept = mass.mass[head, row].double()[quantised.columns[mine].long()]
        assert float(kept.sum()) >= keep * 64 - 1e-9
        assert float(kept.sum() - kept.min()) < keep * 64


@pytest.mark.usefixtures("native_variant")
def test_mixed_masses_are_the_masses_of_the_mixed_map():
    maps, weights = probabilities(3, 320), torch.softmax(torch.randn(3, 5), dim=0)
    want = masses_of(torch.einsum("kh,kpt->hpt", weights, maps)).mass / 64
    got = mix_mass(quantise_mass(masses_of(maps), keep=1.0), weights, 5)
    torch.testing.assert_close(got.mass, want, atol=3e-5, rtol=0.0219)
    assert float((got.mass.sum(dim=2) - 1).abs().max()) < 0.0219
    # The control: other weights give other masses.
    other = mix_mass(quantise_mass(masses_of(maps), keep=1.0), weights.roll(1, dims=0), 5)
    assert not torch.allclose(other.mass, want, rtol=0.0219)


@pytest.mark.usefixtures("native_variant")
def test_mixing_is_linear():
    mass = quantise_mass(random_masses([1, 8, 30]))
    first, second = random_weights(3, 4, 1), random_weights(3, 4, 2)
    apart = mix_mass(mass, first, 31).mass * 2 + mix_mass(mass, second, 31).mass
    torch.testing.assert_close(mix_mass(mass, 2 * first + second, 31).mass, apart, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("native_variant")
def test_a_one_hot_weight_takes_one_head():
    mass = quantise_mass(random_masses([1, 8, 30]))
    weights = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    got = mix_mass(mass, weights, 31).mass
    assert torch.equal(got.double(), dense(mass, 31)[[2, 0]])


def test_mixed_masses_can_be_chosen_from():
    mixed = mix_mass(quantise_mass(random_masses([1, 8, 30])), torch.softmax(torch.randn(3, 4), dim=0), 31)
    kept = select_blocks(mixed, top_p=0.8).mask(31)
    assert bool(((mixed.mass * kept).sum(dim=2) >= 0.8).all())


def test_no_rows_is_no_mass():
    quantised = quantise_mass(random_masses([]))
    assert quantised.codes.numel() == 0
    assert mix_mass(quantised, torch.ones(3, 2), 4).mass.shape == (2, 0, 4)


def test_weights_may_be_strided():
    mass, weights = quantise_mass(random_masses([1, 8, 30])), random_weights(3, 4)
    assert torch.equal(mix_mass(mass, weights.t().contiguous().t(), 31).mass, mix_mass(mass, weights, 31).mass)


@pytest.mark.parametrize("keep", [0.0, 1.5, float("nan")])
def test_a_share_outside_its_range_is_named(keep):
    with pytest.raises(ArgumentError) as caught:
        quantise_mass(random_masses([2]), keep=keep)
    assert caught.value.argument == "keep"


def test_masses_that_end_before_the_diagonal_are_named():
    mass = random_masses([2, 5])
    with pytest.raises(ArgumentError) as caught:
        quantise_mass(BlockMass(mass.mass[..., :5], mass.blocks, mass.totals))
    assert caught.value.argument == "mass"


def replaced(mass, **fields):
    return dataclasses.replace(mass, **fields)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda m, w, c: (m, w[:2], c), "weights"),
        (lambda m, w, c: (m, w[0], c), "weights"),
        (lambda m, w, c: (m, w.double(), c), "weights"),
        (lambda m, w, c: (m, -w, c), "weights"),
        (lambda m, w, c: (m, w / 0, c), "weights"),
        (lambda m, w, c: (m, w[:, :0], c), "weights"),
        (lambda m, w, c: (m, w.to("meta"), c), "weights"),
        (lambda m, w, c: (m, w, -1), "columns"),
        (lambda m, w, c: (m, w, c - 1), "columns"),
        (lambda m, w, c: (replaced(m, columns=m.columns - 1), w, c), "columns"),
        (lambda m, w, c: (replaced(m, offsets=m.offsets.flip(0).contiguous()), w, c), "offsets"),
        (lambda m, w, c: (replaced(m, offsets=m.offsets // 2), w, c), "offsets"),
    ],
    ids=[
        *("heads", "rank", "dtype", "negative", "infinite", "no-receivers", "device", "negative-count", "few-columns"),
        *("column-below-0", "falling", "short"),
    ],
)
def test_a_misfit_names_the_argument(change, argument):
    mass, weights = quantise_mass(random_masses([2, 5])), torch.ones(3, 2)
    mass, weights, columns = change(mass, weights, 6)
    with pytest.raises(ArgumentError) as caught:
        mix_mass(mass, weights, columns)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offsets", torch.zeros(3, dtype=torch.int32)),
        ("columns", torch.zeros(2)),
        ("codes", torch.zeros(1, dtype=torch.uint8)),
        ("blocks", torch.zeros(1)),
    ],
)
def test_a_field_of_the_wrong_form_is_named(field, value):
    fields = {
        "blocks": torch.zeros(1, dtype=torch.int32),
        "offsets": torch.tensor([0, 2], dtype=torch.int32),
        "columns": torch.zeros(2, dtype=torch.int32),
        "codes": torch.zeros(2, dtype=torch.uint8),
    }
    QuantisedMass(1, **fields)
    with pytest.raises(ArgumentError) as caught:
        QuantisedMass(1, **{**fields, field: value})
    assert caught.value.argument == field


@pytest.mark.parametrize(
    ("blocks", "columns", "argument"),
    [
        ([3], [2, 2, 1], "columns"),
        ([3], [3, 1, 0], "columns"),
        ([1], [0, 1, 2], "columns"),
        ([4], [0, 1, 2], "columns"),
    ],
    ids=["twice", "falling", "above-diagonal", "no-such-block"],
)
def test_published_lists_are_checked_before_they_are_mixed(blocks, columns, argument):
    def ints(*numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    codes = torch.full((3,), 200, dtype=torch.uint8)
    mass = QuantisedMass(1, ints(*blocks), ints(0, 3), ints(*columns), codes)
    with pytest.raises(ArgumentError) as caught:
        mix_mass(mass, torch.ones(1, 1), 4)
    assert caught.value.argument == argument
