from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.models.healing.loss import choose_positions, distance, divergence, losses

GENERATOR = torch.Generator().manual_seed(3)
STUDENT = torch.randn(6, 8, generator=GENERATOR)
TEACHER = torch.randn(6, 8, generator=GENERATOR)
HEAD = torch.randn(50, 8, generator=GENERATOR)


def kl(student: torch.Tensor, teacher: torch.Tensor) -> np.ndarray:
    """KL(teacher ‖ student), from its definition."""
    scores = [states.double().numpy() @ HEAD.double().numpy().T for states in (student, teacher)]
    found, target = (np.exp(one) / np.exp(one).sum(-1, keepdims=True) for one in scores)
    result: np.ndarray = (target * np.log(target / found)).sum(-1)
    return result


def test_divergence_is_that_of_its_definition() -> None:
    expected = kl(STUDENT, TEACHER)
    np.testing.assert_allclose(divergence(STUDENT, TEACHER, HEAD).numpy(), expected, rtol=1e-4)
    # The control: the other way round is another figure.
    assert not np.allclose(kl(TEACHER, STUDENT), expected, rtol=1e-2)


def test_equal_states_do_not_diverge() -> None:
    assert divergence(STUDENT, STUDENT, HEAD).abs().max() < 1e-6
    assert distance(STUDENT, STUDENT) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_bfloat16_fit_a_head_in_either_type(dtype: torch.dtype) -> None:
    states = STUDENT.bfloat16().requires_grad_()
    found = divergence(states, TEACHER.bfloat16(), HEAD.to(dtype))
    np.testing.assert_allclose(found.detach().numpy(), kl(STUDENT, TEACHER), rtol=0.05)
    (gradient,) = torch.autograd.grad(found.sum(), states)
    assert (gradient != 0).any(-1).all()


def test_distance_is_relative_to_the_target() -> None:
    assert distance(3 * TEACHER, TEACHER).item() == pytest.approx(4, rel=1e-5)
    assert distance(TEACHER.new_zeros(TEACHER.shape), TEACHER).item() == pytest.approx(1)
    # Each position counts the same, however large its states.
    scale = torch.tensor([1.0, 10, 100, 1, 1, 1])[:, None]
    assert distance(STUDENT * scale, TEACHER * scale).item() == pytest.approx(distance(STUDENT, TEACHER).item())


def test_total_joins_the_chosen_divergences_and_the_distance_of_all() -> None:
    chosen = torch.tensor([1, 4])
    student = STUDENT.clone().requires_grad_()
    found = losses(student, TEACHER, HEAD, chosen, 0.5)
    assert found.divergence.item() == pytest.approx(kl(STUDENT, TEACHER)[[1, 4]].mean(), rel=1e-4)
    assert found.distance.item() == pytest.approx(distance(STUDENT, TEACHER).item())
    assert found.total.item() == pytest.approx(found.divergence.item() + 0.5 * found.distance.item())
    alone = losses(STUDENT, TEACHER, HEAD, chosen, 0.0)
    assert alone.total.item() == pytest.approx(found.divergence.item())
    assert found.total.requires_grad
    assert not found.divergence.requires_grad
    assert not found.distance.requires_grad


def test_teacher_is_not_trained() -> None:
    teacher = TEACHER.clone().requires_grad_()
    found = divergence(STUDENT.clone().requires_grad_(), teacher, HEAD)
    assert torch.autograd.grad(found.sum(), teacher, allow_unused=True) == (None,)


def test_positions_are_drawn_once_and_never_those_of_weight_zero() -> None:
    weights = torch.tensor([0, 1, 8, 0, 1, 1, 8, 0, 1], dtype=torch.uint8)
    for seed in range(50):
        chosen = choose_positions(weights, 4, torch.Generator().manual_seed(seed)).tolist()
        assert len(set(chosen)) == 4
        assert set(chosen) <= {1, 2, 4, 5, 6, 8}
    # There are no more to be had than these.
    everything = choose_positions(weights, 100, torch.Generator().manual_seed(0)).tolist()
    assert sorted(everything) == [1, 2, 4, 5, 6, 8]


def test_heavy_positions_are_drawn_as_often_as_their_weight_says() -> None:
    weights = torch.tensor([1] * 8 + [8], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    drawn = [int(choose_positions(weights, 1, generator)) for _ in range(1000)]
    # Expected 500 of weight 8 and 500 of all the others, with a standard deviation of 16.
    assert 420 < drawn.count(8) < 580


def test_a_generator_gives_the_same_positions_again() -> None:
    weights = torch.ones(100, dtype=torch.uint8)
    one, again, other = (choose_positions(weights, 9, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
