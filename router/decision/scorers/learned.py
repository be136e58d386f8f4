"""Qualities by logistic regression on numbers read from the text, as `crossfill calibrate router` fitted it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.config.text_file import read_bounded
from router.decision.policy import Scores
from router.decision.scorers.inputs import INPUT_NAMES, INPUTS_VERSION, inputs_of, standardised
from router.errors import ConfigError
from router.faults import first_fault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from router.decision.features import Features
    from router.decision.scorers import Candidate

NAME = "learned"

_MOST_BYTES = 2**20

# Decisions are logged and sent as a header; four decimals are far below what a prediction is worth.
_DECIMALS = 4

_OnePerInput = Field(min_length=len(INPUT_NAMES), max_length=len(INPUT_NAMES))
# Far beyond any fit, and so small that no sum of them overflows: inputs are bounded deviations. Means and scales are
# those of inputs; a scale has no least value, since an input that hardly varied has one of rounding errors.
_Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
_Mean = Annotated[float, Field(ge=-1e9, le=1e9)]
_Scale = Annotated[float, Field(ge=0, le=1e9)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Inputs(_Part):
    """Which numbers the coefficients belong to, and how they were distributed in training."""

    version: int
    names: tuple[str, ...]
    mean: Annotated[tuple[_Mean, ...], _OnePerInput]
    scale: Annotated[tuple[_Scale, ...], _OnePerInput]


class Logistic(_Part):
    """Log-odds of a good answer: the intercept, and a coefficient per deviation of each input."""

    intercept: _Weight
    coefficients: Annotated[tuple[_Weight, ...], _OnePerInput]

    def quality(self, deviations: Sequence[float]) -> float:
        """In [0, 1]."""
        odds = self.intercept + math.fsum(map(float.__mul__, self.coefficients, deviations))
        # The far side of exp() overflows, and says no more than this.
        return 1 / (1 + math.exp(min(700.0, -odds)))


class Training(_Part):
    """Where the coefficients come from."""

    data: str
    data_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    prompts: Annotated[int, Field(ge=1)]
    held_out: Annotated[int, Field(ge=0)]
    seed: int
    regularisation: dict[str, float]


class Artifact(_Part):
    """The file of a learned scorer. `routing` and `metrics` are for the reader."""

    kind: Literal["crossfill-learned-scorer"]
    format: Literal[1]
    inputs: Inputs
    models: Annotated[dict[str, Logistic], Field(min_length=1)]
    training: Training
    routing: dict[str, Any]
    metrics: dict[str, Any]
    created_with: dict[str, str]


class LearnedScorer:
    """A logistic model for each candidate, on the same inputs."""

    def __init__(self, artifact: Artifact) -> None:
        self._inputs = artifact.inputs
        self._models = artifact.models

    def score(self, features: Features, models: Sequence[Candidate]) -> Scores:
        """Qualities in [0, 1] for `models`, all of which the artifact must know."""
        inputs = inputs_of(features)
        deviations = standardised(inputs, self._inputs.mean, self._inputs.scale)
        return Scores(
            quality={model.name: round(self._models[model.name].quality(deviations), _DECIMALS) for model in models},
            scorer=NAME,
            features={name: round(value, 3) for name, value in zip(INPUT_NAMES, inputs, strict=True)},
        )


def read_artifact(path: Path, ladder: Sequence[str]) -> Artifact:
    """Read the file and check that it fits this program and knows every model of `ladder`; raises ConfigError."""
    artifact = _parse(path)
    if artifact.inputs.version != INPUTS_VERSION:
        raise ConfigError(
            f"{path}: inputs.version: is {artifact.inputs.version}, this program works on {INPUTS_VERSION}; "
            "fit it anew with `crossfill calibrate router`"
        )
    if artifact.inputs.names != INPUT_NAMES:
        raise ConfigError(f"{path}: inputs.names: not the inputs of version {INPUTS_VERSION}")
    if missing := [name for name in ladder if name not in artifact.models]:
        raise ConfigError(
            f"{path}: models: has {', '.join(map(repr, artifact.models))} and not {missing[0]!r} of routing.ladder; "
            "`crossfill calibrate router --model` renames while it fits"
        )
    return artifact


def _parse(path: Path) -> Artifact:
    text = read_bounded(path, _MOST_BYTES)
    try:
        return Artifact.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error)}") from error
