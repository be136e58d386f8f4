from __future__ import annotations

import json
import math
import string
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import LearnedScorerConfig, RoutingConfig
from router.decision.decider import build_scorer
from router.decision.features import conversation_features
from router.decision.scorers import Candidate
from router.decision.scorers.inputs import INPUT_NAMES, INPUTS_VERSION, inputs_of, standardised
from router.decision.scorers.learned import LearnedScorer, read_artifact
from router.errors import ConfigError
from router.request.generation import Turn

if TYPE_CHECKING:
    from pathlib import Path

COUNT = len(INPUT_NAMES)


def artifact(**changes: Any) -> dict[str, Any]:
    """An artifact by which a long question makes `small` worse and leaves `large` as it is."""
    falls_with_words = [-1.0 if name == "words" else 0.0 for name in INPUT_NAMES]
    return {
        "kind": "crossfill-learned-scorer",
        "format": 1,
        "inputs": {
            "version": INPUTS_VERSION,
            "names": list(INPUT_NAMES),
            "mean": [3.0] * COUNT,
            "scale": [0.5] * COUNT,
        },
        "models": {
            "small": {"intercept": 0.5, "coefficients": falls_with_words},
            "large": {"intercept": 2.0, "coefficients": [0.0] * COUNT},
        },
        "training": {
            "data": "x.jsonl",
            "data_sha256": "0" * 64,
            "prompts": 100,
            "held_out": 50,
            "seed": 0,
            "regularisation": {"small": 0.01},
        },
        "routing": {},
        "metrics": {},
        "created_with": {},
        **changes,
    }


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "scorer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def score(scorer: Any, text: str) -> Any:
    return scorer.score(conversation_features([Turn("user", text)]), [Candidate("small", 0), Candidate("large", 0)])


def test_quality_is_the_logistic_function_of_bounded_deviations(tmp_path: Path) -> None:
    scorer = LearnedScorer(read_artifact(written(tmp_path, artifact()), ("small", "large")))
    scores = score(scorer, "word " * 30)
    words = math.log1p(conversation_features([Turn("user", "word " * 30)]).last.words)
    assert scores.quality["small"] == pytest.approx(1 / (1 + math.exp(-(0.5 - (words - 3) / 0.5))), abs=1e-4)
    assert scores.quality["large"] == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-4)
    assert (scores.scorer, scores.fallback) == ("learned", None)
    assert scores.features["words"] == pytest.approx(words, abs=1e-3)


def test_text_far_from_the_training_data_gets_no_absurd_quality(tmp_path: Path) -> None:
    scorer = LearnedScorer(read_artifact(written(tmp_path, artifact()), ()))
    furthest = 1 / (1 + math.exp(-(0.5 - 4)))
    assert score(scorer, "word " * 10**6).quality["small"] == pytest.approx(furthest, abs=1e-4)


def test_input_that_never_varied_in_training_says_nothing() -> None:
    assert standardised([1.0, 5.0], [1.0, 2.0], [0.0, 0.0]) == [0.0, 0.0]
    assert standardised([1.0, 5.0], [0.0, 2.0], [1.0, 2.0]) == [1.0, 1.5]


@given(st.text(max_size=400))
def test_inputs_of_any_text_are_finite(text: str) -> None:
    values = inputs_of(conversation_features([Turn("user", text)]))
    assert len(values) == COUNT
    assert all(math.isfinite(value) for value in values)


def test_inputs_say_what_their_names_say() -> None:
    text = "Ann has 1,200 apples, half of them red. Each costs $2.50. How many more than 3/4 are left, 20%?"
    found = dict(zip(INPUT_NAMES, inputs_of(conversation_features([Turn("user", text)])), strict=True))
    counts = {name: round(math.expm1(value)) for name, value in found.items()}
    assert counts["numbers"] == 5
    assert counts["magnitude"] == 4
    assert counts["decimals"] == 1
    assert counts["fractions"] == 2
    assert counts["percents"] == 1
    assert counts["relations"] == 4
    assert counts["sentences"] == 3
    assert counts["capitals"] == 3
    assert counts["last_sentence"] == len("How many more than 3/4 are left, 20%")
    assert 0 < found["number_share"] < 1
    again = dict(zip(INPUT_NAMES, inputs_of(conversation_features([Turn("user", text + " " + text)])), strict=True))
    assert again["distinct"] == pytest.approx(found["distinct"] / 2)


_PIECES = ("1", "1,", "1.", ". ", "A ", "/1", " ", "证", "half ", "word ", *string.punctuation, "a(", "$a", "`a", ";\t")


# What follows keeps a repetition from matching, so that all its ways are tried.
@pytest.mark.parametrize("end", ["", "x"])
@pytest.mark.parametrize("piece", _PIECES)
def test_no_text_holds_the_event_loop(piece: str, end: str) -> None:
    half = piece * (4 * 2**20 // len(piece)) + end
    features = conversation_features([Turn("user", half + half)])
    began_s = time.process_time()
    inputs_of(features)
    assert time.process_time() - began_s < 0.1


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in artifact().items() if name != key}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{nope", "Invalid JSON"),
        (artifact(kind="pickle"), "kind: "),
        (artifact(format=2), "format: "),
        (without("training"), "training: "),
        (artifact(extra=1), "extra: "),
        (artifact(models={}), "models: "),
        (artifact(models={"small": {"intercept": 0, "coefficients": [0.0]}}), "models.small.coefficients: "),
        (artifact(models={"small": {"intercept": "x", "coefficients": [0.0] * COUNT}}), "models.small.intercept: "),
        (
            json.dumps(artifact()).replace('"intercept": 0.5', '"intercept": NaN'),
            "models.small.intercept: Input should be ",
        ),
        (
            json.dumps(artifact()).replace("-1.0", "-Infinity"),
            "models.small.coefficients.0: Input should be ",
        ),
        (json.dumps(artifact()).replace("-1.0", "1e308"), "models.small.coefficients.0: "),
        (json.dumps(artifact()).replace("-1.0", "-1000001"), "models.small.coefficients.0: "),
        (json.dumps(artifact()).replace("-1.0", "1" * 400), "models.small.coefficients.0: "),
        (json.dumps(artifact()).replace('"intercept": 0.5', '"intercept": 1e308'), "models.small.intercept: "),
        (artifact(inputs={**artifact()["inputs"], "mean": [-1e308] * COUNT}), "inputs.mean.0: "),
        (artifact(inputs={**artifact()["inputs"], "mean": [math.nan] * COUNT}), "inputs.mean.0: "),
        (artifact(inputs={**artifact()["inputs"], "scale": [1e308] * COUNT}), "inputs.scale.0: "),
        (artifact(inputs={**artifact()["inputs"], "scale": [math.nan] * COUNT}), "inputs.scale.0: "),
        (artifact(inputs={**artifact()["inputs"], "scale": [-1.0] * COUNT}), "inputs.scale.0: "),
        (artifact(inputs={**artifact()["inputs"], "version": 99}), f"inputs.version: is 99, this program works on {1}"),
        (artifact(inputs={**artifact()["inputs"], "names": ["a"] * COUNT}), "inputs.names: "),
        ("x" * (2**20 + 1), "is larger than 1048576 bytes"),
    ],
)
def test_file_that_does_not_fit_is_told_by_file_and_key(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_artifact(path, ("small", "large"))
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def row_within(low: float, high: float) -> st.SearchStrategy[list[float]]:
    """Anything that a file may hold, the far ends and what is next to zero more often than the rest."""
    ends = st.sampled_from([low, high, 0.0, 5e-324])
    return st.lists(st.floats(low, high) | ends, min_size=COUNT, max_size=COUNT)


@given(mean=row_within(-1e9, 1e9), scale=row_within(0, 1e9), odds=row_within(-1e6, 1e6), text=st.text())
def test_artifact_that_passes_gives_a_quality_for_any_text(
    tmp_path_factory: pytest.TempPathFactory, mean: list[float], scale: list[float], odds: list[float], text: str
) -> None:
    fitted = {"intercept": odds[0], "coefficients": odds}
    content = artifact(
        inputs={**artifact()["inputs"], "mean": mean, "scale": scale}, models={"small": fitted, "large": fitted}
    )
    scorer = LearnedScorer(read_artifact(written(tmp_path_factory.getbasetemp(), content), ()))
    assert all(0 <= quality <= 1 for quality in score(scorer, text).quality.values())


def test_model_of_the_ladder_that_was_not_fitted_stops_the_start(tmp_path: Path) -> None:
    path = written(tmp_path, artifact())
    routing = RoutingConfig(ladder=("small", "huge"), scorer=LearnedScorerConfig(path=path))
    with pytest.raises(ConfigError, match=r"models: has 'small', 'large' and not 'huge' of routing\.ladder"):
        build_scorer(routing)
    fitting = RoutingConfig(ladder=("small", "large"), scorer=LearnedScorerConfig(path=path))
    assert isinstance(build_scorer(fitting), LearnedScorer)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_artifact(tmp_path / "none.json", ())
