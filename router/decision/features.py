"""Numbers read from the text of a conversation, for scorers. Nothing here rests on whitespace or on English alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.request.generation import Turn

# Patterns see at most this much of a text, so that a huge body cannot hold the event loop; lengths are always whole.
# For the same reason no pattern may start with a repetition that is not anchored: its time would grow with the square.
_SCANNED_CHARS = 8_192

_LONGEST_FOLLOW_UP = 80

# A word of a spaced script has about six characters with its space; of a dense script, about one and a half.
_CHARS_PER_WORD = 6.0
_DENSE_CHARS_PER_WORD = 1.5
_DENSE = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

# All but the pattern for code see text in lower case: matching without regard to case takes three times as long.
_PROOF = re.compile(
    r"\b(?:prov(?:e|ing)|proofs?|deriv(?:e|ing|ation)|step[- ]by[- ]step|theorems?|demuestr[ae]|demostrar|paso a paso"
    r"|démontre[rz]?|prouve[rz]?|étape par étape|beweis(?:e|en)?|schritt für schritt|докажи(?:те)?|пошагово"
    r"|prove que|passo a passo"
    # A task in mathematics that is a proof or a derivation under another name.
    r"|(?:compute|evaluate|solve|find|calculate|determine)\b[^.?!\n]{0,60}\b(?:integrals?|residues?|contour|eigenvalues?"
    r"|determinant|differential equations?|closed form|asymptotics?)"
    r"|show that\b[^.?!\n]{0,80}\b(?:infinitely|finite(?:ly)?|converges?|diverges?|every|all|any|no|if|unique|bounded"
    r"|continuous|is|are|has))\b"
    r"|证明|證明|推导|推導|逐步|一步一步|証明|導出|증명|단계별|أثبت|خطوة بخطوة|सिद्ध",
)
_BUILD = re.compile(
    r"\b(?:implement(?:s|ing|ation)?|optimi[sz](?:e|es|ing|ation)|debug(?:ging)?|refactor(?:ing)?|algorithms?"
    r"|architect(?:ure)?|implementa[r]?|optimiza[r]?|depura[r]?|diseñ[ae]r?|implémente[rz]?|optimise[rz]|conçois"
    r"|(?:design|build|write|create|develop)\b[^.?!\n]{0,40}\b(?:schemas?|migrations?|compilers?|parsers?|databases?"
    r"|protocols?|schedulers?|distributed|server|library|framework|pipeline)"
    r"|implementiere[n]?|optimiere[n]?|entwirf|entwerfe[n]?|реализуй(?:те)?|оптимизируй(?:те)?|спроектируй(?:те)?)\b"
    r"|实现|實現|优化|優化|调试|設計|设计|算法|実装|最適化|구현|최적화|설계|صمم",
)
_EXPLAIN = re.compile(
    r"\b(?:explain(?:ing)?|why|compar(?:e|ing|ison)|contrast|analy[sz](?:e|ing|is)|evaluate|justify|trade-?offs?"
    r"|design(?:ing)?|reason(?:ing)?|in detail|explica|compara|analiza|por qué|explique[rz]?|analyse[rz]|pourquoi"
    r"|erkläre?|vergleiche?|analysiere|warum|объясни(?:те)?|сравни(?:те)?|почему|проанализируй)\b"
    r"|解释|解釋|比较|比較|分析|为什么|為什麼|説明|なぜ|설명|비교|분석|왜|اشرح|قارن|समझा|तुलना",
)
_CODE = re.compile(
    r"```|`[^`\n]+`|\b(?:def|class|return|import|function|const|void|struct|async|lambda|SELECT|FROM|WHERE)\b"
    r"|\((?<=\w\()[^()\n]*\)|[=!]=|=>|->|::|[{};][ \t]*$",
    re.MULTILINE,
)
_MATHS = re.compile(
    r"[∑∫∂√∞≤≥≠±\u00d7÷∀∃∈\u211d\u2115\u2124]|\\(?:frac|sum|int|sqrt|lim)\b|\$[^$\n]+\$|\^|\b\d+\s*[-+*/=<>]\s*\d+"
    r"|\b\d+(?:\.\d+)?\b|\b(?:equations?|integrals?|derivatives?|matri(?:x|ces)|(?:ir)?rational|square root|primes?"
    r"|probabilit(?:y|ies)|polynomials?|modulo)\b|素数|方程|积分|矩阵|概率|平方根|無理数|无理数",
)
# A question for yes or no that holds a word like "prove" asks about a proof, and for none. A request put as a question
# ("can you …") begins otherwise.
_YES_OR_NO = re.compile(r"\s*(?:do|does|did|is|are|was|were|has|have|had|should|will)\b[^.!?\n]{0,200}\?\s*")
# A short turn that stands on the one before it.
_FOLLOW_UP = re.compile(r"\s*(?:and|or|but|now|also|again|what about|how about|same|then|y|et|und)\b[^\n]{0,60}")

_QUESTION = re.compile(r"[?\uff1f؟]")
_CONSTRAINT = re.compile(
    r"^[ \t]*(?:[-*•]|\d+[.)])[ \t]+"
    r"|\b(?:must|should not|at least|at most|exactly|without using|thread-safe|only if|ensure)\b"
    r"|必须|至少|最多|不要",
    re.MULTILINE,
)


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


@dataclass(frozen=True, slots=True)
class Features:
    """What scorers see. `prompt` is the last user text, `last` its counts, `context` those of all other turns."""

    prompt: str
    last: TextFeatures
    context: TextFeatures
    turns: int


def conversation_features(turns: Sequence[Turn]) -> Features:
    """Features of a conversation; its subject is the last user turn, or the last turn if no user spoke.

    A short follow-up ("And of 3?") counts together with the user turn before it: it asks for the same again.
    """
    subject = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=len(turns) - 1)
    context = "\n".join(turn.text for index, turn in enumerate(turns) if index != subject and turn.text)
    prompt = turns[subject].text
    spoken = sum(turn.role in {"user", "assistant"} for turn in turns)
    before = next((turn.text for turn in reversed(turns[:subject]) if turn.role == "user"), "")
    is_follow_up = bool(before) and _FOLLOW_UP.fullmatch(prompt.lower()[: 2 * _LONGEST_FOLLOW_UP]) is not None
    counted = f"{before}\n{prompt}" if is_follow_up else prompt
    return Features(prompt=prompt, last=text_features(counted), context=text_features(context), turns=spoken)


def text_features(text: str) -> TextFeatures:
    """Counts in one text."""
    scanned = ends(text)
    lowered = scanned.lower()
    return TextFeatures(
        words=_words(text, scanned),
        proof=0 if _YES_OR_NO.fullmatch(lowered) else _count(_PROOF, lowered),
        build=_count(_BUILD, lowered),
        explain=_count(_EXPLAIN, lowered),
        code=_count(_CODE, scanned),
        maths=_count(_MATHS, lowered),
        questions=_count(_QUESTION, scanned),
        constraints=_count(_CONSTRAINT, lowered),
    )


def ends(text: str) -> str:
    """The whole of a text, or the beginning and the end of a long one: instructions stand at either."""
    if len(text) <= _SCANNED_CHARS:
        return text
    half = _SCANNED_CHARS // 2
    return f"{text[:half]}\n{text[-half:]}"


def _words(text: str, scanned: str) -> float:
    if not scanned:
        return 0.0
    dense_share = _count(_DENSE, scanned) / len(scanned)
    return len(text) * (dense_share / _DENSE_CHARS_PER_WORD + (1 - dense_share) / _CHARS_PER_WORD)


def _count(pattern: re.Pattern[str], text: str) -> int:
    return len(pattern.findall(text))
