"""The expected cost of a request, from its text and its limits alone: enough to weigh models against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.config import CostConfig
    from router.decision.features import Features
    from router.request.generation import GenerationRequest

# Four characters of a spaced script, or one of a dense script, per token; `Features` counts in words.
_TOKENS_PER_WORD = 1.5

# Between the mean answers of two production traces: 253 tokens (Azure, 2023) and 350 (Mooncake, 2024).
_EXPECTED_ANSWER_TOKENS = 300

_PRICED_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that a request is expected to take in and to give back."""

    prompt: float
    output: float

    def cost(self, price: CostConfig) -> float:
        """In the unit of `price`; nine decimals are kept, so that logged decisions stay short."""
        return round((self.prompt * price.input + self.output * price.output) / _PRICED_TOKENS, 9)


def expected_tokens(features: Features, request: GenerationRequest) -> ExpectedTokens:
    """An estimate from the words of the text, and from the answer's limit where that is below the usual length."""
    output = min(_EXPECTED_ANSWER_TOKENS, request.answer_limit_tokens or _EXPECTED_ANSWER_TOKENS)
    words = features.words + features.context_words
    return ExpectedTokens(prompt=_TOKENS_PER_WORD * words, output=output * request.choices)
