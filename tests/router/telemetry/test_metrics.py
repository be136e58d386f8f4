from __future__ import annotations

import asyncio
import random
import threading
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from engines.fake_worker import Reply
from router.decision.policy import decide_explicit
from router.telemetry.metrics import TTFT_BUCKETS, RouterMetrics
from router.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prometheus_client import Metric


def test_ttft_buckets_are_fine_where_answers_are_and_reach_two_minutes() -> None:
    assert list(TTFT_BUCKETS) == sorted(set(TTFT_BUCKETS))
    fine = [(low, high) for low, high in pairwise(TTFT_BUCKETS) if 0.05 <= low < 2]
    assert all(high / low <= 1.10 for low, high in fine)
    assert fine[0][0] == 0.05
    assert TTFT_BUCKETS[0] <= 0.01
    assert TTFT_BUCKETS[-1] >= 120


def quantile(registry: CollectorRegistry, q: float) -> float:
    """PromQL's histogram_quantile."""
    name, labels = "crossfill_ttft_seconds", {"model": "m", "reuse": "none"}
    count = registry.get_sample_value(f"{name}_count", labels) or 0
    low_s, below = 0.0, 0.0
    for bound_s in TTFT_BUCKETS:
        upto = registry.get_sample_value(f"{name}_bucket", {**labels, "le": str(float(bound_s))}) or 0
        if upto >= q * count:
            return low_s + (bound_s - low_s) * (q * count - below) / (upto - below)
        low_s, below = bound_s, upto
    raise AssertionError("beyond the last bucket")


@pytest.mark.parametrize("slow_ms", [320, 356, 700])
def test_a_tenth_in_the_median_is_visible(slow_ms: int) -> None:
    medians = []
    for centre_s in (slow_ms / 1000, slow_ms / 1000 / 1.11):
        registry, chance = CollectorRegistry(), random.Random(7)
        metrics = RouterMetrics(registry)
        record = RequestRecord("r", 0.0, decision=decide_explicit("r", "m", tau=0.3, sigma=0.1))
        samples = [chance.lognormvariate(0, 0.15) * centre_s for _ in range(1000)]
        for sample in samples:
            metrics.observe_first_token(record, sample)
        medians.append(quantile(registry, 0.5))
        assert medians[-1] == pytest.approx(median(samples), rel=0.03)
    assert 1.08 <= medians[0] / medians[1] <= 1.14


async def test_unmatched_paths_are_one_series(duo: Any) -> None:
    for number in range(300):
        await duo.client.get(f"/random/{number}")
    assert duo.metric("crossfill_http_requests_total", route="other", status="404") == 300
    text = (await duo.client.get("/metrics")).text
    assert "/random/" not in text


async def test_unknown_models_never_become_labels(duo: Any) -> None:
    for number in range(20):
        await duo.chat(model=f"model-{number}")
        await duo.client.get(f"/v1/models/model-{number}")
    text = (await duo.client.get("/metrics")).text
    assert "model-1" not in text
    assert duo.metric("crossfill_requests_total", model="none", outcome="client_error") == 20
    assert duo.metric("crossfill_http_requests_total", route="/v1/models/{name:path}", status="404") == 20


async def test_one_good_stream_is_counted_once_everywhere(duo: Any) -> None:
    await duo.chat("hi", model="auto", stream=True)
    assert duo.metric("crossfill_requests_total", model="small", outcome="ok") == 1
    assert duo.metric("crossfill_decisions_total", model="small", reason="threshold_small") == 1
    assert duo.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 1
    assert duo.metric("crossfill_request_duration_seconds_count", model="small") == 1
    assert duo.metric("crossfill_http_requests_total", route="/v1/chat/completions", status="200") == 1
    assert duo.metric("crossfill_worker_up", model="small", worker="small/0") == 1
    assert duo.metric("crossfill_in_flight_requests", model="small", worker="small/0") == 0


async def test_whole_answers_have_no_ttft(duo: Any) -> None:
    await duo.chat()
    assert duo.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 0
    assert duo.metric("crossfill_request_duration_seconds_count", model="small") == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_tokens_are_counted_whether_or_not_the_client_asks_for_usage(
    fake: Any, start_router: Any, fields: dict[str, Any]
) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b c"))]})
    response = await router.chat("one two three four", **fields)
    assert router.metric("crossfill_tokens_total", model="small", kind="prefilled") == 4
    assert router.metric("crossfill_tokens_total", model="small", kind="completion") == 3
    assert (b'"usage": {' in response.content or b'"usage":{' in response.content) is (
        not fields.get("stream") or "stream_options" in fields
    )


async def test_parts_of_ttft_add_up_to_it(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(ttft_s=0.2))]})
    await router.chat(stream=True)
    name = "crossfill_ttft_part_seconds_sum"
    parts = {part: router.metric(name, model="small", part=part) for part in ("queue", "route", "upstream")}
    assert sum(parts.values()) == pytest.approx(
        router.metric("crossfill_ttft_seconds_sum", model="small", reuse="none")
    )
    assert parts["upstream"] >= 0.2
    assert parts["queue"] > 0
    assert parts["route"] > 0


async def test_a_slow_upload_is_the_queues_part(duo: Any) -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"model": "small", "stream": true, '
        await asyncio.sleep(0.3)
        yield b'"messages": [{"role": "user", "content": "x"}]}'

    response = await duo.client.post("/v1/chat/completions", content=slow_body())
    assert response.status_code == 200
    assert duo.metric("crossfill_ttft_part_seconds_sum", model="small", part="queue") >= 0.3


async def test_time_between_tokens(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(text="a b c d", inter_token_s=0.1))]})
    await router.chat(stream=True)
    assert router.metric("crossfill_inter_token_seconds_count", model="small") == 3
    assert router.metric("crossfill_inter_token_seconds_sum", model="small") >= 0.28


async def test_scores_of_routed_requests_only(duo: Any) -> None:
    await duo.chat("hi", model="small")
    assert duo.metric("crossfill_score_count", model="small") == 0
    await duo.chat("hi", model="auto")
    assert duo.metric("crossfill_score_count", model="small") == 1
    assert 0 < duo.metric("crossfill_score_sum", model="large") <= 1


@pytest.mark.parametrize(
    ("reply", "stream", "expected"),
    [
        (Reply(), True, None),
        (Reply(status=400, body={"error": {"message": "no"}}), False, "client"),
        (Reply(status=500, body="boom"), False, "worker"),
        (Reply(text="a b", no_done=True), True, "worker"),
        (Reply(text="a b", error_event_after=1), True, "worker"),
        (Reply(hang=True), True, "timeout"),
        (Reply(status=503, body="busy"), False, "unavailable"),
    ],
    ids=["none", "refused", "failed", "truncated", "event", "hanging", "unavailable"],
)
async def test_errors_by_class(fake: Any, start_router: Any, reply: Reply, stream: bool, expected: str | None) -> None:
    router = await start_router({"small": [await fake(reply)]}, upstream={"first_byte_s": 0.3})
    await router.chat(stream=stream)
    classes = ("client", "worker", "timeout", "unavailable", "router")
    name = "crossfill_errors_total"
    counted = {one: router.registry.get_sample_value(name, {"model": "small", "class": one}) for one in classes}
    assert {one for one, count in counted.items() if count} == ({expected} if expected else set())


async def test_an_unknown_word_on_reuse_is_no_label(fake: Any, start_router: Any) -> None:
    replies = [Reply(reuse=word) for word in ("guided", "whatever", "none")]
    router = await start_router({"small": [await fake(*replies)]})
    for _ in replies:
        await router.chat(stream=True)
    assert router.metric("crossfill_ttft_seconds_count", model="small", reuse="guided") == 1
    assert router.metric("crossfill_ttft_seconds_count", model="small", reuse="none") == 2


async def test_a_scrape_does_not_hold_the_event_loop(duo: Any) -> None:
    threads: list[threading.Thread] = []

    class Witness(Collector):
        def collect(self) -> list[Metric]:
            threads.append(threading.current_thread())
            return []

    duo.registry.register(Witness())
    threads.clear()
    assert (await duo.client.get("/metrics")).status_code == 200
    [collecting] = threads
    assert collecting is not threading.current_thread()


@pytest.mark.parametrize(
    ("method", "path", "route", "status"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions", 400),
        ("POST", "/v1/completions", "/v1/completions", 400),
        ("POST", "/v1/route", "/v1/route", 400),
        ("GET", "/v1/completions", "/v1/completions", 405),
        ("GET", "/v1/models/small", "/v1/models/{name:path}", 200),
        ("GET", "/live", "/live", 200),
        ("GET", "/openapi.json", "/openapi.json", 200),
        ("GET", "/nothing", "other", 404),
    ],
)
async def test_requests_are_counted_by_route(duo: Any, method: str, path: str, route: str, status: int) -> None:
    response = await duo.client.request(method, path, json={} if method == "POST" else None)
    assert response.status_code == status
    assert duo.metric("crossfill_http_requests_total", route=route, status=str(status)) == 1
