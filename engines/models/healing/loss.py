"""What the student is trained on: the whole model's next-token distributions and its hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Losses:
    """`total` is what is minimised; `divergence` in nats a position, `distance` relative to the target's size."""

    total: Tensor
    divergence: Tensor
    distance: Tensor


def choose_positions(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` positions of `weights` [positions] (0: never), drawn by weight without replacement."""
    possible = int((weights > 0).sum())
    return torch.multinomial(weights.float(), min(count, possible), generator=generator)


def log_probabilities(states: Tensor, head: Tensor) -> Tensor:
    """Of the next token, float32 [positions, vocabulary], from hidden `states` [positions, dim] and `head`."""
    # States are bfloat16 whatever the model is in.
    return functional.linear(states.to(head.dtype), head).float().log_softmax(-1)


def divergence(student: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
    """KL(teacher ‖ student) of each position, in nats, from hidden states [positions, dim]; `head` [vocabulary, dim].

    Distributions are compared over the whole vocabulary, in float32 once the logits are there.
    """
    with torch.no_grad():
        target = log_probabilities(teacher, head)
    found = log_probabilities(student, head)
    return functional.kl_div(found, target, reduction="none", log_target=True).sum(-1)


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over positions of ‖student - teacher‖² / ‖teacher‖²; hidden states [positions, dim]."""
    target = teacher.float()
    return ((student.float() - target).square().sum(-1) / target.square().sum(-1)).mean()


def losses(student: Tensor, teacher: Tensor, head: Tensor, chosen: Tensor, distance_weight: float) -> Losses:
    """Losses of one batch: KL at the `chosen` positions, distance of the final hidden states at all of them."""
    kl = divergence(student[chosen], teacher[chosen], head).mean()
    gap = distance(student, teacher)
    return Losses(kl + distance_weight * gap, kl.detach(), gap.detach())
