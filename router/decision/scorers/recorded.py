"""A scorer that looks qualities up in a file, and asks another scorer about prompts that are not there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.decision.policy import Scores
from router.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from router.decision.features import Features
    from router.decision.scorers import Candidate, Scorer

NAME = "recorded"
NOT_RECORDED = "not_recorded"


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: str
    scores: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=1)


class RecordedScorer:
    """Scores by the last user text, with runs of whitespace taken as one space; a miss goes to `fallback`."""

    def __init__(self, recorded: Mapping[str, Mapping[str, float]], fallback: Scorer) -> None:
        self._recorded = {_normalised(prompt): scores for prompt, scores in recorded.items()}
        self._fallback = fallback

    def score(self, features: Features, models: Sequence[Candidate]) -> Scores:
        """The recorded qualities, or the fallback's with the reason `not_recorded`."""
        scores = self._recorded.get(_normalised(features.prompt))
        if scores is None or any(model.name not in scores for model in models):
            return replace(self._fallback.score(features, models), fallback=NOT_RECORDED)
        return Scores(quality={model.name: scores[model.name] for model in models}, scorer=NAME)


def read_recorded(path: Path) -> dict[str, dict[str, float]]:
    """Read JSONL lines of `{"prompt": str, "scores": {model: quality}}`.

    Raises ConfigError with file and line for a bad line, and for a prompt recorded twice with different scores.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8 text") from error
    recorded: dict[str, dict[str, float]] = {}
    for number, text in enumerate(lines, start=1):
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
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {f'{key}: ' if key else ''}{first['msg']}") from error


def _normalised(prompt: str) -> str:
    return " ".join(prompt.split())
