"""Times to first token of two real workers that share a store, paired: what is compared follows one another at once.

**What is timed is what is said.** A guided request's answer must say that it was guided, and a dense one's that it was
not; a sender's store must have grown by just the pages that were to be published; else there is no figure but an error.
A round in which the store was too slow for one of its requests, as it is now and then on a busy machine, is counted and
made again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from crossfill.errors import BenchError
from engines.hooks import HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engines.config import WorkerConfig

_TENANT = "bench"
_STORE_TIMEOUT_S = 60.0
_POLL_S = 0.01
_TIMEOUT = aiohttp.ClientTimeout(total=600)
_ATTENTION = 'crossfill_attention_seconds_total{phase="extend"}'
_WAITED = "crossfill_reuse_waited_seconds_total"
_MISSED = "crossfill_reuse_missed_layers_total"
# What a worker says of each kind of request.
_WANTED = {"dense": "none; reason=off", "guided": "guided; ", "refused": "none; reason=nothing_stored"}
_SLOW = "fallback; reason=store_"
_LEAST_AGAIN = 3
_STORED = "crossfill_store_published_pages_total"


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        ttft_s: from sending it to the first event of its answer.
        cpu_s: processor time of the worker's processes, from sending it to the end of its answer.
        attention_s: of the time to first token, within attention.
        waited_s: of that, for the store.
        missed_layers: of its chunks, computed densely although their request was guided.
        outcome: the worker's word on reuse.
    """

    ttft_s: float
    cpu_s: float
    attention_s: float
    waited_s: float
    missed_layers: int
    outcome: str

    @property
    def rest_s(self) -> float:
        """Neither attention nor waiting."""
        return self.ttft_s - self.attention_s - self.waited_s


@dataclass(frozen=True)
class Rounds:
    """One answer of each kind for every round.

    Attributes:
        dense, guided, refused: of the receiver: reuse off; allowed; allowed where nothing is stored.
        plain, published: of the sender: leaving nothing; leaving masses.
        stored_after_s: from the end of the sender's answer until the store had all its masses.
        again: what was said in rounds that were made again as the store was too slow.
    """

    dense: list[Answer] = field(default_factory=list)
    guided: list[Answer] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)
    published: list[Answer] = field(default_factory=list)
    stored_after_s: list[float] = field(default_factory=list)
    again: list[str] = field(default_factory=list)


class Worker:
    """Asks a running worker over HTTP.

    Args:
        cpu_s: processor time that it has used.
    """

    def __init__(self, session: aiohttp.ClientSession, config: WorkerConfig, cpu_s: Callable[[], float]) -> None:
        self._cpu_s = cpu_s
        self._session = session
        self._url = f"http://{config.host}:{config.port}"
        self._name = config.name
        self._asked = itertools.count()

    async def ask(self, tokens: Sequence[int], reuse: Mapping[str, str] | None) -> Answer:
        """The time to the first token after a prompt that the worker has not in its own cache.

        Args:
            tokens: of the prompt.
            reuse: the word of a router; None for a request without one, which leaves nothing either.

        Raises:
            BenchError: it did not answer, or not with a token.
        """
        await self._flush()
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            # Whatever was cached before is another request's.
            "extra_key": f"bench-{next(self._asked)}",
        }
        if reuse is not None:
            body["custom_params"] = {"crossfill": dict(reuse)}
        before, cpu_s = await self.metrics(), self._cpu_s()
        started_s = time.perf_counter()
        first_s = None
        async with self._session.post(f"{self._url}/v1/completions", json=body, timeout=_TIMEOUT) as response:
            if response.status != 200:
                raise BenchError(f"{self._name} answered {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if first_s is None and line.startswith(b"data: {"):
                    first_s = time.perf_counter() - started_s
            outcome = response.headers.get(HEADER, "")
        if first_s is None:
            raise BenchError(f"{self._name} answered nothing")
        cpu_s = self._cpu_s() - cpu_s
        after = await self.metrics()
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        missed = sum(value for name, value in grown.items() if name.startswith(_MISSED))
        return Answer(first_s, cpu_s, grown.get(_ATTENTION, 0.0), grown.get(_WAITED, 0.0), round(missed), outcome)

    async def metrics(self) -> dict[str, float]:
        """Crossfill's series by name and labels."""
        async with self._session.get(f"{self._url}/metrics", timeout=_TIMEOUT) as response:
            lines = (await response.text()).splitlines()
        return {
            name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("cr"))
        }

    async def wait_for_pages(self, pages: float) -> None:
        """Wait until this worker has stored so many pages in all.

        Raises:
            BenchError: that did not come about.
        """
        until_s = time.monotonic() + _STORE_TIMEOUT_S
        while (found := await self.stored_pages()) < pages:
            if time.monotonic() > until_s:
                raise BenchError(f"{self._name} stored {found:.0f} of {pages:.0f} pages in {_STORE_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)
        if found > pages:
            raise BenchError(f"{self._name} stored {found:.0f} pages, {pages:.0f} were to be published")

    async def stored_pages(self) -> float:
        """Pages that this worker has stored in all."""
        return (await self.metrics()).get(_STORED, 0.0)

    async def _flush(self) -> None:
        async with self._session.post(f"{self._url}/flush_cache?timeout=30", timeout=_TIMEOUT) as response:
            if response.status != 200:
                raise BenchError(f"{self._name} did not empty its cache: {(await response.text())[:200]}")


async def measure(
    sender: Worker, receiver: Worker, prompts: Sequence[Sequence[int]], page: int, step: Callable[[int], None]
) -> Rounds:
    """One round for each prompt.

    Args:
        prompts: of one length; what is stored of one is nothing to another.
        page: tokens of a page.
        step: told after each round how many are done.

    Raises:
        BenchError: an answer is not what was to be timed, or more than every second round had to be made again.
    """
    rounds = Rounds()
    orders = list(itertools.permutations(_WANTED))
    while (number := len(rounds.dense)) < len(prompts):
        prompt, salt = prompts[number], f"{len(prompts[number])}-{number}-{time.time_ns()}"
        sent = await _ask_sender(sender, prompt, salt, len(prompt) // page, plain_first=number % 2 == 1)
        try:
            taken = {kind: await _ask_receiver(receiver, kind, prompt, salt) for kind in orders[number % len(orders)]}
        except _StoreTooSlowError as slow:
            rounds.again.append(slow.outcome)
            if len(rounds.again) > max(_LEAST_AGAIN, len(prompts)):
                raise BenchError(f"the store is too slow for every second round: {slow.outcome}") from slow
            continue
        rounds.published.append(sent.published)
        rounds.plain.append(sent.plain)
        rounds.stored_after_s.append(sent.stored_after_s)
        for kind, answers in (("dense", rounds.dense), ("guided", rounds.guided), ("refused", rounds.refused)):
            answers.append(taken[kind])
        step(number + 1)
    return rounds


class _StoreTooSlowError(Exception):
    """A request was prefilled without the store, which had not answered when its turn came."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class _Sent:
    plain: Answer
    published: Answer
    stored_after_s: float


async def _ask_sender(sender: Worker, prompt: Sequence[int], salt: str, pages: int, *, plain_first: bool) -> _Sent:
    wanted = await sender.stored_pages() + pages
    plain = await sender.ask(prompt, None) if plain_first else None
    published = await sender.ask(prompt, word_of("allow", salt))
    ended_s = time.perf_counter()
    await sender.wait_for_pages(wanted)
    stored_after_s = time.perf_counter() - ended_s
    plain = plain or await sender.ask(prompt, None)
    await sender.wait_for_pages(wanted)
    return _Sent(plain, published, stored_after_s)


async def _ask_receiver(receiver: Worker, kind: str, prompt: Sequence[int], salt: str) -> Answer:
    words = {
        "dense": word_of("off", salt),
        "guided": word_of("allow", salt),
        "refused": word_of("allow", f"nothing-{salt}"),
    }
    answer = await receiver.ask(prompt, words[kind])
    if answer.outcome.startswith(_SLOW):
        raise _StoreTooSlowError(answer.outcome)
    if not answer.outcome.startswith(_WANTED[kind]):
        raise BenchError(f"a request that was to be {kind} was prefilled otherwise: {answer.outcome or 'no header'}")
    return answer


def word_of(mode: str, salt: str) -> dict[str, str]:
    """What a router says with a request; what is stored under one salt is nothing to another."""
    return {"reuse": mode, "tenant": _TENANT, "salt": salt}
