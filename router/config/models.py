"""The part of a configuration that names models."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from router.config.values import ModelName, NotNegative, Section, SystemRole, WorkerUrl, repeated


class CostConfig(Section):
    """Price of a model per million tokens of prompt and of answer, in a unit that all models share."""

    input: NotNegative
    output: NotNegative


class ModelConfig(Section):
    """A model and the workers that serve it.

    `capability` in [0, 1] is how well the model answers the hardest queries; without it the ladder's default is used.
    `prefill_tokens_per_s` is how fast a worker prefills; without it the router learns it.
    `system_role` says how it takes system turns: `system` renames developer turns, `native` changes nothing, `user`
    merges both into the first user turn. `reuses` says that its workers can take what other models left in the store.
    """

    name: ModelName
    workers: tuple[WorkerUrl, ...] = Field(min_length=1)
    capability: float | None = Field(default=None, ge=0, le=1)
    cost: CostConfig | None = None
    prefill_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    system_role: SystemRole = "system"
    reuses: bool = False

    @model_validator(mode="after")
    def _workers_differ(self) -> Self:
        if (url := repeated(list(self.workers))) is not None:
            raise ValueError(f"model {self.name!r} lists the worker {url} twice")
        return self
