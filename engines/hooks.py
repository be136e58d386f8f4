"""Where Crossfill steps into SGLang's course: a request arrives, a batch is made, an answer begins.

In the scheduler process the engine of reuse is told of requests; in the process that talks HTTP, what the scheduler
says of a request becomes a response header. A hook that fails is logged and the request goes on: its prefill is dense.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import HTTPException

from cache_store.seldom import SeldomLog
from crossfill_kernels.rows import BLOCK
from engines.reuse.asked import Mode, read_asked
from engines.reuse.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engines.reuse.engine import ReuseEngine
    from engines.shadow_hooks import ShadowHooks

HEADER = "x-crossfill-reuse"
"""How a request was prefilled: a mode (none, guided, fallback), then `; name=value` pairs."""

_REFUSED = "ReuseRefused"
_REFUSED_MARK = "; refused=yes"
_SUPPORTED = "crossfill_supported"
_KEY = "crossfill"
_CALL = "call"
_SCOPE = "crossfill.reuse"
# Answers of which the header was not yet wanted; the oldest go.
_MOST_OUTCOMES = 10_000
_log = logging.getLogger("crossfill.hooks")
_failures = SeldomLog(_log, 60.0, time.monotonic)

P = ParamSpec("P")
R = TypeVar("R")


def harmless(hook: Callable[P, R]) -> Callable[P, R | None]:
    """A defect of ours must not fail a request that SGLang can serve."""

    @functools.wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            _failures.warn(f"{hook.__name__} failed, reuse goes on without it: {error!r}")
            # The process that talks HTTP has none, and no counters.
            engine: ReuseEngine | None = getattr(args[0], "engine", None)
            if engine is not None:
                engine.count_failure(hook.__name__)
            return None

    return call


class SchedulerHooks:
    """Of the process that computes. `engine` is set once the model is loaded; before that nothing is done.

    Args:
        shadow: told of what it must know; None if nothing is compared.
    """

    def __init__(self, shadow: ShadowHooks | None = None) -> None:
        self.engine: ReuseEngine | None = None
        self._shadow = shadow

    @harmless
    def after_create(self, request: Any, scheduler: Any, received: Any, *_: Any, **__: Any) -> None:
        """AFTER `Scheduler._create_generation_req`, SGLang's place for what belongs to one request."""
        if self.engine is None or (self._shadow is not None and self._shadow.claim(request)):
            return
        more = (received.mm_inputs, received.input_embeds, received.lora_id, received.session_params)
        supported = all(one is None for one in more) and received.positional_embed_overrides is None
        # Of the request's object, as a retraction has nothing else.
        setattr(request, _SUPPORTED, supported)
        asked = read_asked(request.sampling_params.custom_params)
        self.engine.arrive(request.rid, asked, request.origin_input_ids, supported=supported)
        if self._shadow is not None:
            self._shadow.give_way(scheduler)
        if asked is not None and asked.mode is Mode.REQUIRE:
            refusal = self.engine.preview(request.rid)
            if refusal is not None:
                # Refused before its prompt is computed.
                request.set_finish_with_abort(_why(refusal.value), HTTPStatus.CONFLICT, _REFUSED)

    @harmless
    def before_abort(self, scheduler: Any, abort: Any) -> None:
        """BEFORE `Scheduler.abort_request`."""
        if self.engine is None:
            return
        prefix = "" if abort.abort_all else abort.rid
        self.engine.forget_all(prefix)
        if self._shadow is not None:
            self._shadow.forget(prefix)

    @harmless
    def before_abort_output(self, scheduler: Any, abort: Any, request: Any) -> None:
        """BEFORE `Scheduler.send_abort_output`: it ends without a turn (a full queue, retracted for good)."""
        if self.engine is not None:
            self.engine.forget(request.rid)

    @harmless
    def after_retract(self, result: None, request: Any) -> None:
        """AFTER `Req.reset_for_retract`: it will be prefilled again, with what it has answered so far."""
        if self.engine is not None and not self._is_shadow(request):
            tokens = request.origin_input_ids + request.output_ids
            asked = read_asked(request.sampling_params.custom_params)
            self.engine.arrive(request.rid, asked, tokens, supported=getattr(request, _SUPPORTED, False))

    @harmless
    def before_weights(self, updater: Any, *_: Any, **__: Any) -> None:
        """BEFORE any update of the weights of a running worker: what is left from then on would bear a wrong name."""
        if self.engine is not None:
            self.engine.stop(Refusal.WEIGHTS_CHANGED)
            if self._shadow is not None:
                self._shadow.stop()

    @harmless
    def after_batch(self, forward_batch: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
        """AFTER `ForwardBatch.init_new`: the turn of these requests has come."""
        if self.engine is None or not forward_batch.forward_mode.is_extend():
            return
        self.engine.begin_batch()
        slots = batch.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices.tolist()
        for request, row, prefix in zip(batch.reqs, rows, batch.prefix_lens, strict=True):
            if self._is_shadow(request):
                continue
            total = len(request.full_untruncated_fill_ids)
            first = self.engine.is_new(request.rid)
            hops = self.engine.provenance.hops_of(slots[row, :prefix].cpu().long()) if first else 0
            refusal = self.engine.admit(request.rid, prefix, total, hops=hops)
            if not first:
                continue
            if refusal is None and self._shadow is not None:
                self._shadow.offer(request, total)
            asked = read_asked(request.sampling_params.custom_params)
            # An answer that has begun goes on, whatever a retraction made of its prompt.
            begun = bool(request.output_ids) or request.retraction_count > 0
            required = asked is not None and asked.mode is Mode.REQUIRE and not begun
            refused = required and refusal is not None and not _is_reuse(refusal, prefix)
            if request.customized_info is None:
                told = self.engine.outcome(request.rid) + (_REFUSED_MARK if refused else "")
                request.customized_info = {_KEY: [told]}
            if refused and refusal is not None:
                from sglang.srt.managers.schedule_batch import FINISH_ABORT

                request.to_finish = FINISH_ABORT(_why(refusal.value), HTTPStatus.CONFLICT, _REFUSED)

    def after_level(self, result: bool, streamer: Any, key: str) -> bool:
        """AFTER `SchedulerOutputStreamer.is_request_level_customized_info_key`: ours is told once, not once a token."""
        return result or key == _KEY

    def _is_shadow(self, request: Any) -> bool:
        return self._shadow is not None and self._shadow.is_own(request)


class AnswerHooks:
    """Of the process that talks HTTP: keeps what the scheduler said of a request until its answer begins."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, str] = OrderedDict()

    @harmless
    def after_meta_info(
        self, result: None, manager: Any, meta_info: dict[str, Any], state: Any, *_: Any, **__: Any
    ) -> None:
        """AFTER `TokenizerManager.update_request_meta_info`."""
        said = meta_info.pop(_KEY, None)
        if said:
            # Of several choices the first request computes the prompt, and has no choice to show for it.
            self._outcomes.setdefault(_call_of(state.obj) or meta_info["id"], said[0])
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
        outcome = None
        _mark_call(adapted)
        try:
            response = await answer(serving, adapted, request, raw_request)
        except HTTPException as error:
            if error.status_code != HTTPStatus.CONFLICT:
                raise
            # SGLang's own form of our refusal has a number for its type.
            response = serving.create_error_response(error.detail, _REFUSED, HTTPStatus.CONFLICT)
        finally:
            outcome = self._take(adapted)
            if outcome is not None and raw_request is not None:
                raw_request.scope[_SCOPE] = outcome
        # A stream tells of the refusal in its first event, with status 200.
        refusal = _refused_stream(adapted, outcome)
        return response if refusal is None else serving.create_error_response(refusal, _REFUSED, HTTPStatus.CONFLICT)

    def _take(self, adapted: Any) -> str | None:
        """Of the request of a call that was prefilled first; those of all others are taken out."""
        ids = adapted.rid if isinstance(adapted.rid, list) else [adapted.rid]
        taken = [outcome for one in (_call_of(adapted), *ids) if (outcome := self._outcomes.pop(one, None)) is not None]
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


def _word_of(adapted: Any) -> dict[str, Any] | None:
    """The router's word in a request as the HTTP process has it, to be changed in place."""
    params = adapted.sampling_params
    # Of several prompts or choices SGLang makes a list, in place, all of whose members are one.
    params = params[0] if isinstance(params, list) and params else params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    word = custom.get(_KEY) if isinstance(custom, dict) else None
    return word if isinstance(word, dict) else None


@harmless
def _mark_call(adapted: Any) -> None:
    """SGLang gives the requests of several choices ids of their own; what the router said goes with each of them."""
    word = _word_of(adapted)
    if word is not None:
        word[_CALL] = uuid.uuid4().hex


@harmless
def _call_of(adapted: Any) -> str | None:
    word = _word_of(adapted)
    return word.get(_CALL) if word is not None else None


def _is_reuse(refusal: Refusal, prefix: int) -> bool:
    """Whether a request that is not guided had its prompt, or most of it, in the worker's own cache."""
    return refusal is Refusal.CACHED or (refusal in {Refusal.TOO_LITTLE, Refusal.NOTHING_STORED} and prefix >= BLOCK)


@harmless
def _refused_stream(adapted: Any, outcome: str | None) -> str | None:
    """Why a stream that requires reuse is refused, from what the scheduler said of it; None if it is not."""
    word = _word_of(adapted)
    asked = read_asked({_KEY: word} if word is not None else None)
    required = asked is not None and asked.mode is Mode.REQUIRE and adapted.stream
    refused = outcome is not None and outcome.endswith(_REFUSED_MARK)
    return _why(str(outcome).partition("reason=")[2].partition(";")[0]) if required and refused else None


def _why(reason: str) -> str:
    return f"crossfill.reuse is `require`, and nothing could be reused: {reason}"
