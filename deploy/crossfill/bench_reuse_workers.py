"""Times to first token of two real workers that share a store, paired: what is compared follows one another at once.

**What is timed is what is said.** A guided request's answer must say that it was guided, and a dense one's that it was
not; a sender's store must have grown by just the pages that were to be published; else there is no figure but an error.
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
_STORED = "crossfill_store_published_pages_total"


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        ttft_s: from sending it to the first event of its answer.
        attention_s: of that, within attention.
        waited_s: of that, for the store.
        missed_layers: of its chunks, computed densely although their request was guided.
        outcome: the worker's word on reuse.
    """

    ttft_s: float
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
    """

    dense: list[Answer] = field(default_factory=list)
    guided: list[Answer] = field(default_factory=list)
    refused: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)
    published: list[Answer] = field(default_factory=list)
    stored_after_s: list[float] = field(default_factory=list)


class Worker:
    """Asks a running worker over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, config: WorkerConfig) -> None:
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
        before = await self.metrics()
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
        after = await self.metrics()
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        missed = sum(value for name, value in grown.items() if name.startswith(_MISSED))
        return Answer(first_s, grown.get(_ATTENTION, 0.0), grown.get(_WAITED, 0.0), round(missed), outcome)

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
        BenchError: an answer is not what was to be timed.
    """
    rounds = Rounds()
    orders = list(itertools.permutations(("dense", "guided", "refused")))
    for number, prompt in enumerate(prompts):
        salt = f"{len(prompt)}-{number}-{time.time_ns()}"
        await _ask_sender(sender, prompt, salt, rounds, pages=len(prompt) // page, plain_first=number % 2 == 1)
        for kind in orders[number % len(orders)]:
            await _ask_receiver(receiver, kind, prompt, salt, rounds)
        step(number + 1)
    return rounds


async def _ask_sender(
    sender: Worker, prompt: Sequence[int], salt: str, rounds: Rounds, *, pages: int, plain_first: bool
) -> None:
    before = await sender.stored_pages()
    if plain_first:
        rounds.plain.append(await sender.ask(prompt, None))
    answer = await sender.ask(prompt, _word("allow", salt))
    ended_s = time.perf_counter()
    await sender.wait_for_pages(before + pages)
    rounds.stored_after_s.append(time.perf_counter() - ended_s)
    rounds.published.append(answer)
    if not plain_first:
        rounds.plain.append(await sender.ask(prompt, None))
    await sender.wait_for_pages(before + pages)


async def _ask_receiver(receiver: Worker, kind: str, prompt: Sequence[int], salt: str, rounds: Rounds) -> None:
    words = {
        "dense": _word("off", salt),
        "guided": _word("allow", salt),
        "refused": _word("allow", f"nothing-{salt}"),
    }
    wanted = {"dense": "none; reason=off", "guided": "guided; ", "refused": "none; reason=nothing_stored"}
    answer = await receiver.ask(prompt, words[kind])
    if not answer.outcome.startswith(wanted[kind]):
        raise BenchError(f"a request that was to be {kind} was prefilled otherwise: {answer.outcome or 'no header'}")
    getattr(rounds, kind).append(answer)


def _word(mode: str, salt: str) -> dict[str, str]:
    return {"reuse": mode, "tenant": _TENANT, "salt": salt}
