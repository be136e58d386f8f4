import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.anchor_distance import (
    anchor_distance,
    anchor_distance_reference,
    token_distance,
    token_distance_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(length, anchors, rank, width, dtype, device):
    generator = torch.Generator().manual_seed(length)
    shapes = (length, width), (anchors, length, rank), (anchors, rank, width)
    return [torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "anchors", "rank", "width"), [(1, 1, 1, 1), (70, 3, 40, 130), (64, 2, 16, 64)])
def test_equals_reference(triton_device, length, anchors, rank, width, dtype):
    tensors = case(length, anchors, rank, width, dtype, triton_device)
    lengths = torch.arange(anchors, device=triton_device) * length // anchors
    with dispatch.forced("triton"):
        whole, part = anchor_distance(*tensors), anchor_distance(*tensors, lengths=lengths)
        tokens = token_distance(*tensors)
    tolerance = TOLERANCE[dtype]
    for got, want in (
        (whole, anchor_distance_reference(*tensors)),
        (part, anchor_distance_reference(*tensors, lengths=lengths)),
        (tokens, token_distance_reference(*tensors)),
    ):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_heads_of_one_number_may_stand_apart(triton_device):
    segment, left, right = case(20, 2, 3, 4, torch.float32, triton_device)
    apart = torch.full((20, 8, 1), float("nan"), device=triton_device)[:, ::2]
    apart.copy_(segment.view(20, 4, 1))
    with dispatch.forced("triton"):
        got = anchor_distance(apart, left, right)
    torch.testing.assert_close(got, anchor_distance_reference(segment, left, right), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("apart", [False, True], ids=["heads-adjacent", "heads-apart"])
def test_reads_scattered_rows(triton_device, apart):
    segment, left, right = case(40, 2, 8, 48, torch.float32, triton_device)
    cache = torch.full((60, 6, 16), float("nan"), device=triton_device)
    cache = cache[:, ::2] if apart else cache[:, 1:4]
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:40].to(triton_device)
    cache[slots] = segment.view(40, 3, 16)
    with dispatch.forced("triton"):
        got = anchor_distance(cache, left, right, slots=slots)
    torch.testing.assert_close(got, anchor_distance_reference(segment, left, right), atol=1e-5, rtol=1e-5)
