import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.lowrank_correct import lowrank_correct, lowrank_correct_reference
from crossfill_kernels.rope_rerotate import rope_rerotate_reference, rotation_by
from crossfill_kernels.slots import as_slots

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
HEADS, DIM = 3, 16


def case(length, anchors=3, rank=4, dtype=torch.float32, per_token=False, seed=0, heads=HEADS, dim=DIM):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    source = normal(length, heads, dim).to(dtype)
    left, right = normal(anchors, length, rank).to(dtype), (normal(anchors, rank, heads * dim) / 4).to(dtype)
    weights = normal(*((anchors, length) if per_token else (anchors,))).softmax(0)
    return source, left, right, weights


def rotation(length, dim=DIM, rotated=None):
    rotated = rotated or dim
    return rotation_by(torch.arange(length) * 3 + 50, 1.0 / 1e4 ** (torch.arange(0, rotated, 2).float() / rotated))


def run(source, left, right, weights, **options):
    out = torch.full_like(source, float("nan"))
    lowrank_correct(source, left, right, weights, out=out, **options)
    return out


def assert_equals_reference(source, left, right, weights, **options):
    want = lowrank_correct_reference(source, left, right, weights, **options)
    tolerance = TOLERANCE[source.dtype]
    torch.testing.assert_close(
        run(source, left, right, weights, **options), want, atol=tolerance, rtol=tolerance, check_stride=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["weights", "token-weights"])
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("length", [0, 1, 65])
def test_equals_reference(length, turned, per_token, dtype):
    assert_equals_reference(
        *case(length, dtype=dtype, per_token=per_token), rotation=rotation(length) if turned else None
    )


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 100), st.integers(0, 5), st.integers(0, 9)),
    heads=st.integers(1, 4),
    dim=st.sampled_from([2, 8, 20, 64]),
    turned=st.booleans(),
    per_token=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_equals_reference_for_any_shape(sizes, heads, dim, turned, per_token, dtype, seed):
    tensors = case(*sizes, dtype, per_token, seed, heads, dim)
    assert_equals_reference(*tensors, rotation=rotation(sizes[0], dim) if turned else None)


def test_reference_equals_a_loop_over_tokens():
    source, left, right, weights = case(7, per_token=True)
    turn = rotation(7)
    want = rope_rerotate_reference(source, torch.arange(7) * 3 + 50, 1.0 / 1e4 ** (torch.arange(0, DIM, 2) / DIM))
    for token in range(7):
        for v in range(3):
            want[token] += (weights[v, token] * left[v, token] @ right[v]).view(HEADS, DIM)
    got = lowrank_correct_reference(source, left, right, weights, rotation=turn)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_an_identical_anchor_at_full_rank_gives_the_exact_target():
    source, target = torch.randn(2, 40, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    turn = rotation(40)
    aligned = lowrank_correct_reference(source, *(t[:0] for t in case(40)[1:]), rotation=turn)
    u, s, vh = torch.linalg.svd((target - aligned).flatten(1), full_matrices=False)
    other = torch.randn(40, 40)
    left, right = torch.stack([u * s, other]), torch.stack([vh, torch.randn(40, HEADS * DIM)])
    corrected = run(source, left, right, torch.tensor([1.0, 0.0]), rotation=turn)
    torch.testing.assert_close(corrected, target, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(aligned, target, atol=0.1)


def test_anchors_that_agree_correct_as_one_whatever_their_weights():
    source, left, right, weights = case(30)
    alike = left[:1].expand(3, -1, -1), right[:1].expand(3, -1, -1)
    one = run(source, left[:1], right[:1], torch.ones(1))
    torch.testing.assert_close(run(source, *alike, weights), one, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(run(source, *alike, 2 * weights), one, atol=1e-2)


def test_anchors_may_be_narrower_than_the_cache():
    source, left, right, weights = case(50)
    left, right = left.bfloat16(), right.bfloat16()
    want = lowrank_correct_reference(source, left, right, weights)
    torch.testing.assert_close(run(source, left, right, weights), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("scattered_source", [False, True])
@pytest.mark.parametrize("scattered_out", [False, True])
def test_reads_and_writes_rows_of_a_cache(scattered_source, scattered_out, turned, dtype):
    _, left, right, weights = case(40, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(90, HEADS, DIM, generator=generator).to(dtype)
    target = torch.full_like(cache, float("nan"))
    read = torch.randperm(90, generator=generator)[:40] if scattered_source else torch.arange(7, 47)
    write = torch.randperm(90, generator=generator)[:40] if scattered_out else torch.arange(50, 90)
    turn = rotation(40) if turned else None
    slots = {"source_slots": as_slots(read), "out_slots": as_slots(write)}
    lowrank_correct(cache, left, right, weights, out=target, rotation=turn, **slots)
    want = torch.full_like(cache, float("nan"))
    want[write] = lowrank_correct_reference(cache[read], left, right, weights, rotation=turn)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(target, want, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("turned", [False, True], ids=["values", "keys"])
def test_corrects_in_place(turned):
    source, *anchors = case(40)
    turn = rotation(40) if turned else None
    want = run(source, *anchors, rotation=turn)
    lowrank_correct(source, *anchors, out=source, rotation=turn)
    torch.testing.assert_close(source, want, atol=0, rtol=0)


def test_rows_may_be_matrices():
    source, *anchors = case(20)
    out = torch.full((20, HEADS * DIM), float("nan"))
    lowrank_correct(source.flatten(1), *anchors, out=out)
    torch.testing.assert_close(out, run(source, *anchors).flatten(1), atol=0, rtol=0)
    cache = torch.full((30, HEADS, DIM), float("nan"))
    lowrank_correct(source.flatten(1), *anchors, out=cache, rotation=rotation(20), out_slots=slice(4, 24))
    torch.testing.assert_close(cache[4:24], run(source, *anchors, rotation=rotation(20)), atol=0, rtol=0)


def test_inputs_may_be_strided():
    source, left, right, weights = case(20, per_token=True)
    pool = torch.randn(20, 2 * HEADS, DIM)
    pool[:, ::2] = source
    out = torch.full((20, 2 * HEADS, DIM), float("nan"))[:, 1::2]
    strided = (pool[:, ::2], left.mT.contiguous().mT, right.mT.contiguous().mT, weights.T.contiguous().T)
    lowrank_correct(*strided, out=out, rotation=rotation(20))
    want = run(source, left, right, weights, rotation=rotation(20))
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6, check_stride=False)


def test_the_reference_can_be_forced():
    before = dispatch.calls().get(("lowrank_correct", "reference"), 0)
    with dispatch.forced("reference"):
        assert_equals_reference(*case(20), rotation=rotation(20))
    assert dispatch.calls()["lowrank_correct", "reference"] == before + 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda a: a.update(source=a["source"].double()), "source"),
        (lambda a: a.update(out=a["out"][:9]), "out"),
        (lambda a: a.update(out_slots=torch.arange(1, 11)), "out_slots"),
        (lambda a: a.update(source_slots=slice(0, 11)), "source_slots"),
        (lambda a: a.update(left=a["left"][0]), "left"),
        (lambda a: a.update(left=a["left"][:, :9]), "left"),
        (lambda a: a.update(left=a["left"].half()), "left"),
        (lambda a: a.update(right=a["right"][:2]), "right"),
        (lambda a: a.update(right=a["right"][..., :40]), "right"),
        (lambda a: a.update(right=a["right"].bfloat16()), "right"),
        (lambda a: a.update(weights=a["weights"][:2]), "weights"),
        (lambda a: a.update(weights=a["weights"].bfloat16()), "weights"),
        (lambda a: a.update(weights=-a["weights"]), "weights"),
        (lambda a: a.update(weights=a["weights"] * float("inf")), "weights"),
        (lambda a: a.update(weights=a["weights"] * float("nan")), "weights"),
        (lambda a: a.update(rotation=rotation(9)), "rotation"),
        (lambda a: a.update(rotation=rotation(10, 2 * DIM)), "rotation"),
        (lambda a: a.update(out=a["out"].view(10, 1, HEADS * DIM)), "out"),
    ],
)
def test_a_misfit_names_the_argument_and_writes_nothing(change, argument):
    names = ("source", "left", "right", "weights")
    arguments = {**dict(zip(names, case(10), strict=True)), "out": torch.zeros(10, HEADS, DIM)}
    change(arguments)
    with pytest.raises(ArgumentError) as caught:
        lowrank_correct(**arguments)
    assert caught.value.argument == argument
    assert not arguments["out"].any()
