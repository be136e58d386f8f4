from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engines.models import texts
from engines.models.generation import greedy
from engines.models.needle import Found, Needle, Recall, holds, needles, recall

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel


def length(loaded: LoadedModel, text: str) -> int:
    return len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def haystack(needle: Needle) -> str:
    """The text between the system prompt and the question, with the fact in it."""
    text = needle.prompt.split("<|im_start|>user\n")[1]
    return text.split("\n\n")[0]


def without_fact(needle: Needle) -> Needle:
    return replace(needle, prompt=needle.prompt.replace(f"{needle.fact} ", "", 1).replace(f" {needle.fact}", "", 1))


@pytest.mark.parametrize("tokens", [250, 1000])
def test_prompts_are_as_long_as_wanted_but_for_a_sentence(random_model: LoadedModel, tokens: int) -> None:
    longest = max(length(random_model, text) for _, text in texts.paragraphs(texts.Part.HELDOUT))
    lengths = [length(random_model, needle.prompt) for needle in needles(random_model, tokens=tokens)]
    assert max(lengths) <= tokens
    assert min(lengths) > tokens - longest
    assert sum(lengths) / len(lengths) > tokens - 40


def test_fact_and_value_stand_once_at_their_depth(random_model: LoadedModel) -> None:
    asked = needles(random_model)
    for needle in asked:
        hay = haystack(needle)
        assert hay.count(needle.fact) == needle.prompt.count(needle.fact) == 1
        assert needle.prompt.lower().count(needle.value.lower()) == 1
        room = len(hay) - len(needle.fact)
        assert hay.index(needle.fact) / room == pytest.approx(needle.depth, abs=0.1)
    assert haystack(asked[0]).startswith(asked[0].fact)
    assert haystack(asked[-1]).endswith(asked[-1].fact)


def test_depths_are_spread_evenly_over_all_kinds(random_model: LoadedModel) -> None:
    asked = needles(random_model, count=24, tokens=250)
    assert [needle.depth for needle in asked] == pytest.approx([index / 23 for index in range(24)])
    kinds = [needle.kind for needle in asked]
    assert {kinds.count(kind) for kind in kinds} == {3}


def test_a_seed_gives_the_same_needles_and_another_seed_others(random_model: LoadedModel) -> None:
    one, again, other = (needles(random_model, count=8, tokens=250, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert all(here.prompt != there.prompt for here, there in zip(one, other, strict=True))


@pytest.mark.parametrize(("count", "tokens"), [(0, 250), (1, 60)], ids=["no-needle", "no-room"])
def test_impossible_sizes_are_refused(random_model: LoadedModel, count: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"at least one needle|more tokens"):
        needles(random_model, count=count, tokens=tokens)


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [
        ("The code is 48213.", "48213", True),
        ("48213, that is the code", "48213", True),
        ("The code is 482130.", "48213", False),
        ("The code is 148213.", "48213", False),
        ("The code is 48213.5.", "48213", False),
        ("The code is 4.8213.", "8213", False),
        ("The code is 48 213.", "48213", False),
        ("It leaves at 14:35.", "14:35", True),
        ("It leaves at 14:35:10.", "14:35", False),
        ("It leaves at 14:35pm.", "14:35", True),
        ("It leaves at 14:35 PM.", "14:35", True),
        ("It leaves at 14:35p.m.", "14:35", True),
        ("It leaves at 14:35pmx.", "14:35", False),
        ("Its number is 14pm.", "14", False),
        ("It is on march 14.", "March 14", True),
        ("It is on March 14th, 2023.", "March 14", True),
        ("It is on March 145.", "March 14", False),
        ("Its name is MARBLE!", "Marble", True),
        ("Its name is Marbles.", "Marble", False),
        ("", "Marble", False),
    ],
)
def test_value_counts_as_a_whole_word_or_number(text: str, value: str, right: bool) -> None:
    assert holds(text, value) is right


def test_recall_by_depth_counts_each_answer_once() -> None:
    found = (
        Found(Needle("", "", "", "", depth, ""), "", right) for depth, right in ((0, True), (0.5, False), (1, True))
    )
    result = Recall(tuple(found))
    assert (result.right, result.of) == (2, 3)
    assert result.by_depth(5) == ((1, 1), (0, 0), (0, 1), (0, 0), (1, 1))
    assert result.interval.low < 2 / 3 < result.interval.high


def test_smollm2_finds_facts_that_are_there_and_no_others(smollm2_model: LoadedModel) -> None:
    asked = needles(smollm2_model, count=6, tokens=250)
    assert recall(smollm2_model, asked).right >= 4
    assert recall(smollm2_model, [without_fact(needle) for needle in asked], max_new_tokens=16).right == 0


def test_random_model_finds_nothing(random_model: LoadedModel) -> None:
    assert recall(random_model, needles(random_model, count=6)).right == 0


def test_answers_do_not_depend_on_their_batch(smollm2_model: LoadedModel) -> None:
    prompts = [needle.prompt for needle in needles(smollm2_model, count=2, tokens=250)]
    prompts.append(prompts[0][-150:])
    steps: list[tuple[str, int, int | None]] = []
    together = greedy(smollm2_model, prompts, 8, progress=lambda *step: steps.append(step))
    assert together == greedy(smollm2_model, prompts, 8, batch=1)
    assert len(set(together)) > 1
    assert steps == [("answering", 0, 3), ("answering", 3, 3)]
