from __future__ import annotations

import asyncio
from typing import Any

from engines.fake_worker import FakeWorker, Reply, SlowHealth


async def test_router_starts_with_one_worker_down_and_adopts_it_later(fake: Any, start_router: Any) -> None:
    late = FakeWorker()
    async with late:
        pass
    router = await start_router({"small": [await fake(), await fake(), late.url]}, wait=False)
    await router.until(lambda: [worker.state for worker in router.pool.workers][:2] == ["healthy", "healthy"])
    ready = await router.client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "degraded"
    assert [worker["state"] for worker in ready.json()["models"]["small"]["workers"]] == [
        "healthy",
        "healthy",
        "starting",
    ]
    for _ in range(6):
        assert (await router.chat()).status_code == 200
    async with late:
        await router.until_all_healthy()
        assert (await router.client.get("/ready")).json()["status"] == "ready"
        for _ in range(3):
            await router.chat()
        assert late.requests


async def test_ready_is_503_until_a_worker_is_healthy(start_router: Any, closed_port_url: str) -> None:
    router = await start_router({"small": [closed_port_url]}, wait=False)
    ready = await router.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["status"] == "unavailable"
    assert ready.json()["models"]["small"]["workers"][0]["state"] == "starting"
    assert (await router.client.get("/live")).status_code == 200
    assert (await router.client.head("/live")).status_code == 200


async def test_ready_turns_503_when_the_process_is_told_to_stop(duo: Any) -> None:
    assert (await duo.client.get("/ready")).status_code == 200
    duo.lifecycle.is_draining = True
    assert (await duo.client.get("/ready")).status_code == 503
    assert (await duo.chat()).status_code == 200


async def test_all_workers_die_and_return_without_a_restart_of_the_router(fake: Any, start_router: Any) -> None:
    workers = [await fake(), await fake()]
    router = await start_router({"small": workers})
    for worker in workers:
        await worker.__aexit__(None, None, None)
    await router.until(lambda: all(worker.state == "unhealthy" for worker in router.pool.workers))
    refused = await router.chat()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    async with workers[0]:
        await router.until(lambda: router.pool.workers[0].state == "healthy", timeout_s=3)
        assert (await router.chat()).status_code == 200


async def test_failing_probes_take_a_worker_out_only_after_the_limit(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]}, health={"interval_s": 0.1, "timeout_s": 0.3, "unhealthy_after": 3})
    worker.health, before = "failing", worker.probes
    await router.until(lambda: router.pool.workers[0].state == "unhealthy")
    assert worker.probes - before >= 3
    worker.health = "ok"
    await router.until(lambda: router.pool.workers[0].state == "healthy")


async def test_worker_that_was_never_healthy_stays_starting(fake: Any, start_router: Any) -> None:
    worker = await fake(health="failing")
    router = await start_router({"small": [worker]}, wait=False)
    await router.until(lambda: worker.probes > 4)
    assert router.pool.workers[0].state == "starting"


async def test_busy_worker_is_slow_not_dead(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(text=" ".join(["word"] * 60), inter_token_s=0.03))
    router = await start_router(
        {"small": [worker]}, health={"interval_s": 0.05, "timeout_s": 0.1, "unhealthy_after": 2}
    )
    generation = asyncio.create_task(router.chat(stream=True))
    await router.until(lambda: router.pool.workers[0].in_flight == 1)
    worker.health, before = SlowHealth(slow_s=25), worker.probes
    await router.until(lambda: worker.probes - before >= 6)
    assert not generation.done()
    assert router.pool.workers[0].state == "healthy"
    [shown] = (await router.client.get("/ready")).json()["models"]["small"]["workers"]
    assert shown["slow"] is True
    assert (await generation).status_code == 200
    # The control: without the generation the same probes end it.
    await router.until(lambda: router.pool.workers[0].state == "unhealthy")


async def test_recent_life_without_a_request_in_flight_is_no_work(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router(
        {"small": [worker]}, health={"interval_s": 0.05, "timeout_s": 5.0, "unhealthy_after": 2}
    )
    await router.chat()
    worker.health = "failing"
    # Far less than timeout_s + interval_s, for which the answer of just now would otherwise count as life.
    await router.until(lambda: router.pool.workers[0].state == "unhealthy", timeout_s=2)
    assert router.pool.workers[0].slow is False


async def test_refused_connection_ends_a_worker_at_the_first_probe(fake: Any, start_router: Any) -> None:
    gone, failing = await fake(), await fake()
    router = await start_router(
        {"small": [gone, failing]}, health={"interval_s": 0.05, "timeout_s": 1.0, "unhealthy_after": 10_000}
    )
    failing.health, before = "failing", failing.probes
    await gone.__aexit__(None, None, None)
    await router.until(lambda: router.pool.workers[0].state == "unhealthy", timeout_s=3)
    await router.until(lambda: failing.probes - before >= 3)
    assert router.pool.workers[1].state == "healthy"


async def test_traffic_brings_an_unhealthy_worker_back(fake: Any, start_router: Any) -> None:
    worker = await fake(Reply(text="a b c", inter_token_s=0.5))
    router = await start_router(
        {"small": [worker]}, health={"interval_s": 0.05, "timeout_s": 0.05, "unhealthy_after": 1}
    )
    worker.health = "failing"
    generation = asyncio.create_task(router.chat(stream=True))
    seen = router.pool.workers[0]
    await router.until(lambda: seen.state == "unhealthy")
    await router.until(lambda: seen.state == "healthy")
    await generation


async def test_hanging_probes_never_pile_up(fake: Any, start_router: Any) -> None:
    worker = await fake(health="hanging")
    router = await start_router(
        {"small": [worker]}, wait=False, health={"interval_s": 0.01, "timeout_s": 0.1, "unhealthy_after": 2}
    )
    await router.until(lambda: worker.probes >= 5)
    assert worker.most_probes_at_once == 1


async def test_one_hung_worker_does_not_hold_up_the_others(fake: Any, start_router: Any) -> None:
    hung, good = await fake(Reply(hang=True)), await fake()
    router = await start_router({"small": [hung, good]}, upstream={"first_byte_s": 1.0})
    answers = await asyncio.gather(*(router.chat(stream=True) for _ in range(10)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses.count(504) == len(hung.requests) > 0
    assert statuses.count(200) == len(good.requests) == 10 - len(hung.requests)
    await router.until_idle()
