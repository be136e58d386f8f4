import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.blocks import BlockIndex, index_of
from crossfill_kernels.guided_attention import guided_attention, guided_attention_reference
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import BLOCK

SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random_index(case, density, forced=True):
    columns = max(0, case.rows.last) // BLOCK + 1
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(case.query.shape[1], case.rows.block_count, columns, generator=generator) < density
    if forced:
        mask[:, :, 0] = True
        mask |= torch.arange(columns)[None, :] == case.rows.blocks.cpu()[:, None]
    return index_of(mask.to(case.query.device), case.rows.blocks)


def run(case, index):
    out = case.empty_out()
    with dispatch.forced("triton"):
        guided_attention(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE, out=out)
    return out


def assert_equals_reference(case, index):
    want = guided_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, index, scale=SCALE)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(run(case, index), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(
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
def test_equals_reference(triton_device, attention_case, positions, context, shape, scattered, dtype):
    case = attention_case(positions, context, *shape, dtype, scattered).to(triton_device)
    assert_equals_reference(case, random_index(case, 0.4))


def test_every_block_kept_is_exact_attention(triton_device, attention_case):
    case = attention_case(range(70, 140), 140, 2, 1, 16).to(triton_device)
    want = paged_attention_reference(case.query, case.keys, case.values, case.slots, case.rows, scale=SCALE)
    torch.testing.assert_close(run(case, random_index(case, 1.0)), want, atol=1e-5, rtol=1e-5)
    # The control: with blocks left out it is not.
    assert not torch.allclose(run(case, random_index(case, 0.0)), want, atol=1e-2)


def test_a_row_without_kept_keys_gives_zeros(triton_device, attention_case):
    case = attention_case(range(100), 100, 2, 1, 16).to(triton_device)
    assert torch.equal(run(case, random_index(case, 0.0, forced=False)), torch.zeros_like(case.query))


def test_columns_behind_the_last_list_are_not_read(triton_device, attention_case):
    case = attention_case(range(100), 100, 2, 1, 16).to(triton_device)
    index = random_index(case, 0.5)
    longer = torch.cat([index.columns, index.columns.new_full((9,), 2**30)])
    padded = BlockIndex(index.heads, index.blocks, index.offsets, longer)
    assert torch.equal(run(case, padded), run(case, index))


def test_what_is_not_kept_is_not_read(triton_device, attention_case):
    case = attention_case(range(130, 200), 200, 2, 1)
    index = random_index(case, 0.0)
    before = run(case.to(triton_device), index.to(triton_device))
    case.keys[case.slots][64:128] = float("nan")
    case.values[case.slots][64:128] = float("nan")
    assert torch.equal(run(case.to(triton_device), index.to(triton_device)), before)


def test_query_and_out_may_be_strided(triton_device, attention_case):
    case = attention_case(range(20, 70), 70, 2, 1).to(triton_device)
    index = random_index(case, 0.5)
    wide = torch.cat([case.query, case.query], dim=-1)[..., :64]
    out = torch.full((50, 4, 64), float("nan"), device=triton_device)[:, ::2]
    with dispatch.forced("triton"):
        guided_attention(wide, case.keys, case.values, case.slots, case.rows, index, scale=SCALE, out=out)
    assert torch.equal(out, run(case, index))
