"""Shadow prefill: some guided prompts are prefilled densely afterwards, when nobody waits, and both are compared."""

from __future__ import annotations

import logging
import random
import time
import uuid
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.reuse.drift import DriftWindow, compare
from engines.reuse.shadow_metrics import Dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from engines.reuse.settings import ShadowSettings
    from engines.reuse.shadow_metrics import ShadowMetrics

_log = logging.getLogger("crossfill.reuse")

# Drawn requests that are held with their tokens and a row of logits; more are dropped.
_MOST_HELD = 16
_MOST_AGE_S = 600.0
# A prefill that real requests interrupt begins from its first token again.
_MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class ShadowPrefill:
    """A prompt that is to be prefilled densely.

    Attributes:
        request_id: of the prefill itself.
        tokens: of the prompt.
    """

    request_id: str
    tokens: array[int]


@dataclass(slots=True)
class _Drawn:
    """A guided request that is to be compared; `guided` are its logits [V] on the host once its prefill has ended."""

    tokens: array[int]
    sender: str
    drawn_s: float
    guided: torch.Tensor | None = None
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Running:
    prefill: ShadowPrefill
    drawn: _Drawn
    begun_s: float


class Shadow:
    """Draws guided requests, hands out their prompts when the worker is idle, and watches what comparisons say.

    All methods run on the scheduler's thread, and none waits.

    Args:
        senders: of the worker's pairs.
        exclude: called once with a sender whose pair has drifted.
        draw: a number in [0, 1).
    """

    def __init__(
        self,
        settings: ShadowSettings,
        senders: Iterable[str],
        metrics: ShadowMetrics,
        exclude: Callable[[str], None],
        *,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._exclude = exclude
        self._draw = draw
        self._clock = clock
        # A pair that has drifted has no window any more.
        self._windows = {sender: DriftWindow(settings.max_divergence, settings.window) for sender in senders}
        # Whose prefill goes on, by request; then those that wait for an idle worker.
        self._guided: OrderedDict[str, _Drawn] = OrderedDict()
        self._waiting: deque[_Drawn] = deque()
        self._running: _Running | None = None
        # Nobody who asks a worker can guess what its own requests are called.
        self._prefix = f"crossfill-shadow-{uuid.uuid4().hex}-"
        self._number = 0

    @property
    def running(self) -> str | None:
        """Request id of the shadow prefill that was handed out and has not ended."""
        return self._running.prefill.request_id if self._running else None

    @property
    def has_work(self) -> bool:
        """Whether an idle worker should ask for a prefill."""
        return bool(self._waiting) or self._running is not None

    @property
    def wants_logits(self) -> bool:
        """Whether `take` may have use for any."""
        return bool(self._guided) or self._running is not None

    def is_own(self, request_id: str) -> bool:
        """Whether a request is a shadow prefill, even one that was given up."""
        return request_id.startswith(self._prefix)

    def offer(self, request_id: str, tokens: Sequence[int], sender: str) -> None:
        """The prefill of a request begins, guided by `sender`: perhaps it is drawn."""
        if sender not in self._windows or self._draw() >= self._settings.share:
            return
        self._expire()
        if len(tokens) > self._settings.max_tokens:
            self._metrics.count_dropped(Dropped.TOO_LONG)
        elif len(self._guided) + len(self._waiting) + (self._running is not None) >= _MOST_HELD:
            self._metrics.count_dropped(Dropped.QUEUE_FULL)
        else:
            self._guided[request_id] = _Drawn(array("q", tokens), sender, self._clock())

    def take(self, request_id: str, length: int, logits: torch.Tensor) -> None:
        """A chunk is computed.

        Args:
            request_id: of any request.
            length: positions that it has now.
            logits: [V], after the last of them; copied if they are wanted.
        """
        running = self._running
        if running is not None and request_id == running.prefill.request_id:
            if length == len(running.prefill.tokens):
                self._running = None
                self._compare(running, _on_host(logits))
            return
        drawn = self._guided.get(request_id)
        if drawn is not None and length == len(drawn.tokens):
            del self._guided[request_id]
            drawn.guided = _on_host(logits)
            self._waiting.append(drawn)

    def begin(self) -> ShadowPrefill | None:
        """The worker is idle: what it is to prefill densely, reading and leaving nothing; None for nothing."""
        if self._running is not None:
            # An idle worker has ended it, and there were no logits of the whole prompt.
            self._metrics.count_dropped(Dropped.FAILED)
            self._running = None
        self._expire()
        if not self._waiting:
            return None
        drawn = self._waiting.popleft()
        drawn.tries += 1
        self._number += 1
        prefill = ShadowPrefill(f"{self._prefix}{self._number}", drawn.tokens)
        self._running = _Running(prefill, drawn, self._clock())
        return prefill

    def forget(self, prefix: str) -> None:
        """Requests whose ids begin so are aborted; the shadow prefill itself is tried again, but not for ever."""
        for request_id in [one for one in self._guided if one.startswith(prefix)]:
            del self._guided[request_id]
            self._metrics.count_dropped(Dropped.ABORTED)
        running = self._running
        if running is None or not running.prefill.request_id.startswith(prefix):
            return
        self._running = None
        if running.drawn.tries < _MOST_TRIES:
            self._waiting.appendleft(running.drawn)
        else:
            self._metrics.count_dropped(Dropped.BUSY)

    def stop(self) -> None:
        """The worker's weights change: what was drawn cannot be compared, and nothing more is drawn."""
        self._windows.clear()
        for _ in range(len(self._guided) + len(self._waiting) + (self._running is not None)):
            self._metrics.count_dropped(Dropped.WEIGHTS_CHANGED)
        self._guided.clear()
        self._waiting.clear()
        self._running = None

    def _compare(self, running: _Running, dense: torch.Tensor) -> None:
        drawn = running.drawn
        assert drawn.guided is not None
        comparison = compare(dense, drawn.guided)
        if comparison is None:
            self._metrics.count_dropped(Dropped.FAILED)
            _log.warning("a shadow prefill of %d tokens: logits are no numbers", len(drawn.tokens))
            return
        self._metrics.count_compared(drawn.sender, comparison, self._clock() - running.begun_s)
        window = self._windows.get(drawn.sender)
        verdict = window.add(comparison) if window is not None else None
        if verdict is None or not verdict.drifted:
            return
        del self._windows[drawn.sender]
        self._exclude(drawn.sender)
        self._metrics.note_drifted(drawn.sender)
        _log.error(
            "nothing is taken from %s until this worker is started again: answers have drifted. Of the last %d shadow "
            "prefills the mean KL divergence is %.4f nats, at least %.4f with 95 %% confidence, and may be %.4f; the "
            "most likely token is the same in %.0f %%",
            drawn.sender,
            self._settings.window,
            verdict.mean,
            verdict.low,
            self._settings.max_divergence,
            100 * verdict.agreement,
        )

    def _expire(self) -> None:
        oldest_s = self._clock() - _MOST_AGE_S
        late = [request_id for request_id, drawn in self._guided.items() if drawn.drawn_s < oldest_s]
        for request_id in late:
            del self._guided[request_id]
        kept = [drawn for drawn in self._waiting if drawn.drawn_s >= oldest_s]
        for _ in range(len(late) + len(self._waiting) - len(kept)):
            self._metrics.count_dropped(Dropped.LATE)
        self._waiting = deque(kept)


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    import torch

    # Sampling works on these in place.
    return logits.detach().to("cpu", torch.float32, copy=True)
