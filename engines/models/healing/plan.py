"""What a healing run is to do, before anything heavy is imported: its text, its stages, its rates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engines.models.catalogue import SMOLLM2


@dataclass(frozen=True)
class Stage:
    """The layers that are `dropped` in it, those of earlier stages included, and how many `steps` it takes."""

    dropped: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Plan:
    """How a student is trained: `stages` in turn, each beginning with a fade of the layers that it drops.

    `batch_tokens` are seen in every step, `positions` of them are judged by KL. The learning rate rises over
    `warmup_steps`, stays, and falls to nothing over the last `decay` of all steps.
    """

    stages: tuple[Stage, ...]
    rank: int = 32
    batch_tokens: int = 2048
    positions: int = 768
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    fade_steps: int = 40
    decay: float = 0.3
    distance_weight: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        dropped = [set(stage.dropped) for stage in self.stages]
        nested = all(one < more for one, more in itertools.pairwise(dropped))
        if not dropped or not nested or min(stage.steps for stage in self.stages) < 1:
            raise ValueError(f"need stages of at least one step that drop more and more layers, got {self.stages}")
        if not 1 <= self.fade_steps <= self.stages[-1].steps:
            raise ValueError(f"the fade has to end within the last stage, got {self.fade_steps} steps")
        if min(self.rank, self.batch_tokens, self.positions, self.warmup_steps) < 1 or not 0 < self.decay <= 1:
            raise ValueError(f"sizes have to be positive and 0 < decay <= 1, got {self}")

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The layers that are gone at the end."""
        return self.stages[-1].dropped


def shares(plan: Plan, step: int) -> dict[int, float]:
    """What is left of each layer that goes, from 1 to 0, at `step`."""
    begin, found = 0, dict.fromkeys(plan.dropped, 1.0)
    for stage in plan.stages:
        if step >= begin:
            left = max(0.0, 1.0 - (step - begin + 1) / plan.fade_steps)
            # A layer of an earlier stage is gone already.
            found |= {layer: min(found[layer], left) for layer in stage.dropped}
        begin += stage.steps
    return found


def learning_rate(plan: Plan, step: int) -> float:
    """The rate of `step`, counted from 0."""
    rise = min(1.0, (step + 1) / plan.warmup_steps)
    fall = min(1.0, (plan.steps - step) / (plan.decay * plan.steps))
    return plan.learning_rate * rise * fall


@dataclass(frozen=True)
class TextSize:
    """How much text a run has; rows of 512 tokens, the long ones of 1,024."""

    conversations: int = 512
    document_tokens: int = 500_000
    exercises: int = 400
    long_exercises: int = 200
    seed: int = 7

    def __post_init__(self) -> None:
        if min(self.conversations, self.document_tokens, self.exercises, self.long_exercises) < 1:
            raise ValueError(f"need some of every kind of text, got {self}")


@dataclass(frozen=True)
class Recipe:
    """All that one healed model comes from, apart from the machine.

    `shipped_rank`: how much of every trained product the adapter file keeps.
    """

    plan: Plan
    text: TextSize = TextSize()
    base: str = SMOLLM2
    shipped_rank: int = 16
