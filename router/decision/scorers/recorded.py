"""A scorer that looks qualities up in a file, and asks another scorer about prompts that are not there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.config.text_file import read_bounded
from router.config.values import Finite
from router.decision.policy import Scores
from router.errors import ConfigError
from router.faults import first_fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from router.decision.features import Features
    from router.decision.scorers import Candidate, Scorer

NAME = "recorded"
NOT_RECORDED = "not_recorded"

_MOST_BYTES = 256 * 2**20

_Qualities = Annotated[dict[str, Finite], Field(min_length=1)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: str
    scores: _Qualities


class RecordedScorer:
    """Scores by the last user text, with runs of whitespace taken as one space; a miss goes to `fallback`.

    `recorded` has its prompts in that form, as `read_recorded` gives them.
    """

    def __init__(self, recorded: Mapping[str, Mapping[str, float]], fallback: Scorer) -> None:
        self._recorded = recorded
        self._fallback = fallback

    def score(self, features: Features, models: Sequence[Candidate]) -> Scores:
        """The recorded qualities, or the fallback's with the reason `not_recorded`."""
        scores = self._recorded.get(_normalised(features.prompt))
        if scores is None or any(model.name not in scores for model in models):
            return replace(self._fallback.score(features, models), fallback=NOT_RECORDED)
        return Scores(quality={model.name: scores[model.name] for model in models}, scorer=NAME)


def read_recorded(path: Path) -> dict[str, dict[str, float]]:
    """Read JSONL lines of `{"prompt": str, "scores": {model: quality}}`; the prompts with single spaces.

    Raises ConfigError for a file that cannot be read or is too large, and with the line for a bad line and for a prompt
    recorded twice with different scores.
    """
    recorded: dict[str, dict[str, float]] = {}
    for number, text in enumerate(read_bounded(path, _MOST_BYTES).split("\n"), start=1):
        if not text.strip():
            continue
        line = _parse_line(f"{path}:{number}", text)
        prompt = _normalised(line.prompt)
        if recorded.setdefault(prompt, line.scores) != line.scores:
            raise ConfigError(f"{path}:{number}: this prompt is recorded twice with different scores")
    return recorded


def _parse_line(where: str, text: str) -> _Line:
    try:
        return _Line.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_fault(error)}") from error


def _normalised(prompt: str) -> str:
    return " ".join(prompt.split())
