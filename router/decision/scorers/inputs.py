"""The numbers that the learned scorer works on. Changing what one of them means needs a new `INPUTS_VERSION`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from router.decision.vocabulary import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.decision.features import Features
    from router.decision.vocabulary import Scanned

INPUTS_VERSION = 1

# A value further from the training data than this many deviations says no more than one at this distance.
_FURTHEST_DEVIATIONS = 4.0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBER = re.compile(r"\d[\d,.]*")
# Only where a run of signs begins, or a long run would be read again from each of them.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+(?:\s|$)|[\u3002\uff01\uff1f]+")
_SIMPLE_FRACTION = re.compile(r"\d/\d")
_FRACTION = re.compile("[½⅓¼¾⅔]|分之|一半")
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

INPUT_NAMES = (
    *("words", "numbers", "magnitude", "decimals", "fractions", "percents", "relations", "sentences", "commas"),
    *("capitals", "word_length", "distinct", "last_sentence", "number_share"),
    *KINDS,
    *("context_words", "turns"),
)
"""Counts are given as log(1 + count); `word_length` is a mean, `distinct` and `number_share` are shares
of words and of characters."""


def inputs_of(features: Features) -> list[float]:
    """One finite number for each of `INPUT_NAMES`, from the ends of the text if it is long."""
    scanned, last = features.scanned, features.last
    text, words, present = scanned.text, scanned.words, scanned.present
    numbers = _NUMBER.findall(text)
    sentences = _SENTENCE_END.split(text.strip())
    last_sentence = next((sentence for sentence in reversed(sentences) if sentence), "")
    counts = (
        features.words,
        len(numbers),
        max(map(_whole_digits, numbers), default=0),
        len([number for number in numbers if "." in number.rstrip(".,")]),
        _simple_fractions(text) + _signs(_FRACTION, text) + _occurrences(_FRACTION_WORDS, scanned),
        text.count("%"),
        _signs(_RELATION, text) + _occurrences(_RELATION_WORDS, scanned),
        len(sentences) - 1,
        text.count(",") + text.count("\uff0c"),
        len([word for word in words if "A" <= word[0] <= "Z"]),
    )
    return [
        *map(math.log1p, counts),
        sum(map(len, words)) / max(1, len(words)),
        len(present) / max(1, len(words)),
        math.log1p(len(last_sentence)),
        sum(map(len, numbers)) / max(1, len(text)),
        *[math.log1p(getattr(last, name)) for name in KINDS],
        math.log1p(features.context_words),
        math.log1p(features.turns),
    ]


def standardised(inputs: Sequence[float], mean: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Deviations from `mean` in units of `scale`, bounded; an input that never varied, with scale 0, says nothing."""
    return [
        max(-_FURTHEST_DEVIATIONS, min(_FURTHEST_DEVIATIONS, (value - centre) / unit)) if unit else 0.0
        for value, centre, unit in zip(inputs, mean, scale, strict=True)
    ]


def _occurrences(wanted: frozenset[str], scanned: Scanned) -> int:
    if scanned.present.isdisjoint(wanted):
        return 0
    return len([word for word in scanned.lowered_words if word in wanted])


def _signs(pattern: re.Pattern[str], text: str) -> int:
    """Matches of a pattern that holds nothing but signs beyond ASCII."""
    return 0 if text.isascii() else len(pattern.findall(text))


def _simple_fractions(text: str) -> int:
    return len(_SIMPLE_FRACTION.findall(text)) if "/" in text else 0


def _whole_digits(number: str) -> int:
    whole = number.partition(".")[0]
    return len(whole) - whole.count(",")
