import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockMass
from crossfill_kernels.select_blocks import select_blocks, select_blocks_reference


def masses(blocks, heads=3, beyond=0, steps=None, left_out=0.0, seed=0, device="cpu"):
    """Random masses of row blocks; with `steps` they take few values, so that many are equal or zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(blocks, dtype=torch.int32)
    columns = max(blocks, default=-1) + 1 + beyond
    mass = torch.rand(heads, len(blocks), columns, generator=generator) ** 6
    if steps is not None:
        mass = (torch.rand(heads, len(blocks), columns, generator=generator) * steps).floor()
    mass = mass.masked_fill(torch.arange(columns) > numbers[:, None], 0.0)
    totals = mass.sum(dim=2).amax(dim=0) if steps else torch.full((len(blocks),), 64.0)
    mass = mass if steps else mass / mass.sum(dim=2, keepdim=True) * 64
    return BlockMass((mass * (1 - left_out)).to(device), numbers.to(device), totals.to(device))


def assert_same_choice(mass, top_p, cap=None):
    with dispatch.forced("triton"):
        got = select_blocks(mass, top_p=top_p, cap=cap)
    want = select_blocks_reference(mass, top_p=top_p, cap=cap)
    assert got.heads == want.heads
    assert torch.equal(got.blocks, want.blocks)
    assert torch.equal(got.offsets, want.offsets)
    # Nobody waits for the number of kept blocks, so there is room for all.
    assert torch.equal(got.columns[: want.columns.numel()], want.columns)
    assert got.columns.numel() == mass.mass.numel()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_makes_the_same_choice(triton_device, data):
    mass = masses(
        sorted(data.draw(st.sets(st.integers(0, 40), max_size=3))),
        heads=data.draw(st.integers(1, 2)),
        beyond=data.draw(st.integers(0, 3)),
        steps=data.draw(st.sampled_from([None, 1, 2, 3, 50])),
        left_out=data.draw(st.sampled_from([0.0, 0.05, 0.6])),
        seed=data.draw(st.integers(0, 2**20)),
        device=triton_device,
    )
    top_p = data.draw(st.one_of(st.sampled_from([1.0, 1e-9, 0.5]), st.floats(0.01, 1.0)))
    assert_same_choice(mass, top_p, data.draw(st.sampled_from([None, 2, 3, 7, 100])))


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_masses_of_zero_keep_what_is_forced_or_all(triton_device, top_p):
    assert_same_choice(masses([0, 4], steps=1, device=triton_device), top_p)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_makes_the_same_choice_of_many_columns(triton_device, top_p):
    assert_same_choice(masses([3, 130, 299], heads=2, device=triton_device), top_p)


def test_equal_masses_are_kept_from_the_left(triton_device):
    mass = BlockMass(
        torch.full((1, 1, 9), 4.0, device=triton_device),
        torch.tensor([8], dtype=torch.int32, device=triton_device),
        torch.tensor([36.0], device=triton_device),
    )
    with dispatch.forced("triton"):
        index = select_blocks(mass, top_p=0.5)
    assert index.columns[: int(index.offsets[-1])].tolist() == [0, 1, 2, 3, 8]


def test_masses_may_be_strided(triton_device):
    mass = masses([2, 5], device=triton_device)
    wide = torch.cat([mass.mass, mass.mass], dim=1)[:, ::2]
    assert not wide.is_contiguous()
    assert_same_choice(BlockMass(wide, mass.blocks, mass.totals), 0.6)
