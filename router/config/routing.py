"""The part of a configuration that says how `auto` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from router.config.values import ConfigPath, Finite, NotNegative, Section, repeated
from router.faults import unknown_model

if TYPE_CHECKING:
    from collections.abc import Collection


class HeuristicScorerConfig(Section):
    """Scores from the text of the request alone."""

    kind: Literal["heuristic"] = "heuristic"


class RecordedScorerConfig(Section):
    """Scores recorded in a JSONL file of `{"prompt": str, "scores": {model: quality}}`."""

    kind: Literal["recorded"] = "recorded"
    path: ConfigPath


class LearnedScorerConfig(Section):
    """Scores of a model that `crossfill calibrate router` fitted; `path` is its file."""

    kind: Literal["learned"] = "learned"
    path: ConfigPath


def _spelt_out(scorer: object) -> object:
    """The one scorer without settings may be given by its name alone."""
    return {"kind": scorer} if scorer == "heuristic" else scorer


_Scorer = Annotated[HeuristicScorerConfig | RecordedScorerConfig | LearnedScorerConfig, Field(discriminator="kind")]
ScorerConfig = Annotated[_Scorer, BeforeValidator(_spelt_out, json_schema_input_type=_Scorer | Literal["heuristic"])]


def _tau_kind(tau: object) -> str | None:
    # Of a mapping, the kind would stand in a fault's place like one of its keys.
    if isinstance(tau, Mapping):
        return None
    return "list" if isinstance(tau, list | tuple) else "number"


Thresholds = Annotated[
    Annotated[Finite, Tag("number")] | Annotated[tuple[Finite, ...], Tag("list")],
    Discriminator(_tau_kind, "tau_type", "Input should be a number or a list of numbers"),
]


class RoutingConfig(Section):
    """How the model `auto` chooses; the rule stands in `router.decision.policy`.

    `ladder` names two or more models, weakest first; None means that `auto` is not offered. `tau` is one number, or a
    list with one for each pair of neighbours. `cost_weight` is score per unit of cost, `ttft_weight` score per second.
    """

    ladder: tuple[str, ...] | None = None
    tau: Thresholds = 0.3
    sigma: NotNegative = 0.1
    cost_weight: NotNegative = 0.0
    ttft_weight: NotNegative = 0.0
    scorer: ScorerConfig = HeuristicScorerConfig()

    @model_validator(mode="after")
    def _ladder_and_thresholds_fit(self) -> Self:
        if self.ladder is None:
            return self
        if len(self.ladder) < 2:
            raise ValueError(f"ladder takes two models or more, weakest first; it has {len(self.ladder)}")
        if (name := repeated(list(self.ladder))) is not None:
            raise ValueError(f"ladder names {name!r} twice")
        if isinstance(self.tau, tuple) and len(self.tau) != len(self.ladder) - 1:
            raise ValueError(
                f"tau takes one number, or a list of {len(self.ladder) - 1} for the neighbours of this ladder; "
                f"it has {len(self.tau)}"
            )
        return self

    def require_known(self, models: tuple[str, ...]) -> None:
        """Raise ValueError if the ladder names a model that is not in `models`."""
        for place, name in enumerate(self.ladder or ()):
            if name not in models:
                raise unknown_model(("routing", "ladder", place), name, models)

    def require_costs(self, priced: Collection[str]) -> None:
        """Raise ValueError if cost counts and a model of the ladder is not among the `priced` ones."""
        unpriced = [name for name in self.ladder or () if name not in priced]
        if self.cost_weight > 0 and unpriced:
            raise ValueError(
                "routing.cost_weight needs a cost for every model of the ladder; there is none for "
                + ", ".join(map(repr, unpriced))
            )
