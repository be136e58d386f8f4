"""Reuse beside another backend, which here is a few lines of torch that count their calls."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import newest_rows
from engines import torchvision_stub

torchvision_stub.install()

from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from engines.attention.beside import Beside  # noqa: E402
from engines.metrics import AttentionMetrics  # noqa: E402

from .test_backend import CAPACITY, DIM, HEADS, KV_HEADS, Pool, batch, layer  # noqa: E402


class Inner:
    """Another backend: attention of every request, without any plan but the lengths."""

    needs_cpu_seq_lens = False

    def __init__(self, pool, slots):
        self.pool, self.slots, self.plans, self.calls = pool, slots, 0, 0

    def init_forward_metadata(self, forward_batch):
        self.plans += 1

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **extras):
        self.calls += 1
        self.pool.set_kv_buffer(layer, SimpleNamespace(loc=forward_batch.out_cache_loc), k, v)
        outs, start = [], 0
        requests = zip(
            forward_batch.req_pool_indices, forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True
        )
        for request, length, new in requests:
            query = q[start : start + new].view(new, HEADS, DIM)
            where, rows = self.slots[request, :length].long(), newest_rows(new, int(length))
            outs.append(paged_attention_reference(query, self.pool.keys, self.pool.values, where, rows, scale=0.3))
            start += new
        return torch.cat(outs).view(q.shape[0], -1)


class Engine:
    """Plans nothing, or says of every chunk that it concerns it and computes it by the reference."""

    uses_maps = False

    def __init__(self, concerned):
        self.layers = self
        self.concerned, self.attended, self.done, self.decoded = concerned, 0, [], []

    def note_decode(self, req_to_token, requests, lengths):
        self.decoded.append((req_to_token, requests.tolist(), lengths.tolist()))

    def chunk(self, request_id, rows, slots):
        return SimpleNamespace(request_id=request_id, rows=rows, slots=slots.long())

    def concerns(self, chunk, layer):
        return chunk.request_id in self.concerned

    def attend(self, chunk, layer, query, keys, values, *, scale, out):
        self.attended += 1
        out.copy_(paged_attention_reference(query, keys, values, chunk.slots, chunk.rows, scale=scale))

    def computed(self, chunk):
        self.done.append(chunk.request_id)


@pytest.fixture
def bench():
    slots = torch.randperm(CAPACITY, generator=torch.Generator().manual_seed(1)).view(3, 32).int()
    model = torch.nn.Module()
    model.attention = layer()
    pool = Pool()
    runner = SimpleNamespace(
        model=model,
        dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        token_to_kv_pool=pool,
    )
    return SimpleNamespace(runner=runner, slots=slots, pool=pool, layer=model.attention)


def run(bench, engine):
    inner = Inner(bench.pool, bench.slots)
    Beside(bench.runner, engine, AttentionMetrics(CollectorRegistry())).attach(inner)
    forward = batch(bench, ForwardMode.EXTEND, [2, 0], [20, 30], [20, 5])
    forward.rids = ["a", "b"]
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(25, HEADS * DIM, generator=generator)
    k, v = (torch.randn(25, KV_HEADS, DIM, generator=generator) for _ in range(2))
    inner.init_forward_metadata(forward)
    return inner, inner.forward_extend(q, k, v, bench.layer, forward)


def test_a_batch_of_which_nothing_is_reused_is_the_other_backends(bench):
    inner, _ = run(bench, engine := Engine(set()))
    assert (inner.calls, inner.plans, engine.attended) == (1, 1, 0)
    assert engine.done == ["a", "b"]
    assert inner.needs_cpu_seq_lens


def test_a_batch_of_which_one_request_is_reused_gives_the_same_rows(bench):
    _, alone = run(bench, Engine(set()))
    inner, together = run(bench, engine := Engine({"b"}))
    assert (inner.calls, inner.plans, engine.attended) == (0, 1, 2)
    torch.testing.assert_close(together, alone)
    assert engine.done == ["a", "b"]


def test_a_decode_is_the_other_backends_and_its_rows_are_noted(bench):
    inner = Inner(bench.pool, bench.slots)
    engine = Engine({"a", "b"})
    Beside(bench.runner, engine, AttentionMetrics(CollectorRegistry())).attach(inner)
    forward = batch(bench, ForwardMode.DECODE, [2, 0], [20, 30], [1, 1])
    inner.init_forward_metadata(forward)
    [(table, requests, lengths)] = engine.decoded
    assert table is bench.slots
    assert (requests, lengths) == ([2, 0], [20, 30])
