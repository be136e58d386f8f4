"""Ten questions that a child can answer, to see whether a pruned model still makes sense."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from engines.models.loading import LoadedModel

# Question, and a pattern that a right answer holds and a plausible wrong one does not ("35.7 days", "a honey bee").
QUESTIONS = (
    ("What is the capital of France?", r"\bparis\b"),
    ("What color is the sky on a clear day?", r"\bblue\b"),
    ("How many days are in a week?", r"\b(seven|(?<!\.)7)( \w+)? days"),
    ("What is 2 + 2?", r"(\b(is|equals|are)|=) (4|four)\b|^(4|four)\b"),
    ("What is the opposite of hot?", r"\bis (cold|cool)\b|^(cold|cool)\b"),
    ("Which planet do we live on?", r"\b(called|is|planet) (the )?earth\b|\bearth is\b|^earth\b"),
    ("Which animal says meow?", r"\bcats?\b"),
    ("What is the largest ocean on Earth?", r"\bpacific\b"),
    ("What is the first month of the year?", r"\bjanuary\b"),
    ("What do bees make?", r"\bhoney\b(?! bee)"),
)
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Answer:
    """A greedy answer and whether it holds what it should."""

    question: str
    text: str
    right: bool


def ask(
    loaded: LoadedModel, *, max_new_tokens: int = MAX_NEW_TOKENS, progress: Progress = silent
) -> tuple[Answer, ...]:
    """Ask all questions, each in a chat of its own with the template's default system prompt; greedy answers."""
    answers = []
    for done, (question, pattern) in enumerate(QUESTIONS, 1):
        text = _greedy(loaded, question, max_new_tokens)
        answers.append(Answer(question, text, re.search(pattern, text, re.IGNORECASE) is not None))
        progress("questions", done, len(QUESTIONS))
    return tuple(answers)


def _greedy(loaded: LoadedModel, question: str, max_new_tokens: int) -> str:
    tokenizer: Any = loaded.tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = loaded.model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())
