from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from engines.models import prepare, texts
from engines.models.loading import LoadedModel, load
from engines.models.perplexity import answer_perplexity, conversation_perplexity, encode, perplexity
from engines.models.questions import QUESTIONS
from engines.models.report import bar, markdown
from engines.models.study import StudySize, study

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 49152


def heldout(loaded: LoadedModel, tokens: int) -> list[int]:
    return encode(loaded, texts.prose(texts.Part.HELDOUT), tokens)


def test_random_model_is_about_as_good_as_guessing(random_model: LoadedModel) -> None:
    result = perplexity(random_model, heldout(random_model, 1000))
    assert VOCABULARY / 2 < result.value < VOCABULARY * 2
    assert result.tokens == 999


def test_smollm2_reads_english(smollm2_model: LoadedModel) -> None:
    assert 5 < perplexity(smollm2_model, heldout(smollm2_model, 700)).value < 40


def test_smollm2_expects_answers_in_its_chat_format(smollm2_model: LoadedModel) -> None:
    dialogue = [("What is the capital of France?", "The capital of France is Paris.")]
    assert answer_perplexity(smollm2_model, dialogue).value < 2


def test_one_window_equals_the_mean_loss(random_model: LoadedModel) -> None:
    ids = heldout(random_model, 60)
    batch = torch.tensor([ids])
    with torch.inference_mode():
        loss = random_model.model(batch, labels=batch).loss
    assert perplexity(random_model, ids).value == pytest.approx(math.exp(loss), rel=1e-5)


def test_conversations_are_scored_from_their_second_token_on(random_model: LoadedModel) -> None:
    one, other = heldout(random_model, 50)[:30], heldout(random_model, 50)[30:]
    result = conversation_perplexity(random_model, [one, other])
    apart = (perplexity(random_model, one), perplexity(random_model, other))
    assert result.tokens == 29 + 19
    assert result.losses == pytest.approx(apart[0].losses + apart[1].losses)
    # The control: as one text, the second would begin with a scored token that sees the first.
    assert perplexity(random_model, one + other).tokens == 49


@pytest.mark.parametrize("conversations", [[], [[5, 6], [5]]], ids=["none", "one-token"])
def test_conversations_without_a_token_to_score_are_refused(
    random_model: LoadedModel, conversations: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="two tokens in each"):
        conversation_perplexity(random_model, conversations)


@pytest.mark.parametrize(
    ("tokens", "window", "stride", "scored"),
    [(2, 8, 4, 1), (8, 8, 4, 7), (9, 8, 4, 8), (30, 8, 4, 29), (31, 8, 3, 30), (16, 8, 8, 14)],
)
def test_every_token_with_context_is_scored_once(
    random_model: LoadedModel, tokens: int, window: int, stride: int, scored: int
) -> None:
    assert perplexity(random_model, heldout(random_model, tokens), window=window, stride=stride).tokens == scored


@pytest.mark.parametrize(("tokens", "stride"), [(1, 4), (9, 0), (9, 9)], ids=["one-token", "no-stride", "gap"])
def test_impossible_windows_are_refused(random_model: LoadedModel, tokens: int, stride: int) -> None:
    with pytest.raises(ValueError, match="0 < stride <= window"):
        perplexity(random_model, heldout(random_model, tokens), window=8, stride=stride)


def test_calibration_and_heldout_share_no_topic_and_no_paragraph() -> None:
    one, other = (list(texts.paragraphs(part)) for part in texts.Part)
    assert not {topic for topic, _ in one} & {topic for topic, _ in other}
    assert not {text for _, text in one} & {text for _, text in other}
    assert min(len(one), len(other)) > 40


def test_study_of_a_tiny_model_writes_a_table(root: Path) -> None:
    loaded = load(prepare("tiny-qwen3", root))
    size = StudySize(
        calibration_tokens=64,
        search_tokens=32,
        heldout_tokens=64,
        dialogues=1,
        answer_tokens=2,
        by_influence=1,
        by_search=3,
        shortlist=3,
    )
    result = study(loaded, size)
    assert [len(candidate.dropped) for candidate in result.candidates[:2]] == [0, 1]
    assert {len(candidate.dropped) for candidate in result.candidates} == {0, 1, 2, 3}
    assert len(result.single) == len(result.influence) == 6
    text = markdown(result, size)
    assert text.count("\n| none | whole model |") == 1
    assert all((question in text) == (place < 10) for place, (question, _) in enumerate(QUESTIONS))


@pytest.mark.parametrize(
    ("value", "drawn"), [(0.0, ""), (0.5, "█████"), (1.0, "██████████"), (2.0, "█████████→"), (0.05, "▌")]
)
def test_bar_is_as_long_as_its_value(value: float, drawn: str) -> None:
    assert bar(value, 1.0, columns=10) == drawn
