"""The maths of re-rotation, in plain torch."""

import torch

from crossfill_kernels.rope_rerotate.rotation import Layout, Rotation


def rope_rerotate_reference(
    keys: torch.Tensor, delta: int | torch.Tensor, inv_freq: torch.Tensor, *, layout: Layout = "neox"
) -> torch.Tensor:
    """Turn each pair (a, b) of rotated dimensions by the angle φ = delta_t · inv_freq_i.

        a' = a cos φ - b sin φ,  b' = b cos φ + a sin φ

    Pair i is dimensions (i, i + d_rot/2) in layout `neox` and (2i, 2i + 1) in `gptj`; dimensions from d_rot on stay.

    Args:
        keys: [T, H_kv, d].
        delta: positions that the keys move, one for all or int64 [T].
        inv_freq: [d_rot/2].
        layout: which dimensions turn together.

    Returns:
        [T, H_kv, d] in the dtype of `keys`, computed in float64.
    """
    angle = torch.as_tensor(delta, device=keys.device).double().reshape(-1, 1) * inv_freq.double()
    return rotate_reference(keys, Rotation(angle.cos(), angle.sin(), layout))


def rotate_reference(keys: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """`rope_rerotate_reference` with the sines and cosines ready made."""
    turned = keys.double().clone()
    half = rotation.half
    first, second = (slice(0, half), slice(half, 2 * half))
    if rotation.layout == "gptj":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = keys[..., first].double(), keys[..., second].double()
    cos, sin = rotation.cos.double()[:, None], rotation.sin.double()[:, None]  # [T or 1, 1, half]
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned.to(keys.dtype)
