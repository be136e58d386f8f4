from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engines.models import prepare
from engines.models.errors import DifferentTokenizersError
from engines.models.judge import Judgement, JudgeSize, check_same_tokens, compare, judge
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
    assert judged.conversations is not None
    assert judged.conversations.tokens == 255
    assert judged.recall is not None
    assert (judged.recall.right, judged.recall.of) == (0, 2)
    assert (judged.right, len(judged.answers)) == (0, 2)


def test_what_was_not_asked_for_is_left_out(judged: Judgement, random_model: LoadedModel) -> None:
    short = judge(random_model, "short", replace(SIZE, conversations=0, needles=0, questions=0))
    assert (short.conversations, short.recall, short.answers) == (None, None, ())
    ratios = compare(short, judged)
    assert (ratios.conversations, ratios.recall, ratios.answers) == (None, None, None)


def test_a_model_equals_itself_and_no_other(judged: Judgement, root: Path) -> None:
    same = compare(judged, judged)
    assert (same.prose.low, same.prose.value, same.prose.high) == (1, 1, 1)
    other = judge(load(prepare("tiny-qwen3", root)), "tiny-qwen3", SIZE)
    ratios = compare(other, judged)
    for ratio in (ratios.prose, ratios.chat, ratios.conversations):
        assert ratio is not None
        assert ratio.low < ratio.value < ratio.high
    assert ratios.prose.value == pytest.approx(other.prose.value / judged.prose.value)
    # Neither has anything right.
    assert (ratios.recall, ratios.answers) == (None, None)


def test_judgements_of_different_sizes_cannot_be_compared(judged: Judgement, random_model: LoadedModel) -> None:
    smaller = judge(random_model, "smaller", replace(SIZE, prose_tokens=150, needles=0, questions=0))
    with pytest.raises(ValueError, match="199 and 149 tokens"):
        compare(judged, smaller)


@pytest.mark.parametrize(
    ("file", "what"), [("tokenizer.json", "another tokenizer"), ("chat_template.jinja", "another chat template")]
)
def test_folders_with_other_tokens_are_refused(root: Path, tmp_path: Path, file: str, what: str) -> None:
    folder, other = prepare("tiny-llama", root), tmp_path / "other"
    shutil.copytree(folder, other)
    check_same_tokens([folder, other])
    (other / file).write_bytes((folder / file).read_bytes() + b"\n")
    with pytest.raises(DifferentTokenizersError, match=what):
        check_same_tokens([folder, prepare("tiny-qwen3", root), other])


def test_a_chat_template_counts_wherever_it_stands(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, template in ((one, "a"), (same, "a"), (other, "b")):
        folder.mkdir()
        place = (folder / "chat_template.jinja") if folder == one else (folder / "tokenizer_config.json")
        place.write_text(template if folder == one else json.dumps({"chat_template": template}))
    check_same_tokens([one, same])
    with pytest.raises(DifferentTokenizersError, match="another chat template"):
        check_same_tokens([one, other])
