import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.ridge_correct import RidgeMap, ridge_correct, ridge_correct_reference
from crossfill_kernels.rope_rerotate import rotation_by

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(length, heads, dim, rank, dtype, device):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator) / shape[0] ** 0.5).to(device)

    width = heads * dim
    source = torch.randn(length, heads, dim, generator=generator).to(dtype).to(device)
    mean, bias = 3 * normal(1, width)[0], normal(1, width)[0]
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, dim // 2 * 2, 2).float() / dim)
    turn = rotation_by((torch.arange(length) * 3).to(device), inv_freq.to(device))
    return source, RidgeMap(mean, normal(rank, rank), bias, normal(width, rank), normal(rank, width)), turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("sizes", [(1, 1, 16, 1), (70, 2, 64, 32), (33, 3, 20, 40)], ids=str)
def test_equals_reference(triton_device, sizes, turned, dtype):
    source, state, turn = case(*sizes, dtype, triton_device)
    turn = turn if turned else None
    out = torch.full_like(source, float("nan"))
    with dispatch.forced("triton"):
        ridge_correct(source, state, out=out, rotation=turn)
    tolerance = TOLERANCE[dtype]
    want = ridge_correct_reference(source, state, rotation=turn)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
def test_moves_scattered_rows_of_strided_caches(triton_device, turned):
    _, state, turn = case(40, 2, 32, 8, torch.float32, triton_device)
    turn = turn if turned else None
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(60, 4, 32, generator=generator).to(triton_device)[:, ::2]
    out = torch.full_like(cache, float("nan"))
    read = torch.randperm(60, generator=generator)[:40].to(triton_device)
    write = torch.randperm(60, generator=generator)[:40].to(triton_device)
    with dispatch.forced("triton"):
        ridge_correct(cache, state, out=out, rotation=turn, source_slots=read, out_slots=write)
    want = torch.full_like(out, float("nan"))
    want[write] = ridge_correct_reference(cache[read], state, rotation=turn)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dim", [32, 80], ids=["one-tile", "several-tiles"])
def test_corrects_in_place(triton_device, dim):
    source, state, turn = case(20, 2, dim, 8, torch.float32, triton_device)
    want = ridge_correct_reference(source, state, rotation=turn)
    with dispatch.forced("triton"):
        ridge_correct(source, state, out=source, rotation=turn)
    torch.testing.assert_close(source, want, atol=1e-5, rtol=1e-5)


def test_a_full_rank_map_is_left_to_products(triton_device):
    source, _, turn = case(20, 2, 16, 8, torch.float32, triton_device)
    generator = torch.Generator().manual_seed(2)
    state = RidgeMap(*(torch.randn(*shape, generator=generator) / 6 for shape in ((32,), (32, 32), (32,))))
    state = state.to(triton_device)
    out = torch.full_like(source, float("nan"))
    with dispatch.forced("triton"):
        ridge_correct(source, state, out=out, rotation=turn)
    want = ridge_correct_reference(source, state, rotation=turn)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
