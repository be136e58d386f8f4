"""Where Crossfill steps into SGLang's course: a request arrives, a batch is made, an answer begins.

In the scheduler process the engine of reuse is told of requests; in the process that talks HTTP, what the scheduler
says of a request becomes a response header. A hook that fails is logged and the request goes on: its prefill is dense.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cache_store.seldom import SeldomLog
from engines.reuse.asked import Mode, read_asked
from engines.reuse.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engines.reuse.engine import ReuseEngine

HEADER = "x-crossfill-reuse"
"""How a request was prefilled: a mode (none, guided, fallback), then `; name=value` pairs."""

_REFUSED = "ReuseRefused"
_KEY = "crossfill"
_SCOPE = "crossfill.reuse"
# Answers of which the header was not yet wanted; the oldest go.
_MOST_OUTCOMES = 10_000
_log = logging.getLogger("crossfill.hooks")
_failures = SeldomLog(_log, 60.0, time.monotonic)

P = ParamSpec("P")
R = TypeVar("R")


def _harmless(hook: Callable[P, R]) -> Callable[P, R | None]:
    """A defect of ours must not fail a request that SGLang can serve."""

    @functools.wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            _failures.warn(f"{hook.__name__} failed, reuse goes on without it: {error!r}")
            return None

    return call


class SchedulerHooks:
    """Of the process that computes. `engine` is set once the model is loaded; before that nothing is done."""

    def __init__(self) -> None:
        self.engine: ReuseEngine | None = None

    @_harmless
    def after_create(self, request: Any, scheduler: Any, received: Any, *_: Any, **__: Any) -> None:
        """AFTER `Scheduler._create_generation_req`, SGLang's place for what belongs to one request."""
        if self.engine is None:
            return
        more = (received.mm_inputs, received.input_embeds, received.lora_id, received.session_params)
        supported = all(one is None for one in more) and received.positional_embed_overrides is None
        asked = read_asked(request.sampling_params.custom_params)
        self.engine.arrive(request.rid, asked, request.origin_input_ids, supported=supported)
        if asked is not None and asked.mode is Mode.REQUIRE:
            refusal = self.engine.preview(request.rid)
            if refusal is not None:
                # Refused before its prompt is computed.
                request.set_finish_with_abort(_why(refusal.value), HTTPStatus.CONFLICT, _REFUSED)

    @_harmless
    def before_abort(self, scheduler: Any, abort: Any) -> None:
        """BEFORE `Scheduler.abort_request`."""
        if self.engine is not None:
            self.engine.forget_all("" if abort.abort_all else abort.rid)

    @_harmless
    def after_retract(self, result: None, request: Any) -> None:
        """AFTER `Req.reset_for_retract`: it will be prefilled again, with what it has answered so far."""
        if self.engine is not None:
            tokens = request.origin_input_ids + request.output_ids
            self.engine.arrive(request.rid, read_asked(request.sampling_params.custom_params), tokens)

    @_harmless
    def before_weights(self, updater: Any, *_: Any, **__: Any) -> None:
        """BEFORE any update of the weights of a running worker: what is left from then on would bear a wrong name."""
        if self.engine is not None:
            self.engine.stop(Refusal.WEIGHTS_CHANGED)

    @_harmless
    def after_batch(self, forward_batch: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
        """AFTER `ForwardBatch.init_new`: the turn of these requests has come."""
        if self.engine is None or not forward_batch.forward_mode.is_extend():
            return
        for request, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            total = len(request.full_untruncated_fill_ids)
            first = self.engine.is_new(request.rid)
            refusal = self.engine.admit(request.rid, prefix, total)
            if not first:
                continue
            if request.customized_info is None:
                request.customized_info = {_KEY: [self.engine.outcome(request.rid)]}
            asked = read_asked(request.sampling_params.custom_params)
            if refusal is not None and asked is not None and asked.mode is Mode.REQUIRE:
                from sglang.srt.managers.schedule_batch import FINISH_ABORT

                request.to_finish = FINISH_ABORT(_why(refusal.value), HTTPStatus.CONFLICT, _REFUSED)


class AnswerHooks:
    """Of the process that talks HTTP: keeps what the scheduler said of a request until its answer begins."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, str] = OrderedDict()

    @_harmless
    def after_meta_info(self, result: None, manager: Any, meta_info: dict[str, Any], *_: Any, **__: Any) -> None:
        """AFTER `TokenizerManager.update_request_meta_info`."""
        said = meta_info.pop(_KEY, None)
        if said:
            self._outcomes[meta_info["id"]] = said[0]
            if len(self._outcomes) > _MOST_OUTCOMES:
                self._outcomes.popitem(last=False)

    async def around_answer(
        self,
        answer: Callable[[Any, Any, Any, Any], Awaitable[Any]],
        serving: Any,
        adapted: Any,
        request: Any,
        raw_request: Any,
    ) -> Any:
        """AROUND the handlers of a chat completion or a completion, streamed or not."""
        try:
            response = await answer(serving, adapted, request, raw_request)
        finally:
            outcome = self._take(adapted.rid)
            if outcome is not None and raw_request is not None:
                raw_request.scope[_SCOPE] = outcome
        refused = outcome is not None and not outcome.startswith("guided")
        asked = read_asked(getattr(adapted, "sampling_params", None) and adapted.sampling_params.get("custom_params"))
        if refused and asked is not None and asked.mode is Mode.REQUIRE and adapted.stream:
            # A stream would tell of the refusal in its first event, with status 200.
            reason = str(outcome).partition("reason=")[2]
            return serving.create_error_response(_why(reason), _REFUSED, HTTPStatus.CONFLICT)
        return response

    def _take(self, request_ids: Any) -> str | None:
        """Of the first request of a call; all of them are taken out."""
        ids = request_ids if isinstance(request_ids, list) else [request_ids]
        taken = [outcome for one in ids if (outcome := self._outcomes.pop(one, None)) is not None]
        return taken[0] if taken else None


class ReuseHeader:
    """ASGI middleware: sets the response header of answers whose outcome is known."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start" and _SCOPE in scope:
                headers = [*message["headers"], (HEADER.encode(), scope[_SCOPE].encode("latin-1", "replace"))]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_on)


def _why(reason: str) -> str:
    return f"crossfill.reuse is `require`, and nothing could be reused: {reason}"
