"""The training text as packed rows of token ids, with a weight for every position, in one file.

Three kinds: documents (`corpus`), conversations (`sampling`) and exercises (`recall`), the last also in long rows.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.models.generation import chat_prompt, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from engines.models.healing.recall import Exercise

    Ids = npt.NDArray[np.uint16]
    Weights = npt.NDArray[np.uint8]

LONG_TOKENS = 1024
# Characters.
_MIN_SENTENCE = 40
_MAX_SENTENCE = 300
# About; a row that comes out too long is left out.
_TOKENS_PER_SENTENCE = 32
_TOKENS_PER_FACT = 12
_QUESTIONS = 3
# An answer has few tokens among hundreds, and they are the only ones that need recall.
ANSWER_WEIGHT = 8


@dataclass(frozen=True)
class Rows:
    """Token ids and the weight of predicting the token after each of them (0: padding), both [rows, length]."""

    ids: Ids
    weights: Weights

    def __post_init__(self) -> None:
        assert self.ids.shape == self.weights.shape


def pack(tokenizer: Any, documents: Iterable[str], length: int, tokens: int) -> Rows:
    """About `tokens` tokens of `documents`, end to end with the end-of-text token between them, cut into full rows."""
    import numpy as np

    separator = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    stream: list[int] = []
    for text in documents:
        stream += [*token_ids(tokenizer, text), separator]
        if len(stream) >= tokens:
            break
    rows = min(len(stream), tokens) // length
    return every_token(np.array(stream[: rows * length], np.uint16).reshape(rows, length))


def every_token(ids: Ids) -> Rows:
    """`ids` [rows, length], each token of which counts alike, but the last of a row: what follows it is not known."""
    import numpy as np

    weights = np.ones(ids.shape, np.uint8)
    weights[:, -1] = 0
    return Rows(ids, weights)


def exercises(tokenizer: Any, made: Sequence[Exercise], length: int) -> Rows:
    """One exercise a row in the chat template, its answers weighted; those that do not fit are left out."""
    import numpy as np

    rows, weights = [], []
    for one in made:
        ids: list[int] = []
        weight: list[int] = []
        for number, (question, answer) in enumerate(one.turns):
            turn = f"{one.context}\n\n{question}" if number == 0 else question
            prompt = chat_prompt(tokenizer, turn)
            # Later turns follow the first one's answer, without another system turn.
            after = prompt if number == 0 else "<|im_start|>user" + prompt.partition("<|im_start|>user")[2]
            head = token_ids(tokenizer, after)
            tail = token_ids(tokenizer, f"{answer}<|im_end|>")
            end = token_ids(tokenizer, "\n")
            # Position i predicts token i + 1.
            weight += [1] * (len(head) - 1) + [ANSWER_WEIGHT] * len(tail) + [1] * (1 + len(end))
            ids += head + tail + end
        weight[-1] = 0
        if len(ids) <= length:
            padding = length - len(ids)
            rows.append(ids + [0] * padding)
            weights.append(weight + [0] * padding)
    return Rows(np.array(rows, np.uint16).reshape(-1, length), np.array(weights, np.uint8).reshape(-1, length))


def sentences(documents: Sequence[str]) -> list[str]:
    """Sentences of prose to hide facts among."""
    pieces = [piece for text in documents for piece in re.split(r"(?<=[.!?])\s+", " ".join(text.split()))]
    return [piece for piece in pieces if _MIN_SENTENCE <= len(piece) <= _MAX_SENTENCE and piece[0].isupper()]


def make_exercises(filler: Sequence[str], count: int, length: int, seed: int) -> list[Exercise]:
    """`count` exercises of up to about `length` tokens, from two facts to mostly facts."""
    from engines.models.healing.recall import exercise

    rng = random.Random(seed)
    made = []
    for _ in range(count):
        room = length * rng.uniform(0.6, 0.85) / (_TOKENS_PER_FACT + _TOKENS_PER_SENTENCE)
        share = rng.choice((0.1, 0.3, 1.0))
        facts = max(2, round(2 * room * share))
        lines = max(0, round(2 * room * (1 - share)))
        begin = rng.randrange(len(filler) - lines)
        made.append(exercise(rng, filler[begin : begin + lines], facts, _QUESTIONS))
    return made
