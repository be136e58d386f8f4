import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.anchor_distance import (
    anchor_distance,
    anchor_distance_reference,
    token_distance,
    token_distance_reference,
)
from crossfill_kernels.errors import ArgumentError

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(length, anchors=3, rank=4, width=48, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return normal(length, width), normal(anchors, length, rank), normal(anchors, rank, width)


def assert_equals_reference(segment, left, right, lengths=None):
    tolerance = TOLERANCE[segment.dtype]
    got = anchor_distance(segment, left, right, lengths=lengths)
    want = anchor_distance_reference(segment, left, right, lengths=lengths)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    got, want = token_distance(segment, left, right), token_distance_reference(segment, left, right)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 64, 150])
def test_equals_reference(length, dtype):
    assert_equals_reference(*case(length, dtype=dtype))
    assert_equals_reference(*case(length, dtype=dtype), lengths=torch.tensor([0, length // 2, length]))


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(0, 150),
    anchors=st.integers(0, 5),
    rank=st.integers(0, 9),
    width=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_equals_reference_for_any_shape(length, anchors, rank, width, dtype, seed):
    lengths = torch.randint(0, length + 1, (anchors,), generator=torch.Generator().manual_seed(seed))
    assert_equals_reference(*case(length, anchors, rank, width, dtype, seed), lengths=lengths)


def test_reference_equals_the_norm_of_a_reconstruction():
    segment, left, right = case(20)
    for v in range(3):
        want = (segment - left[v] @ right[v])[:7].norm()
        got = anchor_distance_reference(segment, left, right, lengths=torch.full((3,), 7))[v]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [20, 300])
def test_an_identical_anchor_at_full_rank_is_at_no_distance(length):
    segment, *_ = case(length)
    u, s, vh = torch.linalg.svd(segment.double(), full_matrices=False)
    left, right = (u * s).float()[None], vh.float()[None]
    assert anchor_distance(segment, left, right)[0] <= 1e-6 * segment.norm()
    # The control: the expansion in float32 cancels.
    cross = ((segment @ right[0].T) * left[0]).sum()
    expanded = segment.square().sum() - 2 * cross + torch.trace((left[0].T @ left[0]) @ (right[0] @ right[0].T))
    assert expanded.abs().sqrt() > 1e-5 * segment.norm()


@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-5])
def test_a_small_distance_is_exact_in_proportion_to_the_segment(share):
    segment, *_ = case(100)
    u, s, vh = torch.linalg.svd(segment.double(), full_matrices=False)
    away = torch.randn(100, 48, generator=torch.Generator().manual_seed(9))
    shifted = segment + share * away * segment.norm() / away.norm()
    left, right = (u * s).float()[None], vh.float()[None]
    got, want = (f(shifted, left, right)[0] for f in (anchor_distance, anchor_distance_reference))
    assert abs(got - want) <= 1e-6 * segment.norm()


def test_the_compared_prefix_leaves_the_rest_out():
    segment, left, right = case(90)
    before = anchor_distance(segment, left, right, lengths=torch.tensor([70, 70, 90]))
    segment[70:] = 100.0
    after = anchor_distance(segment, left, right, lengths=torch.tensor([70, 70, 90]))
    assert torch.equal(before[:2], after[:2])
    assert after[2] > before[2] + 1


def test_token_distances_add_up_to_the_whole():
    segment, left, right = case(90)
    whole = token_distance(segment, left, right).norm(dim=1)
    torch.testing.assert_close(anchor_distance(segment, left, right), whole, atol=1e-5, rtol=1e-5)


def test_anchors_may_be_narrower_than_the_segment():
    segment, left, right = case(50)
    assert_equals_reference(segment, left.bfloat16(), right.bfloat16())


def test_reads_rows_of_a_cache_of_several_heads():
    segment, left, right = case(40)
    cache = torch.full((90, 6, 16), float("nan"))[:, ::2]
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:40]
    cache[slots] = segment.view(40, 3, 16)
    want = anchor_distance(segment, left, right)
    torch.testing.assert_close(anchor_distance(cache, left, right, slots=slots), want, atol=0, rtol=0)


def test_inputs_may_be_strided():
    segment, left, right = case(40)
    strided = left.mT.contiguous().mT, right.mT.contiguous().mT
    want = anchor_distance(segment, left, right)
    torch.testing.assert_close(anchor_distance(segment, *strided), want, atol=1e-5, rtol=1e-5)


def test_the_reference_can_be_forced():
    before = dispatch.calls().get(("anchor_distance", "reference"), 0)
    with dispatch.forced("reference"):
        assert_equals_reference(*case(20))
    assert dispatch.calls()["anchor_distance", "reference"] == before + 2


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: a.update(segment=a["segment"].double()), "segment"),
        (lambda a: a.update(segment=a["segment"][0]), "segment"),
        (lambda a: a.update(slots=slice(0, 11)), "slots"),
        (lambda a: a.update(slots=torch.arange(9)), "left"),
        (lambda a: a.update(left=a["left"][:, :9]), "left"),
        (lambda a: a.update(right=a["right"][..., :40]), "right"),
        (lambda a: a.update(right=a["right"][:2]), "right"),
        (lambda a: a.update(lengths=torch.full((2,), 3)), "lengths"),
        (lambda a: a.update(lengths=torch.full((3,), 3.0)), "lengths"),
        (lambda a: a.update(lengths=torch.full((3,), 11)), "lengths"),
        (lambda a: a.update(lengths=torch.full((3,), -1)), "lengths"),
    ],
)
def test_a_misfit_names_the_argument(change, argument):
    arguments = dict(zip(("segment", "left", "right"), case(10), strict=True))
    change(arguments)
    with pytest.raises(ArgumentError) as caught:
        anchor_distance(**arguments)
    assert caught.value.argument == argument
