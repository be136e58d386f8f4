from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.models.questions import QUESTIONS, ask, is_right

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel

# In the order of the questions: right answers, then wrong ones that look like them.
EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "What is the capital of France?": (("The capital of France is Paris.",), ("It is a comparison of cities.",)),
    "What color is the sky on a clear day?": (("A deep shade of blue.",), ("The sky is red.",)),
    "How many days are in a week?": (
        ("A week is approximately 7 days.",),
        ("A week is 35.7 days.", "A week is 35,7 days."),
    ),
    "What is 2 + 2?": (
        ("2 + 2 = 4.", "Four."),
        ("2 + 2 is 42.", "The answer is 5.", "2 + 2 is 4.5.", "2 + 2 = 4,5", "4.5", "4,000."),
    ),
    "What is the opposite of hot?": (("The opposite of hot is cold.",), ("The opposite of cold is hot.",)),
    "Which planet do we live on?": (("The planet we live on is called Earth.",), ("On Mars, which is like Earth.",)),
    "Which animal says meow?": (("A cat.",), ("Cattle.",)),
    "What is the largest ocean on Earth?": (("The Pacific Ocean.",), ("A specific one, the Atlantic.",)),
    "What is the first month of the year?": (("January.",), ("The first month is March.",)),
    "What do bees make?": (("Bees make honey.",), ("A honey bee makes wax.",)),
    "What color is grass?": (("Grass is usually green.",), ("Grass is evergreenish brown.",)),
    "What color is a ripe banana?": (("It is bright yellow.",), ("A deep shade of brown.",)),
    "Which animal says moo?": (("The cow says moo.", "Cows."), ("The moose, a coward.",)),
    "Which animal barks?": (("A dog barks.",), ("The tree's bark is a dogma.",)),
    "How many legs does a spider have?": (
        ("A spider has eight legs.", "It has 8 jointed legs.", "8"),
        (
            "A spider has 18 legs.",
            "A spider has 1.8 legs.",
            "8.5 legs",
            "It has 8.5 legs.",
            "8,000 legs.",
            "1,8 legs",
            "It has two pairs of legs.",
        ),
    ),
    "How many months are in a year?": (
        ("There are 12 months in a year.", "Twelve calendar months."),
        (
            "There are 120 months in a year.",
            "There are 4.12 months.",
            "There are 4,12 months.",
            "12.5 months",
            "12,000.",
        ),
    ),
    "What number comes after nine?": (
        ("The number that comes after nine is 10.", "Ten."),
        ("It is 11.", "It is 10.5."),
    ),
    "What is 10 - 3?": (("10 - 3 = 7.", "10 - 3 is seven."), ("10 - 3 is 7.5.", "10 - 7 is 3.", "10 - 3 is 17.")),
    "What is the opposite of up?": (
        ("The opposite of up is down.", 'It is "down".'),
        ("It is downhill.", "The opposite of down is up."),
    ),
    "What is the opposite of big?": (
        ("The opposite of big is small.", "Little."),
        ("The opposite of small is big.", "The opposite of big is bigger."),
    ),
    "Which day comes after Monday?": (("Tuesday comes after Monday.",), ("Sunday comes after Monday.",)),
    "What is the last month of the year?": (("The last month is December.",), ("The last month is November.",)),
    "What is the capital of Italy?": (("Rome is the capital.",), ("Romeo, in Italy.", "Milan.")),
    "In which city is the Eiffel Tower?": (("It is in Paris, France.",), ("It is in France.",)),
    "What is frozen water called?": (("It is called ice.",), ("It is called ice cream.", "A device.")),
    "What is a baby dog called?": (("A puppy.", "A pup."), ("A baby dog is called a kitten.", "A puppet.")),
    "Which season is the coldest?": (("Winter is the coldest season.",), ("Autumn is the coldest.",)),
    "How many wheels does a bicycle have?": (
        ("A bicycle has two wheels.", "It has 2 large wheels.", "Two."),
        (
            "A bicycle has 5 wheels.",
            "A bicycle has 1.2 wheels.",
            "A bicycle has 20 wheels.",
            "2.5 wheels",
            "It has 2,000 parts.",
            "1,2 wheels",
        ),
    ),
    "Who wrote Romeo and Juliet?": (("William Shakespeare wrote it.",), ("Charles Dickens.",)),
    "Which part of the body do we use to see?": (("We see with our eyes.",), ("We see with our eyelashes.",)),
}
PATTERNS = dict(QUESTIONS)


def test_every_question_has_examples() -> None:
    assert len(QUESTIONS) == 30
    assert list(PATTERNS) == list(EXAMPLES)


@pytest.mark.parametrize("question", EXAMPLES)
def test_pattern_tells_right_answers_from_wrong_ones(question: str) -> None:
    right, wrong = EXAMPLES[question]
    assert {text: is_right(PATTERNS[question], text) for text in right} == dict.fromkeys(right, True)
    assert {text: is_right(PATTERNS[question], text) for text in wrong} == dict.fromkeys(wrong, False)


def test_smollm2_answers_easy_questions(smollm2_model: LoadedModel) -> None:
    assert sum(answer.right for answer in ask(smollm2_model)) >= 12


def test_questions_find_no_sense_in_a_random_model(random_model: LoadedModel) -> None:
    answers = ask(random_model, max_new_tokens=8)
    assert [answer.question for answer in answers] == list(EXAMPLES)
    assert not any(answer.right for answer in answers)


def test_fewer_questions_are_the_first_ones(random_model: LoadedModel) -> None:
    answers = ask(random_model, count=3, max_new_tokens=1)
    assert [answer.question for answer in answers] == list(EXAMPLES)[:3]
