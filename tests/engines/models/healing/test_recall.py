from __future__ import annotations

import random
import re

import pytest

from engines.models.healing import recall
from engines.models.healing.recall import exercise

FILLER = [f"Sentence number {number} tells nothing." for number in range(20)]
SEEDS = range(30)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def key(question: str) -> set[str]:
    """The name and the thing that a question is about."""
    return words(question) & {*recall._NAMES, *recall._THINGS}


def sentences(context: str) -> list[str]:
    return re.split(r"(?<=\.) ", context)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_answer_stands_in_the_one_sentence_that_its_question_is_about(seed: int) -> None:
    made = exercise(random.Random(seed), FILLER, facts=12, questions=3)
    assert len(made.turns) == len({question for question, _ in made.turns}) == 3
    for question, answer in made.turns:
        assert len(key(question)) == 2
        facts = [sentence for sentence in sentences(made.context) if key(question) <= words(sentence)]
        assert len(facts) == 1
        assert re.search(rf"\b{re.escape(answer.rstrip('.'))}\b", facts[0])
        # The question does not give it away.
        assert answer not in question


def test_facts_are_strewn_over_the_filler_which_stays_whole_and_in_order() -> None:
    made = exercise(random.Random(1), FILLER, facts=12, questions=3)
    found = sentences(made.context)
    assert [sentence for sentence in found if sentence in FILLER] == FILLER
    places = [place for place, sentence in enumerate(found) if sentence not in FILLER]
    assert len(places) == 12
    assert max(places) - min(places) > 15


def test_no_more_questions_than_facts_and_no_filler_are_fine() -> None:
    made = exercise(random.Random(1), [], facts=2, questions=3)
    assert len(made.turns) == len(sentences(made.context)) == 2


def test_all_styles_and_kinds_of_values_come_up() -> None:
    asked = [turn for seed in SEEDS for turn in exercise(random.Random(seed), [], 4, 4).turns]
    # Each style begins its questions with another word.
    assert len({question.split()[0] for question, _ in asked}) == len(recall._STYLES)
    kinds = {
        (bool(words(answer) & set(recall._WORDS)), any(word.isdigit() for word in words(answer))) for _, answer in asked
    }
    assert kinds == {(True, False), (False, True), (True, True)}


def test_a_seed_gives_one_exercise_and_another_seed_another() -> None:
    one, again, other = (exercise(random.Random(seed), FILLER, 5, 3) for seed in (1, 1, 2))
    assert one == again != other
