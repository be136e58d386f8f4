import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.lowrank_correct import lowrank_correct, lowrank_correct_reference
from crossfill_kernels.rope_rerotate import rotation_by

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(length, anchors, rank, heads, dim, dtype, device, per_token=False):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    source = normal(length, heads, dim).to(dtype)
    left, right = normal(anchors, length, rank).to(dtype), (normal(anchors, rank, heads * dim) / 4).to(dtype)
    weights = normal(*((anchors, length) if per_token else (anchors,))).softmax(0)
    turn = rotation_by(
        (torch.arange(length) * 3).to(device), (1.0 / 1e4 ** (torch.arange(0, dim, 2).float() / dim)).to(device)
    )
    return [t.to(device) for t in (source, left, right, weights)], turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize(
    ("sizes", "per_token"),
    [((1, 1, 1, 1, 16), False), ((70, 3, 40, 2, 64), True), ((33, 2, 32, 3, 20), False), ((5, 0, 4, 1, 16), False)],
)
def test_equals_reference(triton_device, sizes, per_token, turned, dtype):
    tensors, turn = case(*sizes, dtype, triton_device, per_token)
    turn = turn if turned else None
    out = torch.full_like(tensors[0], float("nan"))
    with dispatch.forced("triton"):
        lowrank_correct(*tensors, out=out, rotation=turn)
    tolerance = TOLERANCE[dtype]
    want = lowrank_correct_reference(*tensors, rotation=turn)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
def test_moves_scattered_rows_of_strided_caches(triton_device, turned):
    (_, left, right, weights), turn = case(40, 2, 8, 2, 32, torch.float32, triton_device)
    turn = turn if turned else None
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(60, 4, 32, generator=generator).to(triton_device)[:, ::2]
    out = torch.full_like(cache, float("nan"))
    read = torch.randperm(60, generator=generator)[:40].to(triton_device)
    write = torch.randperm(60, generator=generator)[:40].to(triton_device)
    strided = (left.mT.contiguous().mT, right.mT.contiguous().mT, weights)
    with dispatch.forced("triton"):
        lowrank_correct(cache, *strided, out=out, rotation=turn, source_slots=read, out_slots=write)
    want = torch.full_like(out, float("nan"))
    want[write] = lowrank_correct_reference(cache[read], left, right, weights, rotation=turn)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_corrects_in_place(triton_device):
    tensors, turn = case(20, 2, 8, 2, 32, torch.float32, triton_device)
    want = lowrank_correct_reference(*tensors, rotation=turn)
    with dispatch.forced("triton"):
        lowrank_correct(*tensors, out=tensors[0], rotation=turn)
    torch.testing.assert_close(tensors[0], want, atol=1e-5, rtol=1e-5)
