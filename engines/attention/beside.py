"""Reuse beside one of SGLang's own attention backends, for GPUs: it computes every batch of which nothing is reused.

Written against SGLang's interface and run with SGLang's `torch_native` on a CPU; no GPU has run it yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from crossfill_kernels import dispatch
from crossfill_kernels.rows import newest_rows
from engines.attention.backend import check_layers, check_pool, make_mapped_forward
from engines.metrics import AttentionMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from engines.reuse.chunk import Chunk
    from engines.reuse.engine import ReuseEngine


class Beside:
    """Takes the place of two methods of another backend, and calls them where nothing is planned.

    Args:
        runner: SGLang's model runner.
        reuse: what plans prefills.

    Raises:
        UnsupportedModelError: a layer of the model asks for what the kernels do not compute.
    """

    def __init__(self, runner: Any, reuse: ReuseEngine, metrics: AttentionMetrics | None = None) -> None:
        self._last_layer = check_layers(runner.model)
        check_pool(runner)
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self._reuse = reuse
        self._metrics = metrics or AttentionMetrics()
        self._maps = make_mapped_forward(self._pool, reuse)
        self._chunks: tuple[Chunk, ...] = ()
        self._plan: Callable[[Any], None] | None = None
        self._extend: Callable[..., torch.Tensor] | None = None

    def attach(self, backend: Any) -> None:
        """Have `backend` ask here first. Everything else of it, CUDA graphs of decodes included, stays as it is."""
        self._plan, self._extend = backend.init_forward_metadata, backend.forward_extend
        backend.init_forward_metadata = self.init_forward_metadata
        backend.forward_extend = self.forward_extend
        # The plan is made from the host copies of the lengths.
        backend.needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the batch as the other backend does, and its reuse."""
        assert self._plan is not None
        self._plan(forward_batch)
        mode, self._chunks = forward_batch.forward_mode, ()
        if self._maps is not None:
            self._maps.begin(())
        if mode.is_idle():
            return
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens_cpu
        if mode.is_decode():
            self._reuse.note_decode(self._req_to_token, requests, lengths)
            return
        planned = zip(
            forward_batch.rids, requests.tolist(), lengths.tolist(), forward_batch.extend_seq_lens_cpu, strict=True
        )
        self._chunks = tuple(
            self._reuse.chunk(request_id, newest_rows(new, length), self._req_to_token[request, :length])
            for request_id, request, length, new in planned
        )
        if self._maps is not None:
            self._maps.begin(self._chunks)

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
        """Attention of the new rows of every request; arguments and result as SGLang's backends have them."""
        assert self._extend is not None
        if any(self._reuse.layers.concerns(chunk, layer.layer_id) for chunk in self._chunks) and not extras:
            out = self._reused(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache)
        else:
            out = self._extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **extras)
        if layer.layer_id == self._last_layer:
            self._metrics.count_kernels(dispatch.calls())
            for chunk in self._chunks:
                self._reuse.computed(chunk)
        return out

    def _reused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, *, save_kv_cache: bool
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = (get(layer.layer_id) for get in (self._pool.get_key_buffer, self._pool.get_value_buffer))
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out, start = torch.zeros_like(query), 0
        for chunk in self._chunks:
            own = slice(start, start + chunk.rows.count)
            attend = self._reuse.layers.attend
            attend(chunk, layer.layer_id, query[own], keys, values, scale=layer.scaling, out=out[own])
            start = own.stop
        return out.view(q.shape[0], -1)
