import pytest
import torch

from crossfill_kernels import dispatch
from crossfill_kernels.rope_rerotate import rope_rerotate, rope_rerotate_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(length, heads, dim, rotated, dtype, device):
    generator = torch.Generator().manual_seed(length)
    keys = torch.randn(length + 40, heads, dim, generator=generator).to(dtype).to(device)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, rotated, 2).float() / rotated)
    return keys, inv_freq.to(device), generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["neox", "gptj"])
@pytest.mark.parametrize(("length", "heads", "dim", "rotated"), [(1, 1, 16, 16), (70, 3, 64, 64), (33, 2, 80, 20)])
def test_equals_reference(triton_device, length, heads, dim, rotated, layout, dtype):
    cache, inv_freq, _ = case(length, heads, dim, rotated, dtype, triton_device)
    keys, out = cache[:length], torch.full_like(cache[:length], float("nan"))
    delta = torch.arange(length, device=triton_device) * 31 - 200
    tolerance = TOLERANCE[dtype]
    for move in (-77, delta):
        with dispatch.forced("triton"):
            rope_rerotate(keys, move, inv_freq, layout=layout, out=out)
        want = rope_rerotate_reference(keys, move, inv_freq, layout=layout)
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)


def test_moves_scattered_rows(triton_device):
    cache, inv_freq, generator = case(50, 2, 32, 32, torch.float32, triton_device)
    read = torch.randperm(90, generator=generator)[:50].to(triton_device)
    write = torch.randperm(90, generator=generator)[:50].to(triton_device)
    out = torch.full_like(cache, float("nan"))
    with dispatch.forced("triton"):
        rope_rerotate(cache, 5, inv_freq, out=out, source_slots=read, out_slots=write)
    want = torch.full_like(cache, float("nan"))
    want[write] = rope_rerotate_reference(cache[read], 5, inv_freq)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("layout", ["neox", "gptj"])
def test_rotates_in_place(triton_device, layout):
    keys, inv_freq, _ = case(10, 2, 32, 16, torch.float32, triton_device)
    want = rope_rerotate_reference(keys, 5, inv_freq, layout=layout)
    with dispatch.forced("triton"):
        rope_rerotate(keys, 5, inv_freq, layout=layout, out=keys)
    torch.testing.assert_close(keys, want, atol=1e-5, rtol=1e-5)
