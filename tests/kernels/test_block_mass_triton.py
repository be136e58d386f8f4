import importlib

import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.block_mass import (
    block_mass,
    block_mass_reference,
    block_mass_sampled,
    block_mass_sampled_reference,
)

SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# (positions, context, (heads, KV heads, d)): odd sizes, heads in groups of 1 to 4, head dimensions that are padded.
SHAPES = pytest.mark.parametrize(
    ("positions", "context", "shape"),
    [
        (range(1), 1, (2, 1, 64)),
        (range(70), 70, (3, 1, 7)),
        (range(70, 150), 150, (2, 2, 64)),
        (range(199, 200), 200, (4, 2, 128)),
        ([0, 5, 63, 64, 130, 131, 190], 195, (2, 1, 80)),
    ],
    ids=["one-token", "whole", "chunk", "decode", "compacted"],
)


def run(case):
    out, lse = case.empty_out(), torch.full(case.query.shape[:2], float("nan"), device=case.query.device)
    with dispatch.forced("triton"):
        mass = block_mass(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE, out=out, lse=lse)
    return out, mass, lse


def sampled(case, stride):
    with dispatch.forced("triton"):
        return block_mass_sampled(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=stride)


def assert_equals_reference(case):
    want, want_mass, want_lse = block_mass_reference(
        case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE
    )
    out, mass, lse = run(case)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert_close_masses(mass, want_mass)


def assert_close_masses(mass, want):
    torch.testing.assert_close(mass.mass, want.mass, atol=1e-5, rtol=1e-5)
    assert torch.equal(mass.blocks, want.blocks)
    assert torch.equal(mass.totals, want.totals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@SHAPES
def test_equals_reference(triton_device, attention_case, positions, context, shape, scattered, dtype):
    case = attention_case(positions, context, *shape, dtype, scattered)
    assert_equals_reference(case.to(triton_device))


@pytest.mark.parametrize("stride", [1, 5, 64])
@SHAPES
def test_sampled_equals_reference(triton_device, attention_case, positions, context, shape, stride):
    case = attention_case(positions, context, *shape, scattered=stride > 5).to(triton_device)
    want = block_mass_sampled_reference(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=stride)
    assert_close_masses(sampled(case, stride), want)


def test_sampled_in_bfloat16_equals_reference(triton_device, attention_case):
    case = attention_case(range(30, 140), 140, 4, 2, 64, torch.bfloat16).to(triton_device)
    want = block_mass_sampled_reference(case.query, case.keys, case.slots, case.rows, scale=SCALE, stride=8)
    assert_close_masses(sampled(case, 8), want)


def test_scratch_for_one_row_block_gives_the_same(triton_device, attention_case, monkeypatch):
    case = attention_case(range(150), 150, 2, 1, 16).to(triton_device)
    whole, whole_sampled = run(case), sampled(case, 1)
    kernels = importlib.import_module("crossfill_kernels.block_mass.triton")
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1)
    turns = kernels._turns(case.query, 3, 2, 3, 64)[1]
    assert turns == [(2, 1), (1, 1), (0, 1)]
    in_turns, in_turns_sampled = run(case), sampled(case, 1)
    assert torch.equal(in_turns[0], whole[0])
    assert torch.equal(in_turns[1].mass, whole[1].mass)
    assert torch.equal(in_turns_sampled.mass, whole_sampled.mass)


def test_masses_survive_scores_that_leave_one_block(triton_device, attention_case):
    case = attention_case(range(130), 130, 2, 1)
    case.keys[case.slots][70] = 60.0 * case.query[129, 0]
    assert_equals_reference(case.to(triton_device))


def test_no_rows_have_no_masses(triton_device, attention_case):
    case = attention_case([], 10).to(triton_device)
    assert run(case)[1].mass.shape == (6, 0, 0)
    assert sampled(case, 8).mass.shape == (6, 0, 0)


def test_keys_behind_the_last_row_are_not_read(triton_device, attention_case):
    case = attention_case(range(60, 90), 128, 2, 1)
    before = run(case.to(triton_device))
    case.keys[case.slots][90:] = float("nan")
    case.values[case.slots][90:] = float("nan")
    after = run(case.to(triton_device))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1].mass, after[1].mass)


def test_query_and_out_may_be_strided(triton_device, attention_case):
    case = attention_case(range(20, 70), 70, 2, 1).to(triton_device)
    wide = torch.cat([case.query, case.query], dim=-1)[..., :64]
    out = torch.full((50, 4, 64), float("nan"), device=triton_device)[:, ::2]
    with dispatch.forced("triton"):
        mass = block_mass(wide, case.keys, case.values, case.slots, case.rows, scale=SCALE, out=out)
    assert torch.equal(out, run(case)[0])
    assert torch.equal(mass.mass, run(case)[1].mass)
