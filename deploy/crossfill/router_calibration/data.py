"""Queries with the score of each model's answer, read from JSONL and split for training and judgement."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from crossfill.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

# Fewer in either part say nothing about a scorer.
_FEWEST_PROMPTS = 40


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """Prompts and, for each, the score in [0, 1] of every model of `ladder`, weakest first; `scores` is [N, M]."""

    ladder: tuple[str, ...]
    prompts: tuple[str, ...]
    scores: NDArray[np.float64]

    def part(self, rows: NDArray[np.int64]) -> ScoredPrompts:
        """Those of `rows`."""
        return ScoredPrompts(self.ladder, tuple(self.prompts[row] for row in rows), self.scores[rows])


@dataclass(frozen=True, slots=True)
class DataFile:
    """What was read: the content's digest and its lines, of which several may have had one prompt."""

    name: str
    sha256: str
    lines: int
    prompts: ScoredPrompts


def read_scored_prompts(path: Path, fields: Mapping[str, str], ladder: tuple[str, ...]) -> DataFile:
    """Read lines of `{"prompt": str, "scores": {model: number or boolean}}`.

    `fields` names a top-level field for a model's score instead of an entry of `scores`. An empty `ladder` is the order
    of `fields`, or else of the first line. Scores of a prompt that is there several times are averaged: a model may
    have been sampled more than once. Raises CalibrationError with file and line.
    """
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: is not UTF-8 text") from error
    ladder = ladder or tuple(fields)
    sums: dict[str, list[NDArray[np.float64]]] = {}
    for number, text in enumerate(lines, start=1):
        if text.strip():
            where = f"{path}:{number}"
            line = _parse(where, text)
            given = _given_scores(where, line, fields)
            ladder = ladder or tuple(given)
            sums.setdefault(_prompt(where, line), []).append(_scores(where, given, ladder))
    if len(set(ladder)) < len(ladder):
        raise CalibrationError(f"the ladder names a model twice: {', '.join(ladder)}")
    if len(ladder) < 2:
        raise CalibrationError(f"{path}: a ladder takes scores of two models or more; there are {len(ladder)}")
    scores = np.array([np.mean(values, axis=0) for values in sums.values()])
    prompts = ScoredPrompts(ladder, tuple(sums), scores)
    return DataFile(path.name, hashlib.sha256(content).hexdigest(), sum(map(len, sums.values())), prompts)


def split(prompts: ScoredPrompts, holdout: float, seed: int) -> tuple[ScoredPrompts, ScoredPrompts]:
    """The part for training and the held-out part, a share `holdout` drawn with `seed`; raises CalibrationError."""
    count = len(prompts.prompts)
    kept = count - round(holdout * count)
    if min(kept, count - kept) < _FEWEST_PROMPTS:
        raise CalibrationError(
            f"{count} prompts give {kept} for training and {count - kept} held out; "
            f"each part needs {_FEWEST_PROMPTS} or more"
        )
    order = np.random.default_rng(seed).permutation(count)
    return prompts.part(order[:kept]), prompts.part(order[kept:])


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not JSON: {error}") from error
    if not isinstance(line, dict):
        raise CalibrationError(f"{where}: not a JSON object")
    return line


def _prompt(where: str, line: Mapping[str, Any]) -> str:
    prompt = line.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise CalibrationError(f"{where}: prompt: must be a text that is not empty")
    return prompt


def _given_scores(where: str, line: Mapping[str, Any], fields: Mapping[str, str]) -> Mapping[str, Any]:
    if fields:
        if (missing := next((field for field in fields.values() if field not in line), None)) is not None:
            raise CalibrationError(f"{where}: {missing}: is missing")
        return {model: line[field] for model, field in fields.items()}
    scores = line.get("scores")
    if not isinstance(scores, dict):
        raise CalibrationError(f"{where}: scores: must be an object of model and score, or name fields with --score")
    return scores


def _scores(where: str, given: Mapping[str, Any], ladder: tuple[str, ...]) -> NDArray[np.float64]:
    for model in ladder:
        if model not in given:
            raise CalibrationError(f"{where}: no score for the model {model!r}")
        score = given[model]
        if not isinstance(score, bool | int | float) or not 0 <= score <= 1:
            shown = repr(score)
            shown = shown if len(shown) <= 80 else shown[:80] + "…"
            raise CalibrationError(f"{where}: score of {model!r}: must be true, false or in [0, 1], not {shown}")
    return np.array([float(given[model]) for model in ladder])
