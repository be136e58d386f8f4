"""The backend alone, on a hand-made runner: its plan, its refusals, its counters. Real workers are in tests/e2e."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry

from crossfill_kernels import dispatch
from crossfill_kernels.paged_attention import paged_attention_reference
from crossfill_kernels.rows import newest_rows
from engines import torchvision_stub

torchvision_stub.install()

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from engines.attention.backend import CrossfillAttentionBackend, check_layers  # noqa: E402
from engines.errors import UnsupportedModelError  # noqa: E402
from engines.metrics import AttentionMetrics  # noqa: E402

HEADS, KV_HEADS, DIM, CAPACITY = 6, 2, 16, 96


class Pool:
    """The part of SGLang's KV pool that a backend uses."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.dtype = torch.float32
        self.keys = torch.randn(CAPACITY, KV_HEADS, DIM, generator=generator)
        self.values = torch.randn(CAPACITY, KV_HEADS, DIM, generator=generator)

    def set_kv_buffer(self, layer, loc_info, k, v):
        self.keys[loc_info.loc], self.values[loc_info.loc] = k, v

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


def layer(**changes):
    return RadixAttention(
        **{"num_heads": HEADS, "head_dim": DIM, "scaling": 0.3, "num_kv_heads": KV_HEADS, "layer_id": 0, **changes}
    )


@pytest.fixture
def bench():
    slots = torch.randperm(CAPACITY, generator=torch.Generator().manual_seed(1)).view(3, 32).int()
    model = torch.nn.Module()
    model.attention = layer()
    runner = SimpleNamespace(
        model=model,
        dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        token_to_kv_pool=Pool(),
    )
    registry = CollectorRegistry()
    backend = CrossfillAttentionBackend(runner, AttentionMetrics(registry))
    return SimpleNamespace(
        backend=backend, slots=slots, pool=runner.token_to_kv_pool, layer=model.attention, registry=registry
    )


def batch(bench, mode, requests, lengths, rows):
    locations = [bench.slots[r, n - k : n] for r, n, k in zip(requests, lengths, rows, strict=True)]
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.tensor(requests),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens_cpu=None if mode.is_decode() else rows,
        out_cache_loc=torch.cat(locations).long(),
    )


def rows_counted(bench, phase):
    return bench.registry.get_sample_value("crossfill_attention_rows_total", {"phase": phase})


def calls_counted(bench, implementation):
    labels = {"op": "paged_attention", "implementation": implementation}
    return bench.registry.get_sample_value("crossfill_kernel_calls_total", labels)


@pytest.mark.parametrize(
    ("mode", "rows"), [(ForwardMode.EXTEND, [12, 1, 20]), (ForwardMode.DECODE, [1, 1, 1])], ids=["extend", "decode"]
)
def test_each_request_attends_to_its_own_slots_only(bench, mode, rows):
    requests, lengths = [2, 0, 1], [12, 30, 25]
    forward = batch(bench, mode, requests, lengths, rows)
    total = sum(rows)
    native = dispatch.calls().get(("paged_attention", "native"), 0)
    q, k, v = torch.randn(total, HEADS * DIM), torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
    bench.backend.init_forward_metadata(forward)
    out = bench.backend.forward(q, k, v, bench.layer, forward)
    assert out.shape == (total, HEADS * DIM)
    start = 0
    for request, length, new in zip(requests, lengths, rows, strict=True):
        where = bench.slots[request, :length].long()
        query = q[start : start + new].view(new, HEADS, DIM)
        where_rows = newest_rows(new, length)
        want = paged_attention_reference(query, bench.pool.keys, bench.pool.values, where, where_rows, scale=0.3)
        torch.testing.assert_close(out[start : start + new].view_as(want), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(bench.pool.keys[where[-new:]], k[start : start + new])
        start += new
    phase = "decode" if mode.is_decode() else "extend"
    assert rows_counted(bench, phase) == total
    assert bench.registry.get_sample_value("crossfill_attention_seconds_total", {"phase": phase}) > 0
    assert rows_counted(bench, "extend" if phase == "decode" else "decode") is None
    assert calls_counted(bench, "native") - native == len(requests)


def test_padding_rows_stay_zero(bench):
    forward = batch(bench, ForwardMode.EXTEND, [0], [5], [5])
    bench.backend.init_forward_metadata(forward)
    out = bench.backend.forward_extend(
        torch.randn(8, HEADS * DIM), None, None, bench.layer, forward, save_kv_cache=False
    )
    assert torch.count_nonzero(out[5:]) == 0
    assert torch.count_nonzero(out[:5]) > 0


def test_the_pool_is_written_only_where_sglang_asks_for_it(bench):
    forward = batch(bench, ForwardMode.DECODE, [0], [5], [1])
    bench.backend.init_forward_metadata(forward)
    before = bench.pool.keys.clone()
    q, k, v = torch.randn(1, HEADS * DIM), torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, DIM)
    bench.backend.forward(q, k, v, bench.layer, forward, save_kv_cache=False)
    assert torch.equal(bench.pool.keys, before)
    bench.backend.forward(q, k, v, bench.layer, forward, save_kv_cache=True)
    assert not torch.equal(bench.pool.keys, before)


def test_a_kv_pool_of_another_type_is_refused_at_start(bench):
    runner = SimpleNamespace(
        model=torch.nn.Module(),
        dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=bench.slots),
        token_to_kv_pool=SimpleNamespace(dtype=torch.bfloat16),
    )
    with pytest.raises(UnsupportedModelError, match=r"KV cache is torch\.bfloat16 and the model torch\.float32"):
        CrossfillAttentionBackend(runner, AttentionMetrics(CollectorRegistry()))


def test_an_idle_batch_is_no_work(bench):
    bench.backend.init_forward_metadata(batch(bench, ForwardMode.DECODE, [0], [5], [1]))
    forward = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    bench.backend.init_forward_metadata(forward)
    assert bench.backend._plan == ()
    assert bench.backend.forward(torch.empty(0, HEADS * DIM), None, None, bench.layer, forward).shape[0] == 0


def test_extras_that_would_change_the_result_are_refused(bench):
    forward = batch(bench, ForwardMode.DECODE, [0], [5], [1])
    bench.backend.init_forward_metadata(forward)
    with pytest.raises(UnsupportedModelError, match="passes sinks to attention"):
        bench.backend.forward_decode(
            torch.randn(1, HEADS * DIM), None, None, bench.layer, forward, False, sinks=torch.ones(HEADS)
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sliding_window_size": 128}, "sliding window of 128"),
        ({"logit_cap": 30.0}, "logit cap"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY attention"),
        ({"v_head_dim": 8}, "values of 8 beside keys of 16"),
        ({"use_irope": True}, "interleaved local attention"),
        ({"pos_encoding_mode": "ALIBI"}, "positions of the kind ALIBI"),
    ],
    ids=["window", "cap", "cross", "encoder", "mla", "irope", "alibi"],
)
def test_a_model_that_is_not_plain_causal_is_refused_at_start(change, reason):
    model = torch.nn.Module()
    model.first = layer()
    model.second = layer(**change)
    with pytest.raises(UnsupportedModelError, match=f"layer second uses .*{reason}.*torch_native"):
        check_layers(model)
