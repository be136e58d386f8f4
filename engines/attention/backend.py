"""SGLang attention backend on `crossfill_kernels`; `forward_extend` and `forward_decode` are called once a layer."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from crossfill_kernels import dispatch
from crossfill_kernels.native import library
from crossfill_kernels.paged_attention import Slots, as_slots, paged_attention
from crossfill_kernels.rows import Rows, newest_rows
from engines.attention import mapped
from engines.errors import UnsupportedModelError
from engines.metrics import AttentionMetrics

if TYPE_CHECKING:
    from engines.reuse.chunk import Chunk
    from engines.reuse.engine import ReuseEngine

_WAY_OUT = "start this worker with --attention-backend torch_native"


@dataclass(frozen=True)
class _Sequence:
    """One request's rows [start, stop) of a batch, their positions, and where its context stands in the KV pool.

    `chunk` says how they are computed if reuse is on; None for a decode.
    """

    start: int
    stop: int
    rows: Rows
    slots: Slots
    chunk: "Chunk | None" = None


class CrossfillAttentionBackend(AttentionBackend):  # type: ignore[misc]  # SGLang is untyped
    """Causal attention over SGLang's paged KV pool that computes only the new rows of each request.

    Args:
        runner: SGLang's model runner, whose model is loaded and whose pools exist.
        reuse: what plans prefills with the help of other models; None if this worker has no part in that.

    Raises:
        UnsupportedModelError: a layer of the model asks for what this backend does not compute.
    """

    # The plan below is made from the host copies of the lengths.
    needs_cpu_seq_lens = True

    def __init__(
        self, runner: Any, metrics: AttentionMetrics | None = None, *, reuse: "ReuseEngine | None" = None
    ) -> None:
        super().__init__()
        self._last_layer = check_layers(runner.model)
        check_pool(runner)
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self._metrics = metrics or AttentionMetrics()
        self._reuse = reuse
        # Opened here, a missing library is warned about at start and not in the first request.
        library.load()
        self._maps = make_mapped_forward(self._pool, reuse)
        self._plan: tuple[_Sequence, ...] = ()
        self._phase, self._seconds = "extend", 0.0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Find every request's rows and cache slots, once a forward pass and not once a layer."""
        mode = forward_batch.forward_mode
        if self._maps is not None:
            self._maps.begin(())
        if mode.is_idle():
            self._plan = ()
            return
        lengths = forward_batch.seq_lens_cpu.tolist()
        rows = [1] * len(lengths) if mode.is_decode() else forward_batch.extend_seq_lens_cpu
        plan, start = [], 0
        ids = forward_batch.rids if self._reuse is not None and not mode.is_decode() else [None] * len(lengths)
        for request, request_id, length, new in zip(
            forward_batch.req_pool_indices.tolist(), ids, lengths, rows, strict=True
        ):
            slots, own = self._req_to_token[request, :length], newest_rows(new, length)
            chunk = None if self._reuse is None or request_id is None else self._reuse.chunk(request_id, own, slots)
            plan.append(_Sequence(start, start + new, own, chunk.slots if chunk else as_slots(slots), chunk))
            start += new
        if self._reuse is not None and mode.is_decode():
            self._reuse.note_decode(self._req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens_cpu)
        self._plan = tuple(plan)
        if self._maps is not None:
            self._maps.begin(s.chunk for s in plan if s.chunk is not None)
        self._phase, self._seconds = "decode" if mode.is_decode() else "extend", 0.0
        self._metrics.rows.labels(self._phase).inc(start)
        self._metrics.passes.labels(self._phase).inc()

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        """Attention of the new rows of every request in the batch.

        Args:
            q: [rows, H·d]; the requests' new rows, one request after the other.
            k, v: [rows, H_kv, d]; written to the KV pool first. None where another layer has already written them.
            layer: the RadixAttention module that calls.
            forward_batch: the batch that `init_forward_metadata` saw.
            save_kv_cache: False when the keys and values already stand in the pool.

        Returns:
            [rows, H·d].

        Raises:
            UnsupportedModelError: the layer passes extras (attention sinks, say) that would change the result.
        """
        if extras:
            raise UnsupportedModelError(f"layer {layer.layer_id} passes {', '.join(extras)} to attention; {_WAY_OUT}")
        started_s = time.perf_counter()
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys = self._pool.get_key_buffer(layer.layer_id)
        values = self._pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # Rows that no request owns (padding of the batch) stay zero rather than whatever memory held.
        out = torch.empty_like(query) if self._rows == query.shape[0] else torch.zeros_like(query)
        for s in self._plan:
            own = slice(s.start, s.stop)
            if s.chunk is None or self._reuse is None:
                paged_attention(query[own], keys, values, s.slots, s.rows, scale=layer.scaling, out=out[own])
            else:
                attend = self._reuse.layers.attend
                attend(s.chunk, layer.layer_id, query[own], keys, values, scale=layer.scaling, out=out[own])
        self._seconds += time.perf_counter() - started_s
        if layer.layer_id == self._last_layer:
            self._finish_pass()
        return out.view(q.shape[0], -1)

    # A decode is an extend of one row a request: the plan already says so.
    forward_decode = forward_extend

    def _finish_pass(self) -> None:
        if self._maps is not None:
            self._seconds += self._maps.seconds
            self._maps.seconds = 0.0
        self._metrics.seconds.labels(self._phase).inc(self._seconds)
        self._metrics.count_kernels(dispatch.calls())
        if self._reuse is not None:
            for s in self._plan:
                if s.chunk is not None:
                    self._reuse.computed(s.chunk)

    def support_triton(self) -> bool:
        """No Triton on this path: SGLang then takes its PyTorch forms of index bookkeeping."""
        return False

    @property
    def _rows(self) -> int:
        return self._plan[-1].stop if self._plan else 0


def make_mapped_forward(pool: Any, reuse: "ReuseEngine | None") -> mapped.MappedForward | None:
    """What models ask that can do without queries (`engines.mapped_models`); None if this worker uses no maps."""
    if reuse is None or not reuse.uses_maps:
        mapped.set_current(None)
        return None
    device = pool.get_value_buffer(0).device
    aside = mapped.SideStream(device) if device.type == "cuda" else mapped.AtOnce()
    forward = mapped.MappedForward(pool, reuse.layers, aside)
    mapped.set_current(forward)
    return forward


def check_pool(runner: Any) -> None:
    """Refuse a KV pool of another type than the queries, at start and not at the first request."""
    pool, queries = runner.token_to_kv_pool.dtype, runner.dtype
    if pool != queries:
        raise UnsupportedModelError(
            f"the KV cache is {pool} and the model {queries}, which must be equal here; {_WAY_OUT}"
        )


def check_layers(model: torch.nn.Module) -> int:
    """Refuse a model whose attention is not plain causal self-attention.

    Returns:
        The number of the model's last attention layer, -1 if it has none.

    Raises:
        UnsupportedModelError: names the first layer at fault, what it asks for, and the way out.
    """
    last = -1
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        if reason := _unsupported(layer):
            raise UnsupportedModelError(
                f"layer {name} uses {reason}, which the crossfill attention backend does not compute; {_WAY_OUT}"
            )
        last = max(last, layer.layer_id)
    return last


def _unsupported(layer: Any) -> str | None:
    """What `layer` asks for beyond plain causal self-attention; None if nothing."""
    window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
    asked = {
        "cross-attention": layer.is_cross_attention,
        f"{layer.attn_type} attention": layer.attn_type != AttentionType.DECODER,
        f"a sliding window of {window} tokens": window > -1,
        f"a logit cap of {layer.logit_cap}": layer.logit_cap,
        "interleaved local attention": layer.use_irope,
        "a temperature that depends on the position": layer.xai_temperature_len > 0,
        f"positions of the kind {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"values of {layer.v_head_dim} beside keys of {layer.qk_head_dim} dimensions": (
            layer.v_head_dim != layer.qk_head_dim
        ),
    }
    return next((reason for reason, is_so in asked.items() if is_so), None)
