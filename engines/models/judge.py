"""How good a model is: perplexity on three kinds of text, needle recall and easy questions; alone or beside another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models import texts
from engines.models.errors import DifferentTokenizersError
from engines.models.interval import Ratio, perplexity_ratio, share_ratio
from engines.models.needle import NEEDLES, PROMPT_TOKENS, Found, Recall, needles, recall
from engines.models.perplexity import (
    WINDOW_TOKENS,
    Perplexity,
    answer_perplexity,
    conversation_perplexity,
    encode,
    perplexity,
)
from engines.models.progress import Progress, silent
from engines.models.questions import MAX_NEW_TOKENS, QUESTIONS, Answer, ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engines.models.loading import LoadedModel


@dataclass(frozen=True)
class JudgeSize:
    """How much is measured; no `conversations`, no `needles` and no `questions` leave those out.

    `needle_tokens`: the most tokens of a whole prompt; `answer_tokens`: the longest answer to an easy question.
    """

    prose_tokens: int = 2048
    dialogues: int = 8
    conversations: int = 16
    needles: int = NEEDLES
    needle_tokens: int = PROMPT_TOKENS
    needle_seed: int = 0
    questions: int = len(QUESTIONS)
    answer_tokens: int = MAX_NEW_TOKENS


@dataclass(frozen=True)
class Judgement:
    """What was measured of a model; None or empty where it was not measured. Lower perplexity is better."""

    name: str
    parameters: int
    layers: int
    prose: Perplexity
    chat: Perplexity
    conversations: Perplexity | None
    recall: Recall | None
    answers: tuple[Answer, ...]

    @property
    def right(self) -> int:
        """Easy questions with a right answer, out of `len(answers)`."""
        return sum(answer.right for answer in self.answers)


@dataclass(frozen=True)
class Comparison:
    """A model's figures over a reference model's; None where one of the two was not measured or has none right."""

    prose: Ratio
    chat: Ratio
    conversations: Ratio | None
    recall: Ratio | None
    answers: Ratio | None


def check_same_tokens(folders: Sequence[Path]) -> None:
    """Models are compared token by token: refuse model `folders` in which one text would become different tokens.

    Raises:
        DifferentTokenizersError: a tokenizer or chat template differs from that of the first folder.
    """
    for other in folders[1:]:
        if _bytes(folders[0] / "tokenizer.json") != _bytes(other / "tokenizer.json"):
            raise DifferentTokenizersError(folders[0], other, "tokenizer")
        if _chat_template(folders[0]) != _chat_template(other):
            raise DifferentTokenizersError(folders[0], other, "chat template")


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _chat_template(folder: Path) -> object:
    template = _bytes(folder / "chat_template.jinja")
    if template is not None:
        return template.decode()
    # Where older versions of transformers wrote it.
    config = _bytes(folder / "tokenizer_config.json")
    return None if config is None else json.loads(config).get("chat_template")


def judge(
    loaded: LoadedModel,
    name: str,
    size: JudgeSize,
    *,
    progress: Progress = silent,
) -> Judgement:
    """Measure a model on held-out text (minutes)."""
    heldout = encode(loaded, texts.prose(texts.Part.HELDOUT), size.prose_tokens)
    talk: Perplexity | None = None
    found: Recall | None = None
    answers: tuple[Answer, ...] = ()
    prose = perplexity(loaded, heldout, progress=progress)
    chat = answer_perplexity(loaded, texts.dialogues(texts.Part.HELDOUT, size.dialogues), progress=progress)
    if size.conversations:
        talked = [encode(loaded, text, WINDOW_TOKENS) for text in texts.conversations()[: size.conversations]]
        talk = conversation_perplexity(loaded, talked, progress=progress)
    if size.needles:
        asked = needles(loaded, count=size.needles, tokens=size.needle_tokens, seed=size.needle_seed)
        found = recall(loaded, asked, progress=progress)
    if size.questions:
        answers = ask(loaded, count=size.questions, max_new_tokens=size.answer_tokens, progress=progress)
    return Judgement(
        name=name,
        # Tied embeddings are one parameter in torch, too.
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        layers=len(loaded.layers),
        prose=prose,
        chat=chat,
        conversations=talk,
        recall=found,
        answers=answers,
    )


def compare(judged: Judgement, reference: Judgement) -> Comparison:
    """Ratios of two judgements of one size, with intervals from the differences token by token and answer by answer.

    Raises:
        ValueError: they were not measured on the same things, or a text is too short for an interval.
    """
    talk = found = answers = None
    if judged.conversations and reference.conversations:
        talk = perplexity_ratio(judged.conversations.losses, reference.conversations.losses)
    if judged.recall and reference.recall:
        found = _share_ratio(judged.recall.answers, reference.recall.answers)
    if judged.answers and reference.answers:
        answers = _share_ratio(judged.answers, reference.answers)
    return Comparison(
        prose=perplexity_ratio(judged.prose.losses, reference.prose.losses),
        chat=perplexity_ratio(judged.chat.losses, reference.chat.losses),
        conversations=talk,
        recall=found,
        answers=answers,
    )


def _share_ratio(answers: Sequence[Answer | Found], reference: Sequence[Answer | Found]) -> Ratio | None:
    return share_ratio([answer.right for answer in answers], [answer.right for answer in reference])
