"""Numbers read from the text of a conversation, for scorers. Nothing here rests on whitespace or on English alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from router.decision.vocabulary import Scanned, counts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.request.generation import Turn

# Patterns see at most this much of a text, so that a huge body cannot hold the event loop; lengths are always whole.
_SCANNED_CHARS = 8_192

_LONGEST_FOLLOW_UP = 80

# A word of a spaced script has about six characters with its space; of a dense script, about one and a half.
_CHARS_PER_WORD = 6.0
_DENSE_CHARS_PER_WORD = 1.5
_DENSE = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

# A short turn that stands on the one before it.
_FOLLOW_UP = re.compile(r"\s*(?:and|or|but|now|also|again|what about|how about|same|then|y|et|und)\b[^\n]{0,60}")


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """Counts in a text; `words` is an estimate in words of any script."""

    words: float = 0.0
    proof: int = 0
    build: int = 0
    explain: int = 0
    code: int = 0
    maths: int = 0
    questions: int = 0
    constraints: int = 0


@dataclass(frozen=True)
class Features:
    """What scorers see; the parts are worked out when somebody asks for them.

    `prompt` is the last user text, `counted` what its counts are of, `rest` all other turns, `turns` how many there
    are.
    """

    prompt: str
    counted: str
    rest: str
    turns: int

    @cached_property
    def scanned(self) -> Scanned:
        """The last user text as words; of a long one, its ends."""
        return Scanned(ends(self.counted))

    @cached_property
    def last(self) -> TextFeatures:
        """Counts of the last user text."""
        return TextFeatures(words=self.words, **counts_of(self.scanned))

    @cached_property
    def context(self) -> TextFeatures:
        """Counts of the other turns."""
        return text_features(self.rest)

    @cached_property
    def words(self) -> float:
        """Words of the last user text."""
        return words_of(self.counted)

    @cached_property
    def context_words(self) -> float:
        """Words of the other turns."""
        return words_of(self.rest)


def conversation_features(turns: Sequence[Turn]) -> Features:
    """Features of a conversation; its subject is the last user turn, or the last turn if no user spoke.

    A short follow-up ("And of 3?") counts together with the user turn before it: it asks for the same again.
    """
    subject = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=len(turns) - 1)
    rest = "\n".join(turn.text for index, turn in enumerate(turns) if index != subject and turn.text)
    prompt = turns[subject].text
    spoken = sum(turn.role in {"user", "assistant"} for turn in turns)
    before = next((turn.text for turn in reversed(turns[:subject]) if turn.role == "user"), "")
    is_follow_up = bool(before) and _FOLLOW_UP.fullmatch(prompt.lower()[: 2 * _LONGEST_FOLLOW_UP]) is not None
    return Features(prompt, f"{before}\n{prompt}" if is_follow_up else prompt, rest, spoken)


def text_features(text: str) -> TextFeatures:
    """Counts in one text."""
    return TextFeatures(words=words_of(text), **counts_of(Scanned(ends(text))))


def words_of(text: str) -> float:
    """An estimate of the words of a text in any script."""
    scanned = ends(text)
    if scanned.isascii():
        return len(text) / _CHARS_PER_WORD
    dense_share = len(_DENSE.findall(scanned)) / len(scanned)
    return len(text) * (dense_share / _DENSE_CHARS_PER_WORD + (1 - dense_share) / _CHARS_PER_WORD)


def ends(text: str) -> str:
    """The whole of a text, or the beginning and the end of a long one: instructions stand at either."""
    if len(text) <= _SCANNED_CHARS:
        return text
    half = _SCANNED_CHARS // 2
    return f"{text[:half]}\n{text[-half:]}"
