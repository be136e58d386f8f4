import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfill_kernels import dispatch
from crossfill_kernels.errors import ArgumentError
from crossfill_kernels.native import library
from crossfill_kernels.rope_rerotate import rope_rerotate, rope_rerotate_reference, rotate_keys, rotation_by
from crossfill_kernels.slots import as_slots

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def frequencies(rotated=64, base=10000.0):
    return 1.0 / base ** (torch.arange(0, rotated, 2).float() / rotated)


def keys_of(length, heads=3, dim=64, dtype=torch.float32, seed=0):
    return torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(keys, delta, inv_freq, layout="neox"):
    out = torch.full_like(keys, float("nan"))
    rope_rerotate(keys, delta, inv_freq, layout=layout, out=out)
    return out


def assert_equals_reference(keys, delta, inv_freq, layout="neox"):
    want = rope_rerotate_reference(keys, delta, inv_freq, layout=layout)
    tolerance = TOLERANCE[keys.dtype]
    torch.testing.assert_close(run(keys, delta, inv_freq, layout), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["neox", "gptj"])
@pytest.mark.parametrize("rotated", [64, 32, 6], ids=["whole", "half", "few"])
@pytest.mark.parametrize("length", [0, 1, 65])
def test_equals_reference(length, rotated, layout, dtype):
    keys = keys_of(length, dtype=dtype)
    assert_equals_reference(keys, -7, frequencies(rotated), layout)
    assert_equals_reference(keys, torch.arange(length) * 11 - 100, frequencies(rotated), layout)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 140),
    heads=st.integers(1, 4),
    dim=st.sampled_from([2, 8, 24, 64, 80, 130]),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    layout=st.sampled_from(["neox", "gptj"]),
    per_token=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_equals_reference_for_any_shape(length, heads, dim, share, layout, per_token, dtype, seed):
    keys = keys_of(length, heads, dim, dtype, seed)
    delta = torch.randint(-4000, 4000, (length,), generator=torch.Generator().manual_seed(seed)) if per_token else seed
    assert_equals_reference(keys, delta, frequencies(max(2, int(dim * share) // 2 * 2)), layout)


@pytest.mark.parametrize("layout", ["neox", "gptj"])
def test_reference_equals_complex_multiplication(layout):
    keys, inv_freq = keys_of(9, dim=16).double(), frequencies(16)
    pairs = keys.unflatten(-1, (2, 8)).transpose(-1, -2) if layout == "neox" else keys.unflatten(-1, (8, 2))
    turn = torch.polar(torch.ones(8).double(), 5 * inv_freq.double())
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    want = turned.transpose(-1, -2).flatten(-2) if layout == "neox" else turned.flatten(-2)
    torch.testing.assert_close(rope_rerotate_reference(keys, 5, inv_freq, layout=layout), want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layout", ["neox", "gptj"])
def test_keys_of_one_position_become_those_of_another(layout):
    bare, inv_freq = keys_of(50), frequencies()
    position = torch.arange(50)
    there = run(bare, position + 3000, inv_freq, layout)
    moved = run(run(bare, position, inv_freq, layout), 3000, inv_freq, layout)
    torch.testing.assert_close(moved, there, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(run(bare, position, inv_freq, layout), there, atol=1e-2)


@pytest.mark.parametrize("distance", [1_000_003, 2**31 + 5])
def test_a_far_move_and_back_loses_nothing(distance):
    keys, inv_freq = keys_of(20), frequencies()
    back = run(run(keys, distance, inv_freq), -distance, inv_freq)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=1e-5)
    # The control: what float32 angles would do to a far move.
    exact = rope_rerotate_reference(keys, distance, inv_freq)
    angle = torch.tensor([float(distance)]) * inv_freq
    a, b = keys.chunk(2, dim=-1)
    careless = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    assert (careless - exact).abs().max() > 1e-2
    torch.testing.assert_close(run(keys, distance, inv_freq), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("native_variant")
@pytest.mark.parametrize("layout", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_may_be_rotated_in_place(dtype, layout):
    keys = keys_of(70, dtype=dtype)
    want = run(keys, 12, frequencies(32), layout)
    rope_rerotate(keys, 12, frequencies(32), layout=layout, out=keys)
    assert torch.equal(keys, want)


@pytest.mark.usefixtures("native_variant")
@pytest.mark.parametrize("scattered_source", [False, True])
@pytest.mark.parametrize("scattered_out", [False, True])
def test_rows_of_one_cache_move_to_rows_of_another(scattered_source, scattered_out):
    cache, target = keys_of(200), torch.full((150, 3, 64), float("nan"))
    order = torch.Generator().manual_seed(1)
    read = torch.randperm(200, generator=order)[:70] if scattered_source else torch.arange(20, 90)
    write = torch.randperm(150, generator=order)[:70] if scattered_out else torch.arange(80, 150)
    delta = torch.arange(70)
    rope_rerotate(cache, delta, frequencies(), out=target, source_slots=as_slots(read), out_slots=as_slots(write))
    want = torch.full_like(target, float("nan"))
    want[write] = rope_rerotate_reference(cache[read], delta, frequencies())
    torch.testing.assert_close(target, want, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_keys_may_be_strided():
    pool = keys_of(40, heads=8)
    keys, out = pool[::2, 1:4], torch.full((20, 5, 64), float("nan"))[:, 1:4]
    rope_rerotate(keys, 9, frequencies(), out=out)
    torch.testing.assert_close(out, run(keys.contiguous(), 9, frequencies()), atol=0, rtol=0)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_narrow_keys_may_become_float32(implementation):
    keys, out = keys_of(30, dtype=torch.bfloat16), torch.full((30, 3, 64), float("nan"))
    with dispatch.forced(implementation):
        rope_rerotate(keys, 9, frequencies(), out=out)
    want = rope_rerotate_reference(keys.float(), 9, frequencies())
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_one_rotation_serves_several_layers():
    inv_freq, delta = frequencies(), torch.arange(30)
    rotation = rotation_by(delta, inv_freq)
    for seed in range(2):
        keys = keys_of(30, seed=seed)
        out = torch.full_like(keys, float("nan"))
        rotate_keys(keys, rotation, out=out)
        assert torch.equal(out, run(keys, delta, inv_freq))


def test_rotated_right_factors_rotate_their_product():
    left = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
    right = keys_of(5)
    product = (left @ right.flatten(1)).unflatten(1, (3, 64))
    turned = left @ run(right, 321, frequencies()).flatten(1)
    torch.testing.assert_close(turned.view_as(product), run(product, 321, frequencies()), atol=1e-5, rtol=1e-5)


ROPES = {
    "llama": ("llama", {"rope_type": "default", "rope_theta": 10000.0}),
    "llama3 scaling": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "qwen3": ("qwen3", {"rope_type": "default", "rope_theta": 1000000.0}),
}


def rotary(name):
    """The rotary embedding of transformers and its way to apply it, of a config of this family."""
    from engines import torchvision_stub

    torchvision_stub.install()
    family, parameters = ROPES[name]
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "head_dim": 64, "max_position_embeddings": 2048}
    if family == "llama":
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

        return LlamaRotaryEmbedding(LlamaConfig(rope_parameters=parameters, **sizes)), apply_rotary_pos_emb
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    return Qwen3RotaryEmbedding(Qwen3Config(rope_parameters=parameters, **sizes)), apply_rotary_pos_emb


@pytest.mark.parametrize("name", ROPES)
def test_moves_keys_as_transformers_places_them(name):
    embedding, apply = rotary(name)
    bare = keys_of(24)

    def place(offset):
        cos, sin = embedding(bare, (torch.arange(24) + offset)[None])
        keys = bare.transpose(0, 1)[None]
        return apply(keys, keys, cos, sin)[1][0].transpose(0, 1)

    # Near offsets: the model's own float32 angles are only exact there.
    moved = run(place(3).contiguous(), 13, embedding.inv_freq)
    torch.testing.assert_close(moved, place(16), atol=1e-5, rtol=1e-5)


def test_llama3_scaling_is_in_the_frequencies_of_transformers():
    plain, scaled = rotary("llama")[0].inv_freq, rotary("llama3 scaling")[0].inv_freq
    assert not torch.allclose(run(keys_of(4), 50, plain), run(keys_of(4), 50, scaled), atol=1e-3)


def test_the_c_library_serves_where_it_was_built():
    want = "native" if library.load() else "reference"
    before = dispatch.calls().get(("rope_rerotate", want), 0)
    run(keys_of(3), 1, frequencies())
    assert dispatch.calls()["rope_rerotate", want] == before + 1


@pytest.mark.usefixtures("native_variant")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["neox", "gptj"])
@pytest.mark.parametrize("rotated", [64, 30, 150])
def test_every_variant_of_the_c_library_agrees(rotated, layout, dtype):
    assert_equals_reference(keys_of(70, dim=150, dtype=dtype), 31, frequencies(rotated), layout)


def test_the_reference_can_be_forced():
    before = dispatch.calls().get(("rope_rerotate", "reference"), 0)
    with dispatch.forced("reference"):
        assert_equals_reference(keys_of(40), 8, frequencies())
    assert dispatch.calls()["rope_rerotate", "reference"] == before + 1


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"keys": torch.zeros(10, 192)}, "keys"),
        ({"keys": torch.zeros(10, 3, 64, dtype=torch.float64)}, "keys"),
        ({"keys": torch.zeros(10, 64, 3).transpose(1, 2)}, "keys"),
        ({"delta": torch.zeros(9, dtype=torch.int64)}, "delta"),
        ({"delta": torch.zeros(10)}, "delta"),
        ({"inv_freq": frequencies(66)}, "inv_freq"),
        ({"inv_freq": frequencies().double()}, "inv_freq"),
        ({"layout": "llama"}, "layout"),
        ({"out": torch.zeros(9, 3, 64)}, "out"),
        ({"out": torch.zeros(10, 3, 32)}, "out"),
        ({"out": torch.zeros(10, 3, 64, dtype=torch.bfloat16)}, "out"),
        ({"source_slots": slice(1, 11)}, "source_slots"),
        ({"source_slots": slice(None, 10)}, "source_slots"),
        ({"source_slots": slice(0, 10, 2)}, "source_slots"),
        ({"source_slots": slice(0, 10), "delta": torch.zeros(9, dtype=torch.int64)}, "delta"),
        ({"out_slots": torch.arange(1, 11)}, "out_slots"),
        ({"out_slots": torch.arange(-1, 9)}, "out_slots"),
        ({"out_slots": torch.arange(9)}, "out_slots"),
        ({"out_slots": torch.arange(10, dtype=torch.int32)}, "out_slots"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_misfit_names_the_argument_and_writes_nothing(change, argument):
    arguments = {"keys": torch.ones(10, 3, 64), "delta": 1, "inv_freq": frequencies(), "out": torch.zeros(10, 3, 64)}
    arguments.update(change)
    with pytest.raises(ArgumentError) as caught:
        rope_rerotate(**arguments)
    assert caught.value.argument == argument
    assert not arguments["out"].any()


def test_a_rotation_of_other_keys_is_refused():
    with pytest.raises(ArgumentError, match="rotation: 9 rotations for 10 keys"):
        rotate_keys(keys_of(10), rotation_by(torch.arange(9), frequencies()), out=keys_of(10))
