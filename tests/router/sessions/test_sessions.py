from __future__ import annotations

from typing import Any

import pytest

from engines.fake_worker import Reply
from router.config import LimitsConfig
from router.request.generation import parse_chat
from router.telemetry.record import RequestRecord
from router.tenants.namespace import LOCAL_TENANT, extra_key

CHAT = "/v1/chat/completions"
HARD = (
    "Prove step by step that the square root of 2 is irrational, then implement a Python function that approximates it "
    "with Newton's method, and explain why the method converges quadratically."
)
STICKY = {"sticky": True}


async def start_duo(fake: Any, start_router: Any, **config: Any) -> Any:
    return await start_router({"small": [await fake()], "large": [await fake()]}, **config)


async def say(
    router: Any, talk: list[dict[str, str]], text: str, model: str = "auto", **fields: Any
) -> tuple[str, str]:
    """Append a user turn and the answer to `talk`; the model that answered, and why it was chosen."""
    talk.append({"role": "user", "content": text})
    response = await router.client.post(CHAT, json={"model": model, "messages": talk, **fields})
    assert response.status_code == 200
    talk.append({"role": "assistant", "content": "Indeed."})
    return response.headers["x-crossfill-model"], response.headers["x-crossfill-reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_stays_with_the_model_that_answered_it(fake: Any, start_router: Any, stream: bool) -> None:
    router = await start_duo(fake, start_router, sessions=STICKY)
    talk: list[dict[str, str]] = []
    assert await say(router, talk, HARD, stream=stream) == ("large", "threshold_large")
    for _ in range(2):
        assert await say(router, talk, "Thanks.", stream=stream) == ("large", "sticky")
    # A new conversation is decided anew, also one that begins alike.
    assert await say(router, [], HARD) == ("large", "threshold_large")
    assert await say(router, [], "Thanks.") == ("small", "threshold_small")
    assert router.metric("crossfill_decisions_total", model="large", reason="sticky") == 2
    assert router.metric("crossfill_session_pins_total", event="kept") == 2


async def test_by_default_every_turn_is_decided_anew(fake: Any, start_router: Any) -> None:
    router = await start_duo(fake, start_router)
    talk: list[dict[str, str]] = []
    assert await say(router, talk, HARD) == ("large", "threshold_large")
    assert await say(router, talk, "Thanks.") == ("small", "threshold_small")


async def test_a_named_model_does_not_change_the_pin(fake: Any, start_router: Any) -> None:
    router = await start_duo(fake, start_router, sessions=STICKY)
    talk: list[dict[str, str]] = []
    await say(router, talk, HARD)
    assert await say(router, talk, "Thanks.", model="small") == ("small", "explicit")
    assert await say(router, talk, "Thanks again.") == ("large", "sticky")


async def test_without_a_worker_of_its_model_a_conversation_moves_and_stays_there(fake: Any, start_router: Any) -> None:
    large = await fake()
    router = await start_router({"small": [await fake()], "large": [large]}, sessions=STICKY)
    talk: list[dict[str, str]] = []
    await say(router, talk, HARD)
    await large.__aexit__(None, None, None)
    await router.until(lambda: router.pool.workers[1].state == "unhealthy")
    assert await say(router, talk, "Thanks.") == ("small", "only_healthy")
    await large.__aenter__()
    await router.until_all_healthy()
    assert await say(router, talk, HARD) == ("small", "sticky")
    assert router.metric("crossfill_session_pins_total", event="moved") == 1


async def test_an_answer_that_never_began_pins_nothing(fake: Any, start_router: Any) -> None:
    large = await fake(Reply(status=400, body={"message": "too long"}), Reply())
    router = await start_router({"small": [await fake()], "large": [large]}, sessions=STICKY)
    talk = [{"role": "user", "content": HARD}]
    refused = await router.client.post(CHAT, json={"model": "auto", "messages": talk})
    assert (refused.status_code, refused.headers["x-crossfill-model"]) == (400, "large")
    talk.append({"role": "assistant", "content": "Indeed."})
    assert await say(router, talk, "Thanks.") == ("small", "threshold_small")


async def test_another_namespace_does_not_see_the_pin(fake: Any, start_router: Any) -> None:
    router = await start_duo(fake, start_router, sessions=STICKY)
    talk: list[dict[str, str]] = []
    await say(router, talk, HARD)
    assert await say(router, [*talk], "Thanks.", cache_salt="theirs") == ("small", "threshold_small")
    assert await say(router, [*talk], "Thanks.") == ("large", "sticky")


async def test_a_dry_run_sees_the_pin_and_sets_none(fake: Any, start_router: Any) -> None:
    router = await start_duo(fake, start_router, sessions=STICKY)
    body: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": HARD}]}
    later = [*body["messages"], {"role": "assistant", "content": "Indeed."}, {"role": "user", "content": "Thanks."}]
    await router.client.post("/v1/route", json=body)
    assert (await router.client.post("/v1/route", json=body | {"messages": later})).json()["model"] == "small"
    await router.client.post(CHAT, json=body)
    dry = (await router.client.post("/v1/route", json=body | {"messages": later})).json()
    assert (dry["model"], dry["reason"], dry["pinned"]) == ("large", "sticky", "large")


def situation_of(router: Any, text: str, model: str = "auto") -> Any:
    record = RequestRecord("r", 0.0)
    asked = parse_chat({"model": model, "messages": [{"role": "user", "content": text}]}, LimitsConfig())
    situation = router.app.state.services.sessions.situation(record, asked, extra_key(LOCAL_TENANT))
    return situation, record


async def start_with_rates(fake: Any, router_of: Any, weight: float = 1.0, **worker: Any) -> Any:
    models = {"small": [await fake()], "large": [await fake(Reply(**worker)) for _ in range(2)]}
    return await router_of(models, of_model={"small": {"prefill_tokens_per_s": 1000}}, routing={"ttft_weight": weight})


async def test_a_speed_rests_on_the_workers_count_and_not_on_what_a_client_adds(fake: Any, start_router: Any) -> None:
    router = await start_with_rates(fake, start_router, ttft_s=0.1)
    for number in range(5):
        junk = {"chat_template_kwargs": {"junk": "x" * 1_000_000}}
        await router.chat(f"{number}" + " word" * 1_600, model="large", stream=True, **junk)
    expected_s = situation_of(router, "y" * 8_000)[0].expected_ttft_s["large"]
    # 2,000 tokens at 1,600 in a tenth of a second; by the bytes of its clients it would be a thousandth.
    assert expected_s >= 0.1


async def test_expected_ttft_is_that_of_what_is_not_held(fake: Any, start_router: Any) -> None:
    router = await start_with_rates(fake, start_router)
    text = "x" * 8_000
    before, record = situation_of(router, text)
    assert before.expected_ttft_s["small"] == pytest.approx(2.0, rel=0.05)
    await router.chat(text, model="small")
    after, _ = situation_of(router, text)
    # Less than a block is left.
    assert 0 <= after.expected_ttft_s["small"] <= 64 / 1000
    assert record.ttft_unknown == ["large"]
    assert router.metric("crossfill_expected_ttft_unknown_total", model="large") == 2


async def test_a_speed_is_learned_from_first_tokens(fake: Any, start_router: Any) -> None:
    router = await start_with_rates(fake, start_router, ttft_s=0.1)
    for number in range(5):
        assert "large" not in situation_of(router, "y" * 8_000)[0].expected_ttft_s
        await router.chat(f"{number}" + " word" * 1_600, model="large", stream=True)
    situation, record = situation_of(router, "y" * 8_000)
    assert situation.expected_ttft_s["large"] >= 0.1
    assert record.ttft_unknown == []
    # Twice the prompt, twice the time.
    longer = situation_of(router, "y" * 16_000)[0].expected_ttft_s["large"]
    assert longer == pytest.approx(2 * situation.expected_ttft_s["large"], rel=0.05)


async def test_the_longest_match_of_any_healthy_worker_counts(fake: Any, start_router: Any) -> None:
    router = await start_with_rates(fake, start_router, ttft_s=0.02)
    for number in range(5):
        await router.chat(f"{number}" + " word" * 1_600, model="large", stream=True)
    held = "4" + " word" * 1_600
    holder = next(w for w in router.pool.workers if w.prefixes.match(situation_of(router, held)[1].prompt).blocks)
    known = situation_of(router, held)[0].expected_ttft_s["large"]
    fresh = situation_of(router, "y" * 8_000)[0].expected_ttft_s["large"]
    assert known < 0.1 * fresh
    holder.state = "unhealthy"
    assert situation_of(router, held)[0].expected_ttft_s["large"] == pytest.approx(fresh, rel=0.01)


@pytest.mark.parametrize(("weight", "model"), [(0.0, "auto"), (1.0, "small")], ids=["no-weight", "named-model"])
async def test_nothing_is_estimated_where_nobody_asks(fake: Any, start_router: Any, weight: float, model: str) -> None:
    router = await start_with_rates(fake, start_router, weight=weight)
    situation, record = situation_of(router, "x" * 8_000, model)
    assert (situation.expected_ttft_s, record.ttft_unknown) == ({}, [])
    assert router.metric("crossfill_expected_ttft_unknown_total", model="large") == 0
