from __future__ import annotations

import json
import time
from math import sqrt
from typing import TYPE_CHECKING

import pytest

from router.config import LimitsConfig
from router.decision.features import conversation_features, text_features
from router.decision.scorers import Candidate
from router.decision.scorers.heuristic import HeuristicScorer, default_capabilities, difficulty
from router.decision.scorers.recorded import RecordedScorer, read_recorded
from router.errors import ConfigError
from router.request.generation import Turn, parse_chat

if TYPE_CHECKING:
    from pathlib import Path

TAU, MARGIN = 0.3, 2 * 0.1 * sqrt(2)
CANDIDATES = [Candidate("small", 0.3), Candidate("large", 0.9)]

EASY = [
    "What is the capital of France?",
    "hi",
    "",
    "Translate 'good morning' to Spanish.",
    "thanks!",
    "Who wrote Hamlet?",
    "What is 2+2?",
    "你好",
    "法国的首都是哪里？",  # noqa: RUF001 - Chinese punctuation
    "¿Qué hora es?",
]
HARD = [
    "Prove that the square root of 2 is irrational, step by step.",
    "Implement a thread-safe LRU cache in Python with O(1) operations and explain the trade-offs.",
    "Debug this and explain why it overflows:\n```python\ndef f(x):\n    return f(x-1)\n```",
    "Derive the equations of motion of a double pendulum step by step and compare two integrators.",
    "证明根号2是无理数，请一步一步地推导。",  # noqa: RUF001 - Chinese punctuation
    "请用Python实现一个线程安全的LRU缓存，并解释其设计取舍。",  # noqa: RUF001 - Chinese punctuation
    "Demuestra paso a paso que la raíz cuadrada de 2 es irracional.",
]


def gap(*turns: tuple[str, str]) -> float:
    features = conversation_features([Turn(role, text) for role, text in turns])
    quality = HeuristicScorer().score(features, CANDIDATES).quality
    return quality["large"] - quality["small"]


@pytest.mark.parametrize("prompt", EASY)
def test_easy_prompts_are_two_deviations_below_the_threshold(prompt: str) -> None:
    assert gap(("user", prompt)) <= TAU - MARGIN


@pytest.mark.parametrize("prompt", HARD)
def test_hard_prompts_are_two_deviations_above_the_threshold(prompt: str) -> None:
    assert gap(("user", prompt)) >= TAU + MARGIN


@pytest.mark.parametrize(
    "prompt",
    [
        "Compute the integral of x^2 e^-x dx",
        "Show that there are infinitely many primes congruent to 3 mod 4",
        "Design a database schema for a hospital and write the migration",
        "Evaluate this contour integral by residues",
    ],
)
def test_tasks_go_to_the_large_model_whatever_their_verb(prompt: str) -> None:
    assert gap(("user", prompt)) > TAU


@pytest.mark.parametrize(
    "prompt",
    [
        "Does this recipe prove that eggs are healthy?",
        "Is there proof that it rained yesterday?",
        "What is an integral?",
        "Compute 15% of 80",
        "Show me the weather",
        "Write a short poem about the sea",
        "And the capital of Spain?",
    ],
)
def test_words_of_hard_tasks_alone_do_not_make_one(prompt: str) -> None:
    assert gap(("user", prompt)) < TAU


def test_follow_up_is_as_hard_as_what_it_follows() -> None:
    hard, easy = HARD[0], EASY[0]
    assert gap(("user", hard), ("assistant", "…"), ("user", "And of 3?")) > TAU
    assert gap(("user", easy), ("assistant", "Paris."), ("user", "And of 3?")) < TAU
    assert gap(("user", hard), ("assistant", "…"), ("user", "Who wrote Hamlet?")) < TAU


def test_last_user_turn_weighs_more_than_what_came_before() -> None:
    hard, easy = HARD[0], "thanks!"
    assert gap(("user", hard), ("assistant", "…"), ("user", easy)) < TAU
    assert gap(("user", easy), ("assistant", "…"), ("user", hard)) > TAU + MARGIN
    assert gap(("user", hard), ("assistant", "…"), ("user", easy)) > gap(("user", easy))


def test_qualities_are_in_the_unit_interval_and_fall_with_difficulty() -> None:
    for prompt in (*EASY, *HARD, "x" * 10**6, "证明" * 10**5):
        features = conversation_features([Turn("user", prompt)])
        assert 0 <= difficulty(features) <= 1
        assert all(0 <= value <= 1 for value in HeuristicScorer().score(features, CANDIDATES).quality.values())
    assert difficulty(conversation_features([Turn("user", "word " * 2000)])) > difficulty(
        conversation_features([Turn("user", "word")])
    )


def test_length_does_not_rest_on_spaces() -> None:
    chinese = text_features("请把这段关于城市交通的文字翻译成英文并保持原来的语气" * 20).words
    assert chinese > 200
    assert text_features("a" * 600).words == pytest.approx(100)


def test_all_text_parts_count_and_null_is_empty() -> None:
    hard = HARD[0]
    parts = [
        {"type": "text", "text": hard[:20]},
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "text", "text": hard[20:]},
    ]
    chat = parse_chat(
        {"model": "m", "messages": [{"role": "assistant", "content": None}, {"role": "user", "content": parts}]},
        LimitsConfig(),
    )
    turns = chat.turns()
    assert turns[0].text == ""
    assert turns[1].text == f"{hard[:20]}\n{hard[20:]}"
    first_only = conversation_features([Turn("user", hard[:20])])
    assert difficulty(conversation_features(turns)) > difficulty(first_only)


def test_conversation_without_a_user_is_scored_by_its_last_turn() -> None:
    assert conversation_features([Turn("system", "be brief"), Turn("assistant", "hello")]).prompt == "hello"


@pytest.mark.parametrize(
    "piece",
    ["1", "a", " ", "\n", "(", "f(", "$", "`", "^", "a ", "1 ", ";", "; ", "1.", "-", "\\", "证", "step by ", "{\n"],
)
def test_no_text_holds_the_event_loop(piece: str) -> None:
    began_s = time.process_time()
    text_features(piece * (8 * 2**20 // len(piece)))
    assert time.process_time() - began_s < 1


def test_default_capabilities_are_evenly_spaced() -> None:
    assert default_capabilities(2) == pytest.approx([0.3, 0.9])
    assert default_capabilities(3) == pytest.approx([0.3, 0.6, 0.9])


def recorded_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "scores.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_recorded_scores_are_found_by_the_last_user_text_whatever_its_spaces(tmp_path: Path) -> None:
    path = recorded_file(tmp_path, {"prompt": "what  is\nit", "scores": {"small": 0.2, "large": 0.9}}, "")
    scorer = RecordedScorer(read_recorded(path), HeuristicScorer())
    turns = [Turn("user", "other"), Turn("assistant", "a"), Turn("user", " what is it ")]
    scores = scorer.score(conversation_features(turns), CANDIDATES)
    assert (scores.scorer, scores.fallback, scores.quality) == ("recorded", None, {"small": 0.2, "large": 0.9})


def test_prompt_that_is_not_recorded_falls_back_and_says_so() -> None:
    for recorded in ({}, {"hi": {"small": 0.5}}):
        scores = RecordedScorer(recorded, HeuristicScorer()).score(
            conversation_features([Turn("user", "hi")]), CANDIDATES
        )
        assert (scores.scorer, scores.fallback) == ("heuristic", "not_recorded")
        assert scores.difficulty is not None


@pytest.mark.parametrize(
    "bad",
    [
        "{nope",
        {"prompt": "x"},
        {"prompt": 1, "scores": {"a": 1}},
        {"prompt": "x", "scores": {"a": "high"}},
        {"prompt": "x", "scores": {}},
        {"prompt": "x", "scores": {"a": 1}, "extra": 1},
        {"prompt": "good ", "scores": {"a": 0.1}},
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, bad: object) -> None:
    path = recorded_file(tmp_path, {"prompt": "good", "scores": {"a": 1}}, bad)
    with pytest.raises(ConfigError) as caught:
        read_recorded(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recorded(tmp_path / "none.jsonl")


def test_no_more_is_read_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded_file(tmp_path, {"prompt": "x", "scores": {"a": 1}})
    monkeypatch.setattr("router.decision.scorers.recorded._MOST_BYTES", path.stat().st_size)
    assert read_recorded(path) == {"x": {"a": 1}}
    monkeypatch.setattr("router.decision.scorers.recorded._MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read_recorded(path)
