from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from engines.models import safetensors_file
from engines.models.healing.student import MATRICES, NORMS, FadingLayer, Student, make_student
from engines.models.healing.teacher import final_states
from engines.models.perplexity import without_layers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.models.loading import LoadedModel

IDS = torch.arange(1000, 1030)[None]
RANK = 3


@pytest.fixture
def student(duplicate: Callable[[], LoadedModel]) -> Student:
    return make_student(duplicate(), RANK, seed=1)


@torch.inference_mode()
def logits(loaded: LoadedModel) -> torch.Tensor:
    result: torch.Tensor = loaded.model(IDS, use_cache=False).logits
    return result


def test_student_begins_as_the_whole_model(whole: LoadedModel, student: Student) -> None:
    assert torch.equal(logits(student.loaded), logits(whole))


@torch.inference_mode()
def test_student_in_bfloat16_begins_as_the_whole_model_in_bfloat16(duplicate: Callable[[], LoadedModel]) -> None:
    teacher, learner = duplicate(), duplicate()
    for loaded in (teacher, learner):
        loaded.model.to(torch.bfloat16)
    student = make_student(learner, RANK, seed=1)
    assert torch.equal(final_states(student.loaded, IDS), final_states(teacher, IDS))
    # Steps of training are smaller than bfloat16 resolves.
    assert {value.dtype for value in student.trained().values()} == {torch.float32}
    assert {matrix.weight.dtype for _, matrix in student.adapted()} == {torch.bfloat16}


def test_faded_layers_are_as_if_taken_out(whole: LoadedModel, student: Student) -> None:
    student.fade({1: 0.0, 2: 0.0})
    with without_layers(whole, [1, 2]) as rest:
        expected = logits(rest)
    torch.testing.assert_close(logits(student.loaded), expected, rtol=1e-5, atol=1e-6)
    assert (logits(whole) - expected).abs().max() > 0.1
    student.fade({1: 1.0, 2: 1.0})
    assert torch.equal(logits(student.loaded), logits(whole))


def test_share_scales_what_a_layer_changes() -> None:
    inner = nn.Linear(4, 4)
    layer = FadingLayer(inner)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), inner(x))
    layer.share = 0.25
    torch.testing.assert_close(layer(x), x + 0.25 * (inner(x) - x))
    layer.share = 0.0
    # Nor is it run.
    layer.layer = nn.Linear(5, 5)
    assert torch.equal(layer(x), x)


def test_half_faded_layer_lies_between(whole: LoadedModel, student: Student) -> None:
    seen = []
    hook = student.loaded.model.model.norm.register_forward_pre_hook(lambda _norm, given: seen.append(given[0]))
    for share in (1.0, 0.5, 0.0):
        student.fade({3: share})
        logits(student.loaded)
    hook.remove()
    there, half, gone = seen
    torch.testing.assert_close(half, (there + gone) / 2, rtol=1e-5, atol=1e-6)
    assert (there - gone).abs().mean() > 0.01


def test_adapter_adds_its_product_to_the_matrix(student: Student) -> None:
    name, matrix = list(student.adapted())[5]
    assert name == "model.layers.0.mlp.up_proj"
    x = torch.randn(7, matrix.weight.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.equal(matrix(x), x @ matrix.weight.T)
    with torch.no_grad():
        matrix.up.copy_(torch.randn(matrix.up.shape, generator=torch.Generator().manual_seed(1)))
    expected = x @ (matrix.weight + matrix.up @ matrix.down).T
    torch.testing.assert_close(matrix(x), expected, rtol=1e-4, atol=1e-5)
    assert (expected - x @ matrix.weight.T).abs().mean() > 0.5


@pytest.mark.parametrize("part", MATRICES)
def test_every_adapter_reaches_the_logits(whole: LoadedModel, student: Student, part: str) -> None:
    matrix = dict(student.adapted())[f"model.layers.2.{part}"]
    with torch.no_grad():
        matrix.up.fill_(0.3)
    assert (logits(student.loaded) - logits(whole)).abs().max() > 1e-3


def test_only_adapters_and_norms_are_trained(student: Student) -> None:
    student.loaded.model(IDS, use_cache=False).logits.square().mean().backward()
    trained = student.trained()
    kinds = {name.rpartition("layers.")[2].partition(".layer.")[2] or name for name in trained}
    factors = {f"{part}.{factor}" for part in MATRICES for factor in ("up", "down")}
    assert kinds == factors | {f"{norm}.weight" for norm in NORMS} | {"model.norm.weight"}
    assert len(trained) == 4 * (2 * len(MATRICES) + len(NORMS)) + 1
    for name, value in student.loaded.model.named_parameters():
        assert (value.grad is not None) == (name in trained), name


def test_names_are_those_of_the_base_without_the_layers_gone(tiny: Path, student: Student) -> None:
    student.fade({1: 0.0, 2: 0.5, 3: 1.0})
    assert student.gone() == (1,)
    matrices = dict(student.adapted())
    norms = dict(student.norms())
    shapes = {f"{name}.weight": tuple(matrix.weight.shape) for name, matrix in matrices.items()}
    shapes |= {name: tuple(weight.shape) for name, weight in norms.items()}
    assert shapes == {
        tensor.name: tensor.shape
        for tensor in safetensors_file.read(tiny / "model.safetensors")
        if not tensor.name.startswith("model.layers.1.") and tensor.name != "model.embed_tokens.weight"
    }


def test_matrices_are_those_of_their_names(whole: LoadedModel, student: Student) -> None:
    weights = whole.model.state_dict()
    for name, matrix in student.adapted():
        assert torch.equal(matrix.weight, weights[f"{name}.weight"])


def test_a_seed_gives_the_same_factors_and_another_seed_others(duplicate: Callable[[], LoadedModel]) -> None:
    one, again, other = (
        [matrix.down for _, matrix in make_student(duplicate(), RANK, seed).adapted()] for seed in (1, 1, 2)
    )
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
