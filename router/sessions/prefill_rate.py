"""How fast each model prefills: configured, or learned from the first tokens of streamed answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Half of the weight lies on the last 34 samples: a change of load or hardware shows within minutes, one odd sample
# hardly.
_KEPT_PER_SAMPLE = 0.98
_ENOUGH_SAMPLES = 5
# The time to the first token of a shorter prefill is mostly other things.
_LEAST_TOKENS = 128


@dataclass(slots=True)
class _Totals:
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0


class PrefillRates:
    """Tokens per second by model. A configured rate is taken as it is; the others are learned.

    The estimate is a ratio of sums that decay, so long prefills, in which other costs weigh little, count most.
    """

    def __init__(self, configured: Mapping[str, float | None]) -> None:
        self._configured = dict(configured)
        self._learned = {model: _Totals() for model, rate in configured.items() if rate is None}

    def observe(self, model: str, tokens: float, seconds: float) -> None:
        """A prefill of `tokens` uncached tokens had its first answer token after `seconds`."""
        totals = self._learned.get(model)
        if totals is None or tokens < _LEAST_TOKENS or seconds <= 0:
            return
        totals.tokens = totals.tokens * _KEPT_PER_SAMPLE + tokens
        totals.seconds = totals.seconds * _KEPT_PER_SAMPLE + seconds
        totals.samples += 1

    def tokens_per_s(self, model: str) -> float | None:
        """The rate of `model`, None until enough was seen."""
        totals = self._learned.get(model)
        if totals is None:
            return self._configured.get(model)
        return totals.tokens / totals.seconds if totals.samples >= _ENOUGH_SAMPLES else None
