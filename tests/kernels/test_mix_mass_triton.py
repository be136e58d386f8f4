import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.mix_mass import (
    QuantisedMass,
    mix_mass,
    mix_mass_reference,
    quantise_mass,
    quantise_mass_reference,
)


def masses(blocks, heads, steps=None, beyond=0, seed=0, device="cpu"):
    """Random masses that sum to 64; with `steps` they take few values, so that many are equal or zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1 + beyond
    mass = torch.rand(heads, len(blocks), columns, generator=generator) ** 8
    if steps is not None:
        mass = (mass * steps).ceil() - 1
    mass = mass.masked_fill(torch.arange(columns) > numbers[:, None], 0.0)
    mass = mass / mass.sum(dim=2, keepdim=True).clamp(min=1e-6) * 64
    return BlockMass(mass.to(device), numbers.to(device), torch.full((len(blocks),), 64.0, device=device))


def triton_of(mass, keep):
    with dispatch.forced("triton"):
        return quantise_mass(mass, keep=keep)


@pytest.mark.parametrize("keep", [0.3, 0.98, 1.0])
@pytest.mark.parametrize("steps", [None, 3], ids=["distinct", "equal"])
@pytest.mark.parametrize("blocks", [[], [0], [0, 1, 7, 20], [150]], ids=str)
def test_quantises_as_the_reference_does(triton_device, blocks, steps, keep):
    mass = masses(blocks, 3, steps, beyond=2, device=triton_device)
    got, want = triton_of(mass, keep), quantise_mass_reference(mass, keep=keep)
    assert torch.equal(got.offsets, want.offsets)
    assert torch.equal(got.columns, want.columns)
    assert torch.equal(got.codes, want.codes)


def test_every_code_is_the_nearest(triton_device):
    # Shares at and just below every threshold between two codes.
    edge = torch.exp2((torch.arange(256, dtype=torch.float64) - 255.5) / 16).float()
    shares = torch.cat([edge, torch.nextafter(edge, torch.zeros(256))])
    mass = BlockMass(
        shares.view(1, 1, 512).to(triton_device),
        torch.tensor([511], dtype=torch.int32, device=triton_device),
        torch.ones(1, device=triton_device),
    )
    got, want = triton_of(mass, 1.0), quantise_mass_reference(mass, keep=1.0)
    assert torch.equal(got.columns, want.columns)
    assert torch.equal(got.codes, want.codes)


@pytest.mark.parametrize(
    ("blocks", "senders", "receivers", "beyond"),
    [([0], 1, 1, 0), ([0, 1, 7, 20], 5, 3, 0), ([2, 100], 16, 40, 3), ([3, 4], 33, 2, 100), ([], 2, 2, 4)],
    ids=["one-block", "few-heads", "many-receivers", "many-senders", "no-rows"],
)
def test_mixes_as_the_reference_does(triton_device, blocks, senders, receivers, beyond):
    mass = quantise_mass_reference(masses(blocks, senders, device=triton_device), keep=0.9)
    weights = torch.rand(senders, receivers, generator=torch.Generator().manual_seed(1)).to(triton_device) / senders
    columns = max(blocks, default=0) + 1 + beyond
    with dispatch.forced("triton"):
        got = mix_mass(mass, weights, columns)
    want = mix_mass_reference(mass, weights, columns)
    torch.testing.assert_close(got.mass, want.mass, atol=1e-5, rtol=1e-5)
    assert torch.equal(got.blocks, want.blocks)
    assert torch.equal(got.totals, want.totals)


def test_weights_may_be_transposed(triton_device):
    mass = quantise_mass_reference(masses([5], 4, device=triton_device), keep=0.9)
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).to(triton_device).t()
    with dispatch.forced("triton"):
        got = mix_mass(mass, weights, 6)
    torch.testing.assert_close(got.mass, mix_mass_reference(mass, weights, 6).mass, atol=1e-5, rtol=1e-5)


def test_a_head_without_masses_adds_nothing(triton_device):
    # Sender head 1 has no list; its neighbours' entries must not be taken for its own.
    lists = [torch.tensor(values, device=triton_device) for values in ([0, 1, 1, 2], [2, 2], [255, 239])]
    offsets, columns, codes = lists[0].int(), lists[1].int(), lists[2].to(torch.uint8)
    mass = QuantisedMass(3, torch.tensor([2], dtype=torch.int32, device=triton_device), offsets, columns, codes)
    with dispatch.forced("triton"):
        got = mix_mass(mass, torch.eye(3, device=triton_device), 3)
    want = torch.tensor([[0, 0, 1.0], [0, 0, 0], [0, 0, 0.5]], device=triton_device)
    torch.testing.assert_close(got.mass[:, 0], want, atol=1e-6, rtol=0)
