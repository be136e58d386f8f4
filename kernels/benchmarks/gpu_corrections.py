"""The Triton kernels of the correction ops against their float64 references, and their times; part of gpu_check.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_correctness import TOLERANCE, Check, difference
from gpu_timing import Run, Timing

from crossfill_kernels import dispatch
from crossfill_kernels.anchor_distance import anchor_distance, anchor_distance_reference
from crossfill_kernels.lowrank_correct import lowrank_correct, lowrank_correct_reference
from crossfill_kernels.ridge_correct import RidgeMap, ridge_correct, ridge_correct_reference
from crossfill_kernels.rope_rerotate import Rotation, rope_rerotate, rope_rerotate_reference, rotation_by


@dataclass(frozen=True)
class Segment:
    """A segment's keys of one layer, and what corrects them."""

    tokens: int
    kv_heads: int
    d: int
    anchors: int
    rank: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The segment in words."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} tokens, {self.kv_heads} heads, d {self.d}, {self.anchors} anchors of {self.rank}, {kind}"


@dataclass(frozen=True)
class Given:
    """Tensors of a segment on a device."""

    keys: torch.Tensor
    delta: torch.Tensor
    inv_freq: torch.Tensor
    rotation: Rotation
    left: torch.Tensor
    right: torch.Tensor
    weights: torch.Tensor
    ridge: RidgeMap


def segments(*, small: bool) -> tuple[Segment, ...]:
    """What is checked and timed: segments of agents' prompts on a GPU, tiny ones in the interpreter."""
    if small:
        return (Segment(20, 2, 16, 2, 4, torch.float32), Segment(33, 1, 16, 3, 4, torch.bfloat16))
    sizes = ((96, 3, 64, 10, 32), (512, 8, 128, 10, 32), (2048, 8, 128, 10, 32), (777, 4, 80, 3, 16))
    return tuple(Segment(*size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16))


def check_corrections(segment: Segment, device: torch.device) -> Iterator[Check]:
    """Run every correction op on a segment, as Triton kernels, and compare."""
    given, tolerance = make_given(segment, device), TOLERANCE[segment.dtype]
    wanted = {
        "rope_rerotate": rope_rerotate_reference(given.keys, given.delta, given.inv_freq),
        "lowrank_correct": lowrank_correct_reference(
            given.keys, given.left, given.right, given.weights, rotation=given.rotation
        ),
        "ridge_correct": ridge_correct_reference(given.keys, given.ridge, rotation=given.rotation),
        "anchor_distance": anchor_distance_reference(given.keys, given.left, given.right),
    }
    for op, run in runs(given).items():
        with dispatch.forced("triton"):
            result = run()
        yield Check(op, segment.name, difference(result, wanted[op], tolerance))


def time_corrections(segment: Segment, device: torch.device, measure: Callable[[Run], float]) -> Iterator[Timing]:
    """Milliseconds of every correction op; checked before."""
    heads = f"{segment.kv_heads}"
    for op, run in runs(make_given(segment, device)).items():
        with dispatch.forced("triton"):
            run()
            yield Timing(op, segment.name, heads, segment.tokens, None, measure(run) * 1e3)


def runs(given: Given) -> dict[str, Callable[[], torch.Tensor]]:
    """A call of each op that gives its result; outputs are not a number before."""
    out = torch.full_like(given.keys, float("nan"))

    def rerotated() -> torch.Tensor:
        rope_rerotate(given.keys, given.delta, given.inv_freq, out=out)
        return out

    def corrected() -> torch.Tensor:
        lowrank_correct(given.keys, given.left, given.right, given.weights, out=out, rotation=given.rotation)
        return out

    def mapped() -> torch.Tensor:
        ridge_correct(given.keys, given.ridge, out=out, rotation=given.rotation)
        return out

    def distances() -> torch.Tensor:
        return anchor_distance(given.keys, given.left, given.right)

    return {
        "rope_rerotate": rerotated,
        "lowrank_correct": corrected,
        "ridge_correct": mapped,
        "anchor_distance": distances,
    }


def make_given(segment: Segment, device: torch.device) -> Given:
    """Random tensors of a segment, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    width = segment.kv_heads * segment.d

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    keys = torch.randn(segment.tokens, segment.kv_heads, segment.d, generator=generator).to(device, segment.dtype)
    left = normal(segment.anchors, segment.tokens, segment.rank).to(device, segment.dtype)
    right = torch.randn(segment.anchors, segment.rank, width, generator=generator).to(device, segment.dtype)
    weights = torch.softmax(torch.randn(segment.anchors, generator=generator), dim=0).to(device)
    inner = (normal(segment.rank, segment.rank), normal(width))
    ridge = RidgeMap(normal(width), *inner, normal(width, segment.rank), normal(segment.rank, width)).to(device)
    delta = torch.arange(segment.tokens, device=device) * 3 + 50
    inv_freq = (1.0 / 1e4 ** (torch.arange(0, segment.d, 2).float() / segment.d)).to(device)
    return Given(keys, delta, inv_freq, rotation_by(delta, inv_freq), left, right, weights, ridge)
