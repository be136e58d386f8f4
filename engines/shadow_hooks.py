"""Shadow prefills as requests of SGLang's that the scheduler makes for itself: nobody asked, nobody hears of them.

One is made when the scheduler is idle and given up when a real request arrives. Its prompt is computed densely, since
the engine of reuse was never told of it; it finds nothing in the prefix cache and leaves nothing there, so whose prompt
it was does not matter; its one token is marked as said already, so none goes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.hooks import harmless

if TYPE_CHECKING:
    from engines.reuse.engine import ReuseEngine
    from engines.reuse.shadow import Shadow, ShadowPrefill

# No router makes this namespace, and nothing is ever kept in it.
_NAMESPACE = "crossfill-shadow"


class ShadowHooks:
    """Of the process that computes. `shadow` is set once the model is loaded, if the settings want it."""

    def __init__(self) -> None:
        self.engine: ReuseEngine | None = None
        self.shadow: Shadow | None = None

    @harmless
    def before_idle(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """BEFORE `Scheduler.on_idle`: the scheduler found nothing to compute."""
        if self.shadow is None or not self.shadow.has_work or not scheduler.is_fully_idle():
            return
        prefill = self.shadow.begin()
        if prefill is not None:
            scheduler.handle_generate_request(_request_of(prefill))

    @harmless
    def before_sample(self, runner: Any, logits_output: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        """BEFORE `ModelRunner.sample`, which changes logits in place."""
        if self.shadow is None or not self.shadow.wants_logits or not forward_batch.forward_mode.is_extend():
            return
        lengths = forward_batch.seq_lens_cpu.tolist()
        for row, (request_id, length) in enumerate(zip(forward_batch.rids, lengths, strict=True)):
            self.shadow.take(request_id, length, logits_output.next_token_logits[row])

    def claim(self, request: Any) -> bool:
        """Whether a request that SGLang has just made is a shadow prefill; it then leaves no trace."""
        if not self.is_own(request):
            return False
        request.finished_output = True
        request.skip_radix_cache_insert = True
        return True

    def is_own(self, request: Any) -> bool:
        """Whether a request is a shadow prefill."""
        return self.shadow is not None and self.shadow.is_own(request.rid)

    def give_way(self, scheduler: Any) -> None:
        """A real request arrived: give up the shadow prefill that waits or is between two chunks."""
        if self.shadow is None or self.shadow.running is None:
            return
        from sglang.srt.managers.io_struct import AbortReq

        # Our hook on this tells `shadow`.
        scheduler.abort_request(AbortReq(rid=self.shadow.running))

    def offer(self, request: Any, total: int) -> None:
        """The first chunk of a guided request is about to be computed, of `total` tokens."""
        if self.shadow is None or self.engine is None or request.is_prefill_only:
            return
        sender = self.engine.sender_of(request.rid)
        if sender is not None:
            self.shadow.offer(request.rid, request.full_untruncated_fill_ids[:total], sender)

    def forget(self, prefix: str) -> None:
        """Requests whose ids begin so are aborted."""
        if self.shadow is not None:
            self.shadow.forget(prefix)

    def stop(self) -> None:
        """The worker's weights change."""
        if self.shadow is not None:
            self.shadow.stop()


def _request_of(prefill: ShadowPrefill) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    # Nothing of it depends on a tokenizer: there are no stop strings.
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=prefill.request_id,
        input_text="",
        input_ids=prefill.tokens,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=_NAMESPACE,
    )
