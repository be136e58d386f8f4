"""Thirty questions that a child can answer, to see whether a pruned model still makes sense."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models.generation import chat_prompt, greedy
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel

# Question, and a pattern that a right answer holds and a plausible wrong one does not ("35.7 days", "a honey bee").
# The order is fixed: tables that were measured with the first ten stay comparable.
QUESTIONS = (
    ("What is the capital of France?", r"\bparis\b"),
    ("What color is the sky on a clear day?", r"\bblue\b"),
    ("How many days are in a week?", r"\b(seven|(?<!\.)(?<!\d,)7)( \w+)? days"),
    ("What is 2 + 2?", r"(\b(is|equals|are)|=) (4|four)\b(?![.,]\d)|^(4|four)\b(?![.,]\d)"),
    ("What is the opposite of hot?", r"\bis (cold|cool)\b|^(cold|cool)\b"),
    ("Which planet do we live on?", r"\b(called|is|planet) (the )?earth\b|\bearth is\b|^earth\b"),
    ("Which animal says meow?", r"\bcats?\b"),
    ("What is the largest ocean on Earth?", r"\bpacific\b"),
    ("What is the first month of the year?", r"\bjanuary\b"),
    ("What do bees make?", r"\bhoney\b(?! bee)"),
    ("What color is grass?", r"\bgreen\b"),
    ("What color is a ripe banana?", r"\byellow\b"),
    ("Which animal says moo?", r"\bcows?\b"),
    ("Which animal barks?", r"\bdogs?\b"),
    (
        "How many legs does a spider have?",
        r"\b(eight|(?<!\.)(?<!\d,)8)( \w+)? legs|\bha(s|ve) (eight|8)\b(?![.,]\d)|^(eight|8)\b(?![.,]\d)",
    ),
    ("How many months are in a year?", r"\b(twelve|(?<!\.)(?<!\d,)12)( \w+)? months|^(twelve|12)\b(?![.,]\d)"),
    ("What number comes after nine?", r"\b(is|are|comes) (the number )?\W?(ten|10)\b(?![.,]\d)|^(ten|10)\b(?![.,]\d)"),
    ("What is 10 - 3?", r"(\b(is|equals|are)|=) (7|seven)\b(?![.,]\d)|^(7|seven)\b(?![.,]\d)"),
    ("What is the opposite of up?", r"\bis \W?down\b|^\W?down\b"),
    ("What is the opposite of big?", r"\bis \W?(small|little|tiny)\b|^\W?(small|little|tiny)\b"),
    ("Which day comes after Monday?", r"\btuesday\b"),
    ("What is the last month of the year?", r"\bdecember\b"),
    ("What is the capital of Italy?", r"\brome\b"),
    ("In which city is the Eiffel Tower?", r"\bparis\b"),
    ("What is frozen water called?", r"\bice\b(?! cream)"),
    ("What is a baby dog called?", r"\bpup(s|py|pies)?\b"),
    ("Which season is the coldest?", r"\bwinter\b"),
    (
        "How many wheels does a bicycle have?",
        r"\b(two|(?<!\.)(?<!\d,)2)( \w+)? wheels|\bhas (two|2)\b(?![.,]\d)|^(two|2)\b(?![.,]\d)",
    ),
    ("Who wrote Romeo and Juliet?", r"\bshakespeare\b"),
    ("Which part of the body do we use to see?", r"\beyes?\b"),
)
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """A greedy answer and whether it holds what it should."""

    question: str
    text: str
    right: bool


def ask(
    loaded: LoadedModel,
    *,
    count: int = len(QUESTIONS),
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress = silent,
) -> tuple[Answer, ...]:
    """Ask the first `count` questions, each in a chat of its own with the default system prompt; greedy answers."""
    chosen = QUESTIONS[:count]
    prompts = [chat_prompt(loaded.tokenizer, question) for question, _ in chosen]
    texts = greedy(loaded, prompts, max_new_tokens, stage="questions", progress=progress)
    return tuple(
        Answer(question, text, is_right(pattern, text)) for (question, pattern), text in zip(chosen, texts, strict=True)
    )


def is_right(pattern: str, text: str) -> bool:
    """Whether an answer holds the `pattern` of its question."""
    return re.search(pattern, text, re.IGNORECASE) is not None
