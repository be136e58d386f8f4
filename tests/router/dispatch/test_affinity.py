from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from engines.fake_worker import Reply
from router.config import AffinityConfig, ModelConfig
from router.dispatch.affinity import PlacementReason, place
from router.dispatch.workers import Worker, WorkerPool, in_flight
from router.sessions.prompt import Prompt, read_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = "/v1/chat/completions"
SYSTEM = "You are a patient assistant of the harbour office. Be brief and name your sources. " * 25
ANSWER = "Yes. " * 12


def words(seed: object, count: int) -> str:
    chance = random.Random(str(seed))
    return " ".join("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(count))


class Conversation:
    """A client that sends all of its conversation at each turn."""

    def __init__(self, router: Any, name: str, system: str = SYSTEM, turn_words: int = 60) -> None:
        self.router = router
        self.name = name
        self.turn_words = turn_words
        self.messages = [{"role": "system", "content": system}]
        self.workers: list[str] = []
        self.prompts: list[Prompt] = []

    async def turn(self, model: str = "small") -> Any:
        text = words(f"{self.name} {len(self.messages)}", self.turn_words)
        self.messages.append({"role": "user", "content": text})
        response = await self.router.client.post(CHAT, json={"model": model, "messages": self.messages})
        assert response.status_code == 200
        self.workers.append(response.headers["x-crossfill-worker"])
        self.prompts.append(read_prompt({"messages": self.messages}, b"test"))
        self.messages.append({"role": "assistant", "content": ANSWER})
        return response


@pytest.fixture
def loaded() -> Iterator[Any]:
    """Put load on a worker: `loaded(worker, 50)`."""
    with ExitStack() as held:

        def load(worker: Worker, count: int) -> None:
            for _ in range(count):
                held.enter_context(in_flight(worker))

        yield load


def placements(router: Any, reason: str) -> float:
    count: float = router.metric("crossfill_placements_total", reason=reason)
    return count


def routed_share(talks: list[Conversation], turns: int) -> float:
    """Of the blocks that lay on some worker, the share that was sent to a worker where they lay."""
    held: dict[str, set[bytes]] = {}
    best, got = 0, 0
    for turn in range(turns):
        for talk in talks:
            prompt, worker = talk.prompts[turn], talk.workers[turn]
            on = {name: sum(block in blocks for block in prompt.blocks) for name, blocks in held.items()}
            best += max(on.values(), default=0)
            got += on.get(worker, 0)
            held.setdefault(worker, set()).update(prompt.blocks)
    return got / best


async def run_rounds(talks: list[Conversation], turns: int) -> None:
    for _ in range(turns):
        for talk in talks:
            await talk.turn()


@pytest.mark.parametrize("turn_words", [60, 3], ids=["long-turns", "short-turns"])
async def test_turns_of_a_session_stay_together_behind_a_common_system_turn(
    fake: Any, start_router: Any, turn_words: int
) -> None:
    router = await start_router({"small": [await fake() for _ in range(3)]})
    talks = [Conversation(router, str(number), turn_words=turn_words) for number in range(20)]
    await run_rounds(talks, turns=8)
    assert all(len(set(talk.workers)) == 1 for talk in talks)
    assert routed_share(talks, turns=8) >= 0.95
    # The system turn alone does not draw every session to one worker.
    begun = [talk.workers[0] for talk in talks]
    assert all(begun.count(worker) >= 3 for worker in ("small/0", "small/1", "small/2"))
    assert placements(router, "prefix") >= 20 * 7
    assert placements(router, "shared") >= 10
    matched = router.metric("crossfill_affinity_matched_blocks_total")
    assert 0.5 < matched / router.metric("crossfill_affinity_prompt_blocks_total") < 1


async def test_sessions_at_the_same_time_stay_together_too(fake: Any, start_router: Any) -> None:
    workers = [await fake(Reply(ttft_s=0.01)) for _ in range(3)]
    router = await start_router({"small": workers})
    talks = [Conversation(router, str(number)) for number in range(20)]

    async def hold(talk: Conversation) -> None:
        for _ in range(6):
            await talk.turn()

    await asyncio.gather(*map(hold, talks))
    moved = sum(turn != talk.workers[0] for talk in talks for turn in talk.workers)
    assert moved <= 0.05 * 20 * 6
    assert {talk.workers[0] for talk in talks} == {"small/0", "small/1", "small/2"}


async def test_without_affinity_turns_wander(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake() for _ in range(3)]}, affinity={"enabled": False})
    talks = [Conversation(router, str(number)) for number in range(4)]
    await run_rounds(talks, turns=6)
    assert all(len(set(talk.workers)) > 1 for talk in talks)
    assert routed_share(talks, turns=6) < 0.95
    assert placements(router, "off") == 4 * 6


async def test_new_prompt_goes_to_the_idle_worker_however_much_that_one_holds(
    fake: Any, start_router: Any, loaded: Any
) -> None:
    router = await start_router({"small": [await fake(), await fake()]})
    busy, bigger = router.pool.workers
    loaded(busy, 50)
    for number in range(5):
        await Conversation(router, f"old {number}", system=words(number, 300)).turn()
    assert (len(busy.prefixes), len(bigger.prefixes) > 5 * 6) == (0, True)
    new = Conversation(router, "new", system=words("new", 300))
    response = await new.turn()
    assert new.workers == ["small/1"]
    assert response.headers["x-crossfill-placement"].startswith("reason=no_match, blocks=0, of=")
    # The control: with the load on the other side, the empty one is right.
    loaded(bigger, 100)
    other = Conversation(router, "other", system=words("other", 300))
    await other.turn()
    assert other.workers == ["small/0"]


@pytest.mark.parametrize(("extra", "stays"), [(5, True), (8, True), (9, False), (50, False)])
async def test_sessions_move_only_above_the_margin(
    fake: Any, start_router: Any, loaded: Any, extra: int, stays: bool
) -> None:
    router = await start_router({"small": [await fake(), await fake()]}, affinity={"margin": 8})
    talks = [Conversation(router, str(number), system=words(number, 100)) for number in range(8)]
    await run_rounds(talks, turns=1)
    loaded(router.pool.workers[0], extra)
    await run_rounds(talks, turns=9)
    at_home = sum(turn == talk.workers[0] for talk in talks for turn in talk.workers[1:])
    if stays:
        assert at_home == 8 * 9
        assert placements(router, "balance") == 0
    else:
        # Those of the loaded worker move once, and then stay where they went.
        movers = [talk for talk in talks if talk.workers[0] == "small/0"]
        assert len(movers) == 4
        assert all(talk.workers[1:] == ["small/1"] * 9 for talk in movers)
        assert placements(router, "balance") == len(movers)


async def test_record_header_and_log_tell_the_match(fake: Any, start_router: Any, access_lines: Any) -> None:
    router = await start_router({"small": [await fake(), await fake()]})
    talk = Conversation(router, "a")
    await talk.turn()
    response = await talk.turn()
    blocks, of = len(talk.prompts[0].blocks), len(talk.prompts[1].blocks)
    assert 0 < blocks < of
    assert response.headers["x-crossfill-placement"] == f"reason=prefix, blocks={blocks}, of={of}"
    assert access_lines()[-1]["placement"] == {"reason": "prefix", "blocks": blocks, "of": of}


async def test_another_namespace_matches_nothing(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake()]})
    for salt, matched in [(None, False), (None, True), ("theirs", False), ("theirs", True)]:
        response = await router.chat(SYSTEM, cache_salt=salt)
        assert (", blocks=0," not in response.headers["x-crossfill-placement"]) is matched


async def test_a_worker_that_came_back_holds_nothing(fake: Any, start_router: Any) -> None:
    worker = await fake()
    router = await start_router({"small": [worker]})
    await router.chat(SYSTEM)
    assert ", blocks=0," not in (await router.chat(SYSTEM)).headers["x-crossfill-placement"]
    await worker.__aexit__(None, None, None)
    await router.until(lambda: router.pool.workers[0].state == "unhealthy")
    await worker.__aenter__()
    await router.until_all_healthy()
    assert ", blocks=0," in (await router.chat(SYSTEM)).headers["x-crossfill-placement"]


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_worker_that_answered_holds_the_prompt(fake: Any, start_router: Any, stream: bool) -> None:
    failing, good = await fake(Reply(status=503, body="")), await fake()
    router = await start_router({"small": [failing, good]})
    for number in range(4):
        assert (await router.chat(f"{number} {SYSTEM}", stream=stream)).status_code == 200
    assert len(failing.requests) >= 1
    assert len(router.pool.workers[0].prefixes) == 0
    assert len(router.pool.workers[1].prefixes) >= 4 * 8


async def test_a_refused_prompt_is_held_by_nobody(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(Reply(status=400, body={"message": "too long"}))]})
    assert (await router.chat(SYSTEM)).status_code == 400
    assert len(router.pool.workers[0].prefixes) == 0


def healthy_pool(count: int, **affinity: Any) -> WorkerPool:
    model = ModelConfig(name="m", workers=tuple(f"http://w{number}" for number in range(count)))
    pool = WorkerPool([model], AffinityConfig(**affinity))
    for worker in pool.workers:
        worker.probe_succeeded()
    return pool


def prompt(*blocks: bytes, earlier: tuple[bytes, ...] = (), turn: bytes | None = None) -> Prompt:
    return Prompt(blocks=blocks, size_bytes=256 * len(blocks), earlier=earlier, turn=turn)


@pytest.mark.parametrize(("known", "reason"), [(2, PlacementReason.NO_MATCH), (3, PlacementReason.PREFIX)])
def test_a_new_conversation_follows_a_prefix_only_from_the_least_share_on(known: int, reason: PlacementReason) -> None:
    pool = healthy_pool(2)
    blocks = [bytes([number]) for number in range(10)]
    pool.workers[1].prefixes.add(prompt(*blocks[:known]))
    placed = [place(pool.workers, prompt(*blocks), AffinityConfig()) for _ in range(3)]
    assert {placement.reason for placement in placed} == {reason}
    assert {placement.worker.id for placement in placed} == {"m/1" if reason == "prefix" else "m/0"}


def test_a_conversation_returns_for_less_than_the_least_share() -> None:
    pool = healthy_pool(2)
    pool.workers[1].prefixes.add(prompt(b"0", turn=b"t"))
    blocks = [bytes([48 + number]) for number in range(10)]
    assert place(pool.workers, prompt(*blocks, earlier=(b"t",)), AffinityConfig()).worker.id == "m/1"
    assert place(pool.workers, prompt(*blocks), AffinityConfig()).worker.id == "m/0"


def test_the_longest_match_wins_among_workers_near_the_least_load() -> None:
    pool = healthy_pool(3)
    blocks = [bytes([number]) for number in range(10)]
    for worker, known in zip(pool.workers, (9, 6, 0), strict=True):
        worker.prefixes.add(prompt(*blocks[:known]))
    seen = []
    for load in (8, 9):
        pool.workers[0].in_flight = load
        seen.append(place(pool.workers, prompt(*blocks), AffinityConfig(margin=8)))
    assert [(placement.worker.id, placement.matched_blocks) for placement in seen] == [("m/0", 9), ("m/1", 6)]


def test_a_slow_worker_is_left_even_by_its_own_conversations() -> None:
    pool = healthy_pool(3)
    pool.workers[0].prefixes.add(prompt(b"0", turn=b"t"))
    later = prompt(b"0", b"1", earlier=(b"t",))
    first = pool.pick("m", (), later)
    pool.workers[0].slow = True
    second = pool.pick("m", (), later)
    assert first is not None
    assert second is not None
    assert (first.worker.id, second.worker.id == "m/0") == ("m/0", False)


def test_the_memory_is_shared_out_among_all_workers() -> None:
    small, large = healthy_pool(1, mirror_bytes=2**20), healthy_pool(4, mirror_bytes=2**20)
    many = prompt(*(number.to_bytes(4, "big") for number in range(4000)))
    for pool in (small, large):
        for worker in pool.workers:
            worker.prefixes.add(many)
    assert len(small.workers[0].prefixes) // 4 == len(large.workers[0].prefixes)
    assert small.longest_match("m", many).blocks == len(small.workers[0].prefixes)


async def test_new_conversations_take_turns_whatever_old_ones_do(fake: Any, start_router: Any) -> None:
    router = await start_router({"small": [await fake(), await fake()]})
    talks = [Conversation(router, f"talk {number}", system=words(f"system {number}", 60)) for number in range(6)]
    for talk in talks:
        await talk.turn()
        await talk.turn()
    assert placements(router, "prefix") == 6
    assert sorted(talk.workers[0] for talk in talks) == ["small/0"] * 3 + ["small/1"] * 3
