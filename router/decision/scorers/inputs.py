"""The numbers that the learned scorer works on. Changing what one of them means needs a new `INPUTS_VERSION`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from router.decision.features import ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.decision.features import Features

INPUTS_VERSION = 1

# A value further from the training data than this many deviations says no more than one at this distance.
_FURTHEST_DEVIATIONS = 4.0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBER = re.compile(r"\d[\d,.]*")
_WORD = re.compile(r"[^\W\d_]+")
_CAPITAL = re.compile(r"\b[A-Z]")
_SENTENCE_END = re.compile(r"[.!?]+(?:\s|$)|[\u3002\uff01\uff1f]+")
_FRACTION = re.compile(r"\d/\d|[½⅓¼¾⅔]|分之|一半")
_FRACTION_WORDS = _words(
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths "
    "mitad tercio cuarto moitié tiers hälfte drittel viertel половина половину половины треть четверть"
)
_RELATION = re.compile("如果|[每比多少剩倍]")
_RELATION_WORDS = _words(
    "if than then after before each every per total remaining left twice times more less fewer "
    "si que cada después antes más menos doble chaque avant après plus moins fois "
    "wenn als jede jeder jedes pro nach vor mehr weniger mal "
    "если чем каждый каждая каждое больше меньше после до"
)

_COUNTED = ("proof", "build", "explain", "code", "maths", "questions", "constraints")
INPUT_NAMES = (
    *("words", "numbers", "magnitude", "decimals", "fractions", "percents", "relations", "sentences", "commas"),
    *("capitals", "word_length", "distinct", "last_sentence", "number_share"),
    *_COUNTED,
    *("context_words", "turns"),
)
"""Counts are given as log(1 + count); `word_length` is a mean, `distinct` and `number_share` are shares
of words and of characters."""


def inputs_of(features: Features) -> list[float]:
    """One finite number for each of `INPUT_NAMES`, from the ends of the text if it is long."""
    text = ends(features.prompt)
    numbers = _NUMBER.findall(text)
    words = _WORD.findall(text.lower())
    sentences = _SENTENCE_END.split(text.strip())
    last_sentence = next((sentence for sentence in reversed(sentences) if sentence), "")
    counts = (
        features.last.words,
        len(numbers),
        max(map(_whole_digits, numbers), default=0),
        sum("." in number.rstrip(".,") for number in numbers),
        len(_FRACTION.findall(text)) + sum(map(_FRACTION_WORDS.__contains__, words)),
        text.count("%"),
        len(_RELATION.findall(text)) + sum(map(_RELATION_WORDS.__contains__, words)),
        len(sentences) - 1,
        text.count(",") + text.count("\uff0c"),
        len(_CAPITAL.findall(text)),
    )
    distinct = set(words)
    return [
        *map(math.log1p, counts),
        sum(map(len, words)) / max(1, len(words)),
        len(distinct) / max(1, len(words)),
        math.log1p(len(last_sentence)),
        sum(map(len, numbers)) / max(1, len(text)),
        *(math.log1p(getattr(features.last, name)) for name in _COUNTED),
        math.log1p(features.context.words),
        math.log1p(features.turns),
    ]


def standardised(inputs: Sequence[float], mean: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Deviations from `mean` in units of `scale`, bounded; an input that never varied, with scale 0, says nothing."""
    return [
        max(-_FURTHEST_DEVIATIONS, min(_FURTHEST_DEVIATIONS, (value - centre) / unit)) if unit else 0.0
        for value, centre, unit in zip(inputs, mean, scale, strict=True)
    ]


def _whole_digits(number: str) -> int:
    whole = number.partition(".")[0]
    return len(whole) - whole.count(",")
