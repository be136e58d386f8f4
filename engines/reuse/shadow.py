"""Shadow prefills: what guided requests would have been told by a dense prefill, sampled while they are served.

Of a sampled request the distribution of its first token is kept until the same prompt has been prefilled densely, which
gives the exact one. Divergences of the last so many of a sender tell whether what its calibration found still holds.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.models.interval import mean_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from engines.reuse.metrics import ReuseMetrics
    from engines.reuse.settings import ShadowSettings

_log = logging.getLogger("crossfill.reuse")

# Distributions that are kept, of 200 KB for 49,152 tokens in float32; the oldest goes.
_MOST_KEPT = 16
_OF = "shadow_of"


@dataclass
class _Kept:
    """Of a sampled request: by whose masses it was guided, and log-probabilities [V] once they are known."""

    sender: str
    told: torch.Tensor | None = None


class Shadows:
    """Compares guided requests with their shadows. All methods run on the scheduler's thread.

    Args:
        settings: how many, and what they must keep to.
        senders: of the pairs that may be used.
        metrics: counts what comes of them.
        draw: a number in [0, 1).
    """

    def __init__(
        self,
        settings: ShadowSettings,
        senders: Iterable[str],
        metrics: ReuseMetrics,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._draw = draw
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        # Shadows, and requests that they are of.
        self._shadows: OrderedDict[str, str] = OrderedDict()
        self._due: set[str] = set()
        self._found = {sender: deque[float](maxlen=settings.window) for sender in senders}
        for sender in self._found:
            metrics.tell_drifted(sender, drifted=False)

    def pick(self, request_id: str, sender: str) -> bool:
        """Whether a request that is guided gets a shadow; then its distribution will be kept."""
        if self._draw() >= self._settings.share:
            return False
        self._kept[request_id] = _Kept(sender)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
            self._metrics.count_shadow("dropped")
        return True

    def expect(self, request_id: str, custom_params: Mapping[str, object] | None) -> None:
        """A request arrived; remembers whose shadow it is, if the process that talks HTTP said so."""
        word = (custom_params or {}).get("crossfill")
        of = word.get(_OF) if isinstance(word, dict) else None
        if isinstance(of, str):
            self._shadows[request_id] = of
            while len(self._shadows) > _MOST_KEPT:
                self._shadows.popitem(last=False)

    def note_last_chunk(self, request_id: str) -> None:
        """The batch that is computed next has the end of this prompt."""
        if request_id in self._kept or request_id in self._shadows:
            self._due.add(request_id)

    def is_due(self, request_id: str) -> bool:
        """Whether `look` wants what the batch says after this request's prompt."""
        return request_id in self._due

    def look(self, request_id: str, logits: torch.Tensor) -> str | None:
        """Take logits [V] of the first token after a prompt; the sender that has drifted, if that is known by it."""
        self._due.discard(request_id)
        told = logits.detach().float().log_softmax(dim=-1).cpu()
        if request_id in self._kept:
            self._kept[request_id].told = told
            return None
        of = self._shadows.pop(request_id, None)
        kept = self._kept.pop(of, None) if of is not None else None
        if kept is None or kept.told is None or kept.told.shape != told.shape:
            return None
        return self._compare(kept.sender, told, kept.told)

    def forget(self, prefix: str) -> None:
        """Requests whose ids begin so are gone, and nothing will be known of them."""
        for request_id in [one for one, kept in self._kept.items() if kept.told is None and one.startswith(prefix)]:
            del self._kept[request_id]
        for request_id in [one for one in self._shadows if one.startswith(prefix)]:
            del self._shadows[request_id]
        self._due = {one for one in self._due if not one.startswith(prefix)}

    def _compare(self, sender: str, exact: torch.Tensor, guided: torch.Tensor) -> str | None:
        possible = exact.isfinite()
        divergence = float((exact.exp() * (exact - guided))[possible].sum().clamp(min=0))
        self._metrics.count_shadow("compared")
        self._metrics.count_shadowed(sender, divergence, agrees=bool(exact.argmax() == guided.argmax()))
        found = self._found.get(sender)
        if found is None:
            return None
        found.append(divergence)
        return sender if self._has_drifted(sender, found) else None

    def _has_drifted(self, sender: str, found: deque[float]) -> bool:
        if len(found) < self._settings.window:
            return False
        # The end of the interval that speaks for the pair: a few bad ones are chance.
        low = mean_interval(list(found)).low
        if not low > self._settings.max_divergence:
            return False
        del self._found[sender]
        self._metrics.tell_drifted(sender, drifted=True)
        _log.error(
            "quality has drifted: of the last %d shadow prefills the divergence from dense ones is %.4f nats on "
            "average, and surely more than %g; nothing is taken from %s until this worker is started again",
            self._settings.window,
            statistics.fmean(found),
            self._settings.max_divergence,
            sender,
        )
        return True
