from __future__ import annotations

import json
from typing import Any

import pytest

from router.decision.policy import replay

PROMPTS = [
    "hi",
    "Prove that the square root of 2 is irrational, step by step.",
    "Explain how rain forms and compare clouds.",
]


@pytest.mark.parametrize("model", ["auto", "small", "large"])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_dry_run_equals_the_real_decision_for_the_same_request_id(
    fake: Any, start_router: Any, prompt: str, model: str
) -> None:
    small, large = await fake(), await fake()
    router = await start_router({"small": [small], "large": [large]}, routing={"sigma": 0.5})
    for number in range(4):
        headers = {"x-request-id": f"same-{number}"}
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        dry = (await router.client.post("/v1/route", json=body, headers=headers)).json()
        assert len(small.requests + large.requests) == number
        real = await router.chat(prompt, model=model, headers=headers)
        told = json.loads(real.headers["x-crossfill-decision"])
        assert {key: value for key, value in dry.items() if key != "features"} == told
        assert real.headers["x-crossfill-model"] == dry["model"]
        assert real.headers["x-crossfill-reason"] == dry["reason"]


async def test_noise_makes_the_same_prompt_go_both_ways(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake()], "large": [await fake()]}, routing={"sigma": 0.5})
    reasons = {(await router.chat("hi", model="auto")).headers["x-crossfill-reason"] for _ in range(60)}
    assert reasons == {"threshold_small", "threshold_large"}


async def test_dry_run_dispatches_and_counts_nothing(duo: Any) -> None:
    response = await duo.client.post(
        "/v1/route", json={"model": "auto", "messages": [{"role": "user", "content": "x"}]}
    )
    assert response.status_code == 200
    assert not duo.small.requests + duo.large.requests
    assert duo.metric("crossfill_decisions_total", model="small", reason="threshold_small") == 0
    assert "x-crossfill-worker" not in response.headers


async def test_clear_cases_go_where_they_belong(duo: Any) -> None:
    easy = await duo.chat("What is the capital of France?", model="auto")
    hard = await duo.chat(
        "Implement a thread-safe LRU cache in Python with O(1) operations and explain the trade-offs.", model="auto"
    )
    assert easy.headers["x-crossfill-reason"] == "threshold_small"
    assert hard.headers["x-crossfill-reason"] == "threshold_large"
    assert len(duo.small.requests) == len(duo.large.requests) == 1
    assert duo.small.requests[0].body["model"] == "small"
    assert duo.large.requests[0].body["model"] == "large"
    assert duo.metric("crossfill_decisions_total", model="large", reason="threshold_large") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_carry_the_decision_and_the_worker(duo: Any, stream: bool) -> None:
    response = await duo.chat("hi", model="auto", stream=stream)
    decision = json.loads(response.headers["x-crossfill-decision"])
    assert decision["request_id"] == response.headers["x-request-id"]
    assert set(decision["scores"]) == set(decision["noise"]) == {"small", "large"}
    assert response.headers["x-crossfill-worker"] == "small/0"
    assert replay(decision).to_json() == decision


async def test_dry_run_sees_an_unavailable_model(fake: Any, start_router: Any, closed_port_url: str) -> None:
    router = await start_router({"small": [closed_port_url], "large": [await fake()]}, wait=False)
    await router.until(lambda: router.pool.workers[1].state == "healthy")
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    decision = (await router.client.post("/v1/route", json=body)).json()
    assert (decision["model"], decision["reason"]) == ("large", "only_healthy")
    assert decision["unavailable"] == ["small"]
    assert replay(decision).to_json() == decision


async def test_prompt_recorded_for_the_large_model_goes_there(fake: Any, start_router: Any, tmp_path: Any) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text(json.dumps({"prompt": "hi  there", "scores": {"small": 0.1, "large": 0.95}}) + "\n")
    router = await start_router(
        {"small": [await fake()], "large": [await fake()]},
        routing={"sigma": 0.0, "scorer": {"kind": "recorded", "path": str(path)}},
    )
    hit = json.loads((await router.chat(" hi there\n", model="auto")).headers["x-crossfill-decision"])
    assert (hit["scorer"], hit["model"]) == ("recorded", "large")
    miss = json.loads((await router.chat("hi", model="auto")).headers["x-crossfill-decision"])
    assert (miss["scorer"], miss["fallback"], miss["model"]) == ("heuristic", "not_recorded", "small")
    assert router.metric("crossfill_scorer_fallbacks_total", reason="not_recorded") == 1


async def test_ladder_of_three_weighs_cost_and_drops_a_dead_rung(
    fake: Any, start_router: Any, closed_port_url: str
) -> None:
    prices = {"small": 1, "middle": 2, "large": 2000}
    urls = {"small": (await fake()).url, "middle": (await fake()).url, "large": (await fake()).url}
    hard = {"model": "auto", "messages": [{"role": "user", "content": PROMPTS[1]}]}

    async def decided(cost_weight: float, **changed: str) -> Any:
        models = [
            {"name": name, "workers": [url], "cost": {"input": prices[name], "output": prices[name]}}
            for name, url in (urls | changed).items()
        ]
        routing = {"ladder": list(urls), "tau": 0.1, "sigma": 0, "cost_weight": cost_weight}
        router = await start_router({}, wait=False, models=models, routing=routing)
        await router.until(lambda: sum(worker.state == "healthy" for worker in router.pool.workers) == 3 - len(changed))
        return (await router.client.post("/v1/route", json=hard)).json()

    free, paid, without_middle = await decided(0), await decided(1), await decided(1, middle=closed_port_url)
    assert (free["model"], free["reason"]) == ("large", "threshold_large")
    assert (paid["model"], paid["reason"]) == ("middle", "threshold_middle")
    assert paid["cost"]["large"] == pytest.approx(2000 * paid["cost"]["small"], rel=1e-3)
    assert (without_middle["model"], without_middle["unavailable"]) == ("small", ["middle"])
    assert all(replay(decision).to_json() == decision for decision in (free, paid, without_middle))


async def test_model_that_would_take_long_to_begin_loses_by_its_weight(fake: Any, start_router: Any) -> None:
    hard = {"model": "auto", "messages": [{"role": "user", "content": PROMPTS[1]}]}
    decisions = []
    for weight in (0.001, 1.0):
        router = await start_router(
            {"small": [await fake()], "large": [await fake()]},
            of_model={"small": {"prefill_tokens_per_s": 1e6}, "large": {"prefill_tokens_per_s": 10.0}},
            routing={"ttft_weight": weight},
        )
        decisions.append((await router.client.post("/v1/route", json=hard)).json())
    assert [decision["model"] for decision in decisions] == ["large", "small"]
    assert decisions[1]["expected_ttft_s"]["large"] > 1
    assert all(replay(decision).to_json() == decision for decision in decisions)
