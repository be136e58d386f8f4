from __future__ import annotations

from typing import Any

import pytest

from router.config import CostConfig, LimitsConfig
from router.decision.cost import expected_tokens
from router.decision.features import conversation_features
from router.request.generation import parse_chat, parse_completion


def tokens_of(text: str = "", default_max_tokens: int | None = None, **fields: Any) -> Any:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
    chat = parse_chat(body, LimitsConfig(default_max_tokens=default_max_tokens))
    return expected_tokens(conversation_features(chat.turns()), chat)


def test_prompt_counts_in_any_script() -> None:
    assert tokens_of("word " * 100).prompt == pytest.approx(125, rel=0.05)
    assert tokens_of("证" * 100).prompt == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({}, 300),
        ({"max_tokens": 20}, 20),
        ({"max_tokens": 100_000}, 300),
        ({"max_tokens": 20, "max_completion_tokens": 40}, 40),
        ({"default_max_tokens": 50}, 50),
        ({"default_max_tokens": 50, "max_tokens": 60}, 60),
        ({"max_tokens": 20, "n": 3}, 60),
    ],
)
def test_answer_is_of_usual_length_unless_its_limit_is_below(fields: dict[str, int], output: int) -> None:
    assert tokens_of(**fields).output == output


def test_prices_are_per_million_tokens() -> None:
    tokens = tokens_of("word " * 100, max_tokens=20)
    expected = (tokens.prompt * 0.5 + 20 * 2.0) / 1e6
    assert tokens.cost(CostConfig(input=0.5, output=2.0)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "output"),
    [({}, 16), ({"max_tokens": 40}, 40), ({"prompt": ["a", "b"], "n": 2}, 64)],
    ids=["default", "limit", "prompts"],
)
def test_text_completions_have_their_own_default_and_an_answer_for_each_prompt(
    fields: dict[str, Any], output: int
) -> None:
    asked = parse_completion({"model": "auto", "prompt": "a", **fields}, LimitsConfig(default_max_tokens=500))
    assert expected_tokens(conversation_features(asked.turns()), asked).output == output
