"""Needle recall: does a model find one fact in a long text?

One fact stands somewhere in held-out prose, and the question after the text asks for its value. Values are drawn at
random, so no model can know them; an answer is right if it holds the exact value. Words, colors, names and dishes are
ten each: a blind guess among the ten would be right in a tenth of such needles.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models import texts
from engines.models.generation import chat_prompt, greedy, token_ids
from engines.models.interval import Interval, wilson
from engines.models.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engines.models.loading import LoadedModel

NEEDLES = 40
PROMPT_TOKENS = 1000
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Needle:
    """One fact in a haystack; `depth` from 0 (first in the text) to 1 (last), `prompt` in the model's chat template."""

    kind: str
    fact: str
    question: str
    value: str
    depth: float
    prompt: str


@dataclass(frozen=True)
class Found:
    """The greedy answer to a needle's question, and whether it holds the value."""

    needle: Needle
    text: str
    right: bool


@dataclass(frozen=True)
class Recall:
    """`answers` to all needles, in the order of their depth."""

    answers: tuple[Found, ...]

    @property
    def right(self) -> int:
        """How many were found."""
        return sum(answer.right for answer in self.answers)

    @property
    def of(self) -> int:
        """How many there were."""
        return len(self.answers)

    @property
    def interval(self) -> Interval:
        """95 % interval of the share that is found."""
        return wilson(self.right, self.of)

    def by_depth(self, parts: int = 5) -> tuple[tuple[int, int], ...]:
        """Found, and asked, in each of `parts` equal parts of the depth."""
        groups: list[list[bool]] = [[] for _ in range(parts)]
        for answer in self.answers:
            groups[min(int(answer.needle.depth * parts), parts - 1)].append(answer.right)
        return tuple((sum(group), len(group)) for group in groups)


@dataclass(frozen=True)
class _Kind:
    """Wordings of one kind of fact: `{who}` is one of `subjects`, and `draw` makes the value."""

    name: str
    subjects: Sequence[str]
    fact: str
    question: str
    draw: Callable[[random.Random], str]


_PEOPLE = ("Maria", "Tobias", "Ingrid", "Hassan", "Yuki", "Paola", "Pedro", "Amina", "Victor", "Leila", "Ruth", "Niels")
_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Prague", "Dublin", "Hanoi", "Quebec", "Cairo", "Vienna", "Seoul")
# No word of the exercises that models are healed with (`engines.models.healing.recall`).
_WORDS = ("acorn", "lantern", "harbor", "ladder", "thunder", "cotton", "pebble", "compass", "feather", "bucket")
_COLORS = ("purple", "orange", "yellow", "silver", "pink", "turquoise", "crimson", "golden", "violet", "brown")
_MONTHS = ("January", "February", "March", "April", "June", "July", "August", "September", "October", "November")
_CATS = ("Biscuit", "Pickles", "Marble", "Rocket", "Clover", "Pancake", "Domino", "Ginger", "Muffin", "Waffle")
_DISHES = ("lasagna", "pizza", "dumplings", "goulash", "paella", "risotto", "curry", "lentil soup", "sushi", "tacos")

_KINDS = (
    _Kind(
        "code",
        _PEOPLE,
        "The secret code of {who} is {value}.",
        "What is the secret code of {who}?",
        lambda rng: str(rng.randrange(10_000, 100_000)),
    ),
    _Kind(
        "word",
        _CITIES,
        "The magic word of the city of {who} is {value}.",
        "What is the magic word of the city of {who}?",
        lambda rng: rng.choice(_WORDS),
    ),
    _Kind(
        "date",
        _PEOPLE,
        "The birthday of {who} is on {value}.",
        "When is the birthday of {who}?",
        lambda rng: f"{rng.choice(_MONTHS)} {rng.randrange(2, 29)}",
    ),
    _Kind(
        "color",
        _PEOPLE,
        "The front door of the house of {who} is {value}.",
        "What color is the front door of the house of {who}?",
        lambda rng: rng.choice(_COLORS),
    ),
    _Kind(
        "name",
        _PEOPLE,
        "The cat of {who} is called {value}.",
        "What is the cat of {who} called?",
        lambda rng: rng.choice(_CATS),
    ),
    _Kind(
        "room",
        _PEOPLE,
        "The office of {who} is room number {value}.",
        "What is the room number of the office of {who}?",
        lambda rng: str(rng.randrange(101, 1000)),
    ),
    _Kind(
        "dish",
        _PEOPLE,
        "The favorite food of {who} is {value}.",
        "What is the favorite food of {who}?",
        lambda rng: rng.choice(_DISHES),
    ),
    _Kind(
        "time",
        _CITIES,
        "The train to {who} leaves at {value}.",
        "When does the train to {who} leave?",
        lambda rng: f"{rng.randrange(10, 24)}:{rng.randrange(10, 60)}",
    ),
)


def needles(
    loaded: LoadedModel, *, count: int = NEEDLES, tokens: int = PROMPT_TOKENS, seed: int = 0
) -> tuple[Needle, ...]:
    """A fixed list: all kinds in turn, depths spread evenly from 0 to 1, each in a stretch of prose of its own.

    A whole prompt has at most `tokens` tokens, and the next sentence would not fit; text that is too short begins anew.

    Raises:
        ValueError: `count` is not positive, or `tokens` has no room for a sentence.
    """
    if count < 1:
        raise ValueError(f"need at least one needle, got {count}")
    rng = random.Random(seed)
    sentences = _sentences()
    lengths = [_length(loaded, f" {sentence}") for sentence in sentences]
    made = []
    for index in range(count):
        kind = _KINDS[index % len(_KINDS)]
        who, value = rng.choice(kind.subjects), kind.draw(rng)
        fact, question = kind.fact.format(who=who, value=value), kind.question.format(who=who)
        depth = index / (count - 1) if count > 1 else 0.5
        room = tokens - _length(loaded, _prompt(loaded, [fact], question))
        hay = _haystack(sentences, lengths, rng.randrange(len(sentences)), room)
        prompt = _prompt(loaded, _with_fact(hay, fact, depth), question)
        made.append(Needle(kind.name, fact, question, value, depth, prompt))
    return tuple(made)


def recall(
    loaded: LoadedModel,
    asked: Sequence[Needle],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress = silent,
) -> Recall:
    """Ask for every needle of `asked`; greedy answers."""
    prompts = [needle.prompt for needle in asked]
    answers = greedy(loaded, prompts, max_new_tokens, stage="needles", progress=progress)
    return Recall(tuple(Found(n, text, holds(text, n.value)) for n, text in zip(asked, answers, strict=True)))


def holds(text: str, value: str) -> bool:
    """Whether `value` stands in `text` as a whole word or number, in any case of letters."""
    # Not within a longer number ("148.213", "48,213.5") or word, but "March 14th" is March 14 and "14:30pm" is 14:30.
    ending = ""
    if value[-1].isdigit():
        ending = r"(?:[ap]\.?m)?" if ":" in value else "(?:st|nd|rd|th)?"
    bounded = rf"(?<!\w)(?<!\d[.,:]){re.escape(value)}{ending}(?!\w)(?![.,:]\d)"
    return re.search(bounded, text, re.IGNORECASE) is not None


def _sentences() -> list[str]:
    found = []
    for _, paragraph in texts.paragraphs(texts.Part.HELDOUT):
        found += re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)
    return found


def _haystack(sentences: Sequence[str], lengths: Sequence[int], start: int, room: int) -> list[str]:
    """As many sentences from number `start` on as fit into `room` tokens."""
    hay: list[str] = []
    while (room := room - lengths[(start + len(hay)) % len(sentences)]) >= 0:
        hay.append(sentences[(start + len(hay)) % len(sentences)])
    if not hay:
        raise ValueError("no room for a sentence of the haystack; ask for more tokens")
    return hay


def _with_fact(hay: Sequence[str], fact: str, depth: float) -> list[str]:
    """`fact` between the two sentences where `depth` of the characters is nearest."""
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + len(sentence) + 1)
    place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
    return [*hay[:place], fact, *hay[place:]]


def _prompt(loaded: LoadedModel, sentences: Sequence[str], question: str) -> str:
    # Without these words SmolLM2 answers half of the questions from its own head.
    asked = f"According to the text above, {question[0].lower()}{question[1:]}"
    return chat_prompt(loaded.tokenizer, f"{' '.join(sentences)}\n\n{asked}")


def _length(loaded: LoadedModel, text: str) -> int:
    return len(token_ids(loaded.tokenizer, text))
