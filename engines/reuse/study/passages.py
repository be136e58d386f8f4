"""Held-out text of any length that a study needs, and conversations about facts in it.

The whole held-out topics of the language reference (`engines.models.texts` takes only the first paragraphs of each,
which end after some 6,000 tokens), shuffled by a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.models.generation import chat_prompt, token_ids
from engines.models.texts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.models.needle import Needle

# More than a token of English text has on average, so that one tokenisation is enough nearly always.
_CHARACTERS_A_TOKEN = 6


def passage(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """The first `tokens` tokens of the held-out topics in an order of `seed`; they begin anew where they end."""
    whole = _heldout(seed)
    text = whole
    while len(ids := token_ids(tokenizer, text[: tokens * _CHARACTERS_A_TOKEN])) < tokens:
        text += whole
    return ids[:tokens]


def _heldout(seed: int) -> str:
    from pydoc_data.topics import topics

    kept = [topics[name] for index, name in enumerate(sorted(topics)) if list(Part)[index % len(Part)] is Part.HELDOUT]
    random.Random(seed).shuffle(kept)
    return "\n\n".join(kept) + "\n\n"


@dataclass(frozen=True)
class Recollection:
    """A conversation about facts that stand in its first message; all of it is a prefix that may be reused.

    Attributes:
        tokens: of the conversation, followed by prose up to the length that was asked for.
        values: positions of each fact's value where the assistant says it.
    """

    tokens: Sequence[int]
    values: Sequence[range]


def recollection(
    tokenizer: Any, asked: Sequence[Needle], tokens: int, seed: int, prose: Sequence[int] | None = None
) -> Recollection:
    """A conversation of exactly `tokens` tokens: prose with the facts at even depths, then questions and answers.

    The prose is `prose`, of as many tokens at the least; without it, held-out topics in an order of `seed`.

    A row that is computed from few keys has to find the value in the prose and to say it, so questions and answers must
    lie where a mask applies: a tail that is computed densely would find them whatever was done to the prefix.

    Raises:
        ValueError: the questions leave no room for prose.
    """
    turns = [_about_the_text(one) for one in asked]
    spare = passage(tokenizer, tokens, seed) if prose is None else list(prose[:tokens])
    room = tokens - _length(tokenizer, _conversation(tokenizer, [], turns, asked))
    # Tokens at seams may join or part; the loop settles it.
    while room > 0:
        text = _conversation(tokenizer, _prose(tokenizer, spare[:room], asked), turns, asked)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        if len(ids) <= tokens:
            values = _values(text, encoded["offset_mapping"], asked)
            return Recollection([*ids, *spare[room : room + tokens - len(ids)]], values)
        room -= len(ids) - tokens
    raise ValueError(f"{tokens} tokens have no room for prose beside {len(asked)} questions; ask for more tokens")


def inquiries(tokenizer: Any, asked: Sequence[Needle], prose: Sequence[int]) -> list[list[int]]:
    """A prompt a fact, with one question each about the same prose, token ids, between which all facts are put."""
    text = " ".join(_prose(tokenizer, prose, asked))
    return [token_ids(tokenizer, chat_prompt(tokenizer, f"{text}\n\n{_about_the_text(one)}")) for one in asked]


def _about_the_text(asked: Needle) -> str:
    return f"According to the text above, {asked.question[0].lower()}{asked.question[1:]}"


def _conversation(tokenizer: Any, prose: Sequence[str], turns: Sequence[str], asked: Sequence[Needle]) -> str:
    messages = []
    for index, (turn, needle) in enumerate(zip(turns, asked, strict=True)):
        said = f"{' '.join(prose)}\n\n{turn}" if index == 0 else turn
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": needle.fact}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


def _prose(tokenizer: Any, tokens: Sequence[int], asked: Sequence[Needle]) -> list[str]:
    """The text of `tokens` in equal parts, with a fact before each."""
    count = len(asked)
    parts = [tokens[index * len(tokens) // count : (index + 1) * len(tokens) // count] for index in range(count)]
    pieces: list[str] = []
    for needle, part in zip(asked, parts, strict=True):
        pieces += [needle.fact, tokenizer.decode(part).strip()]
    return pieces


def _values(text: str, offsets: Sequence[tuple[int, int]], asked: Sequence[Needle]) -> list[range]:
    """Tokens of each value in its answer, which is the last place where the fact stands."""
    found = []
    for needle in asked:
        begin = text.rindex(needle.fact) + needle.fact.rindex(needle.value)
        end = begin + len(needle.value)
        inside = [index for index, (low, high) in enumerate(offsets) if low < end and high > begin]
        found.append(range(inside[0], inside[-1] + 1))
    return found


def _length(tokenizer: Any, text: str) -> int:
    return len(token_ids(tokenizer, text))
