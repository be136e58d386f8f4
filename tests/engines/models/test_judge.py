from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engines.models import prepare
from engines.models.judge import Judgement, JudgeSize, compare, judge
from engines.models.loading import LoadedModel, load

if TYPE_CHECKING:
    from pathlib import Path

SIZE = JudgeSize(
    prose_tokens=200, dialogues=2, conversations=1, needles=2, needle_tokens=250, questions=2, answer_tokens=2
)


@pytest.fixture(scope="module")
def judged(random_model: LoadedModel) -> Judgement:
    return judge(random_model, "tiny-llama", SIZE)


def test_judgement_holds_what_was_asked_for(judged: Judgement) -> None:
    assert (judged.name, judged.parameters, judged.layers) == ("tiny-llama", 3_342_912, 4)
    assert judged.prose.tokens == 199
    assert judged.conversations.tokens == 255
    assert judged.recall is not None
    assert (judged.recall.right, judged.recall.of) == (0, 2)
    assert (judged.right, len(judged.answers)) == (0, 2)


def test_what_was_not_asked_for_is_left_out(judged: Judgement, random_model: LoadedModel) -> None:
    short = judge(random_model, "short", replace(SIZE, needles=0, questions=0))
    assert (short.recall, short.answers) == (None, ())
    ratios = compare(short, judged)
    assert (ratios.recall, ratios.answers) == (None, None)


def test_a_model_equals_itself_and_no_other(judged: Judgement, root: Path) -> None:
    same = compare(judged, judged)
    assert (same.prose.low, same.prose.value, same.prose.high) == (1, 1, 1)
    other = judge(load(prepare("tiny-qwen3", root)), "tiny-qwen3", SIZE)
    ratios = compare(other, judged)
    for ratio in (ratios.prose, ratios.chat, ratios.conversations):
        assert ratio.low < ratio.value < ratio.high
    assert ratios.prose.value == pytest.approx(other.prose.value / judged.prose.value)
    # Neither has anything right.
    assert (ratios.recall, ratios.answers) == (None, None)


def test_judgements_of_different_sizes_cannot_be_compared(judged: Judgement, random_model: LoadedModel) -> None:
    smaller = judge(random_model, "smaller", replace(SIZE, prose_tokens=150, needles=0, questions=0))
    with pytest.raises(ValueError, match="199 and 149 tokens"):
        compare(judged, smaller)
