"""Words, phrases and signs that say what a text asks for, in about ten languages.

Counting must cost tens of microseconds: words are looked up in a table, and a pattern of phrases runs only if a word is
there that each of them holds one of. No pattern may start with a repetition that is not anchored: its time would grow
with the square of the text.
"""

from __future__ import annotations

import re

_WORDS = {
    "proof": (
        "prove proving proof proofs derive deriving derivation theorem theorems demuestra demuestre demostrar démontre "
        "démontrer démontrez prouve prouver prouvez beweis beweise beweisen докажи докажите пошагово"
    ),
    "build": (
        "implement implements implementing implementation optimise optimises optimising optimisation optimize "
        "optimizes optimizing optimization debug debugging refactor refactoring algorithm algorithms architect "
        "architecture implementa implementar optimiza optimizar depura depurar diseña diseñar diseñe diseñer "
        "implémente implémenter implémentez optimiser optimisez conçois implementiere implementieren optimiere "
        "optimieren entwirf entwerfe entwerfen реализуй реализуйте оптимизируй оптимизируйте спроектируй спроектируйте"
    ),
    "explain": (
        "explain explaining why compare comparing comparison contrast analyse analysing analysis analyze analyzing "
        "evaluate justify tradeoff tradeoffs design designing reason reasoning explica compara analiza explique "
        "expliquer expliquez analyser analysez pourquoi erklär erkläre vergleich vergleiche analysiere warum объясни "
        "объясните сравни сравните почему проанализируй"
    ),
    "maths": (
        "equation equations integral integrals derivative derivatives matrix matrices rational irrational prime primes "
        "probability probabilities polynomial polynomials modulo"
    ),
    "constraints": "must exactly ensure",
}
KINDS = ("proof", "build", "explain", "code", "maths", "questions", "constraints")
_KIND_OF_WORD = {word: kind for kind, words in _WORDS.items() for word in words.split()}
# These have a case: "from" is a word of every text, "FROM" is one of a query.
_CODE_WORDS = frozenset(
    {
        *("def", "class", "return", "import", "function", "const", "void", "struct", "async", "lambda"),
        *("SELECT", "FROM", "WHERE"),
    }
)

# Tasks in mathematics that are a proof or a derivation under another name.
_CALCULATION = (
    r"(?:compute|evaluate|solve|find|calculate|determine)\b[^.?!\n]{0,60}\b(?:integrals?|residues?|contour|eigenvalues?"
    r"|determinant|differential equations?|closed form|asymptotics?)"
)
_SHOW_THAT = (
    r"show that\b[^.?!\n]{0,80}\b(?:infinitely|finite(?:ly)?|converges?|diverges?|every|all|any|no|if|unique|bounded"
    r"|continuous|is|are|has|have)"
)
_CONSTRUCTION = (
    r"(?:design|build|write|create|develop)\b[^.?!\n]{0,40}\b(?:schemas?|migrations?|compilers?|parsers?|databases?"
    r"|protocols?|schedulers?|distributed|server|library|framework|pipeline)"
)
_STEPS = "step[- ]by[- ]step|paso a paso|étape par étape|schritt für schritt|passo a passo"
_CONSTRAINTS = "should not|at least|at most|without using|thread-safe|only if"
_PHRASES = tuple(
    (kind, frozenset(keys.split()), re.compile(rf"\b(?:{phrases})\b"))
    for kind, keys, phrases in (
        ("proof", "step paso étape schritt passo", _STEPS),
        ("proof", "compute evaluate solve find calculate determine", _CALCULATION),
        ("proof", "show", _SHOW_THAT),
        ("build", "design build write create develop", _CONSTRUCTION),
        ("explain", "trade detail qué", "trade-offs?|in detail|por qué"),
        ("maths", "square", "square root"),
        ("constraints", "should least most without thread only", _CONSTRAINTS),
    )
)
# Scripts that do not space their words, or not as ours do. A text of ASCII alone has none of them.
_UNSPACED = tuple(
    (kind, re.compile(words))
    for kind, words in (
        ("proof", "证明|證明|推导|推導|逐步|一步一步|証明|導出|증명|단계별|أثبت|خطوة بخطوة|सिद्ध"),
        ("build", "实现|實現|优化|優化|调试|設計|设计|算法|実装|最適化|구현|최적화|설계|صمم"),
        ("explain", "解释|解釋|比较|比較|分析|为什么|為什麼|説明|なぜ|설명|비교|분석|왜|اشرح|قارن|समझा|तुलना"),
        ("maths", "[∑∫∂√∞≤≥≠±\u00d7÷∀∃∈\u211d\u2115\u2124]|素数|方程|积分|矩阵|概率|平方根|無理数|无理数"),
        ("constraints", "必须|至少|最多|不要"),
        ("questions", "[\uff1f؟]"),
    )
)
# The look-behinds stand after the first character, so that the engine can search for that.
_CODE_SIGN = re.compile(r"```|`[^`\n]+`|\((?<=\w\()[^()\n]*\)|[=!]=|=>|->|::|[{};][ \t]*$", re.MULTILINE)
_CODE_SIGNS = ("`", "(", "{", "}", ";", "==", "!=", "=>", "->", "::")
_MATHS_SIGN = re.compile(
    r"\\(?:frac|sum|int|sqrt|lim)\b|\$[^$\n]+\$|\^|\d(?<!\w\d)(?:\d*\s*[-+*/=<>]\s*\d+\b|\d*(?:\.\d+)?\b)"
)
_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\d+[.)])[ \t]+", re.MULTILINE)
_WORD = re.compile(r"\w+")
# A question for yes or no that holds a word like "prove" asks about a proof, and for none. A request put as a question
# ("can you …") begins otherwise.
_YES_OR_NO = re.compile(r"\s*(?:do|does|did|is|are|was|were|has|have|had|should|will)\b[^.!?\n]{0,200}\?\s*")


class Scanned:
    """A text cut into words once, for all who look at them. `present` holds each word of `lowered_words` once."""

    __slots__ = ("lowered_words", "present", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = _WORD.findall(text)
        self.lowered_words = [word.lower() for word in self.words]
        self.present = frozenset(self.lowered_words)


def counts_of(scanned: Scanned) -> dict[str, int]:
    """How often a text says each kind: proof, build, explain, code, maths, constraints, questions."""
    text, present = scanned.text, scanned.present
    lowered = text.lower()
    counts = dict.fromkeys(KINDS, 0)
    for word in [word for word in scanned.lowered_words if word in _KIND_OF_WORD]:
        counts[_KIND_OF_WORD[word]] += 1
    for kind, keys, phrases in _PHRASES:
        if not present.isdisjoint(keys):
            counts[kind] += len(phrases.findall(lowered))
    if not text.isascii():
        for kind, pattern in _UNSPACED:
            counts[kind] += len(pattern.findall(lowered))
    counts["code"] += len([word for word in scanned.words if word in _CODE_WORDS])
    if any(sign in text for sign in _CODE_SIGNS):
        counts["code"] += len(_CODE_SIGN.findall(text))
    counts["maths"] += len(_MATHS_SIGN.findall(lowered))
    counts["constraints"] += len(_LIST_ITEM.findall(lowered))
    counts["questions"] += text.count("?")
    if counts["proof"] and _YES_OR_NO.fullmatch(lowered):
        counts["proof"] = 0
    return counts
