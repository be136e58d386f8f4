"""The load generator of `crossfill bench router`: one process, a plan on stdin, what it measured on stdout.

Streams arrive as a Poisson process. It is lean, so that it measures servers and not itself: requests are made
beforehand, a connection is one protocol object, and of a stream only the first event with content is looked at while it
comes; whether it was complete is checked when it has ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

import uvloop

Side = Literal["direct", "routed"]

_PATH = "/v1/chat/completions"
_STREAM_TIMEOUT_S = 30.0
_OPENED_AHEAD = 2  # connections for each stream in flight: enough for the peaks of Poisson arrivals
_TOLD_ERRORS = 5

_CONTENT = re.compile(rb'"content":"[^"]')
_MODEL = re.compile(rb"\r\nx-crossfill-model: ([^\r]+)")
_END = b"0\r\n\r\n"

_SENTENCES = (
    "Our web shop sends a mail after each order, and since Monday some customers get it twice.",
    "The log shows one request, one row in the table and two calls of the mail server within a second.",
    "Please compare the two offers below and say in three sentences which one you would take.",
    "def total(prices): return sum(p * 1.19 for p in prices if p is not None)",
    "Can you explain why the sky is blue, in words that a child of eight understands?",
    "Prove that the sum of the first n odd numbers is n squared, step by step.",
    "Ich brauche eine kurze Zusammenfassung des Textes für meine Kollegin, höflich und ohne Fachwörter.",
    "The meeting moved to Thursday at ten; Anna brings the figures of the last quarter.",
    "¿Qué diferencia hay entre una lista y una tupla, y cuándo conviene usar cada una?",
    "Write a function that merges overlapping intervals, with tests, and give its complexity.",
    "It was raining when we left the hotel, so we took the tram to the old harbour.",
    "What is the capital of Australia?",
    "The table has columns id, customer, placed_at and state; about forty million rows; an index on customer only.",
    "First check the cable, then restart the router, then look whether the green light is on.",
)


@dataclass(frozen=True)
class Address:
    """A server that takes chat requests: `model` is what to ask it for, `key` the API key if it wants one."""

    host: str
    port: int
    model: str
    key: str | None = None


@dataclass(frozen=True)
class LoadPlan:
    """One level of load. On average `in_flight` streams go through the router and as many directly to the workers.

    Each arrival goes to either side by the toss of a coin. `stream_s` is how long a stream of `chunks` chunks takes;
    arrivals of the first `warm_up_s` seconds load the servers and are not measured, those of `seconds` after it are.
    """

    router: Address
    workers: tuple[Address, ...]
    router_pid: int
    in_flight: int
    stream_s: float
    chunks: int
    warm_up_s: float
    seconds: float
    seed: int

    @classmethod
    def from_json(cls, text: str) -> LoadPlan:
        """The inverse of `json.dumps(asdict(plan))`."""
        data = json.loads(text)
        workers = tuple(Address(**worker) for worker in data.pop("workers"))
        return cls(router=Address(**data.pop("router")), workers=workers, **data)


@dataclass
class LoadResult:
    """What was measured, in seconds.

    `ttft_s` is from just before a request is written to its first content. `router_cpu_s` is the router's CPU time from
    before the first arrival to the end of the last stream, over `wall_s`, for `routed_requests` requests in all.
    """

    ttft_s: dict[Side, list[float]] = field(default_factory=lambda: {"direct": [], "routed": []})
    stream_s: dict[Side, list[float]] = field(default_factory=lambda: {"direct": [], "routed": []})
    reads: dict[Side, list[int]] = field(default_factory=lambda: {"direct": [], "routed": []})
    routed_models: dict[str, int] = field(default_factory=dict)
    routed_requests: int = 0
    failures: int = 0
    told_failures: list[str] = field(default_factory=list)
    router_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    wall_s: float = 0.0

    def fail(self, text: str) -> None:
        """Count a failure; the first few are told."""
        self.failures += 1
        if len(self.told_failures) < _TOLD_ERRORS:
            self.told_failures.append(text)


def cpu_time_s(pid: int) -> float:
    """CPU time that all threads of a process of this machine have used, to the nanosecond.

    `/proc/<pid>/stat` has the same number in steps of 10 ms, too coarse for a few requests. The clock id is what
    clock_getcpuclockid(3) makes of a pid on Linux.
    """
    return time.clock_gettime((~pid << 3) | 2)


class _Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request on it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_open = True
        self._parts: list[bytes] = []
        self._tail = b""
        self._started_s = 0.0
        self._ttft_s: float | None = None
        self._ended: asyncio.Future[_Stream] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> asyncio.Future[_Stream]:
        """Write a request; the future is its whole answer."""
        self._parts, self._tail, self._ttft_s = [], b"", None
        self._ended = asyncio.get_running_loop().create_future()
        self._started_s = time.perf_counter()
        self.transport.write(request)
        return self._ended

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._parts.append(data)
        if self._ttft_s is None and _CONTENT.search(data):
            self._ttft_s = now_s - self._started_s
        self._tail = (self._tail + data)[-len(_END) :]
        is_refused = len(self._parts) == 1 and not data.startswith(b"HTTP/1.1 200")
        if is_refused or self._tail == _END:
            self._end(_Stream(self._ttft_s, now_s - self._started_s, len(self._parts), b"".join(self._parts)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(_Stream(None, 0.0, len(self._parts), b"".join(self._parts)))

    def _end(self, stream: _Stream) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(stream)


@dataclass(frozen=True)
class _Stream:
    ttft_s: float | None
    stream_s: float
    reads: int
    answer: bytes

    def fault(self, chunks: int) -> str | None:
        """Why this is not a complete stream of `chunks` chunks."""
        contents = len(_CONTENT.findall(self.answer))
        if self.ttft_s is None or contents != chunks or b"data: [DONE]" not in self.answer:
            return f"{contents} of {chunks} chunks: {self.answer[:300]!r}"
        return None


class _Server:
    """Requests to one address, on connections that are kept."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Connection] = []

    async def open(self, count: int) -> None:
        """Open connections ahead."""
        self._idle += [await self._connect() for _ in range(count)]

    async def stream(self, messages: list[dict[str, str]]) -> _Stream:
        """Ask and wait for the end."""
        request = self._request(messages)
        connection = self._idle.pop() if self._idle else await self._connect()
        while not connection.is_open:
            connection = self._idle.pop() if self._idle else await self._connect()
        async with asyncio.timeout(_STREAM_TIMEOUT_S):
            stream = await connection.ask(request)
        self._idle.append(connection)
        return stream

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self.address.host, self.address.port))[1]

    def _request(self, messages: list[dict[str, str]]) -> bytes:
        body = json.dumps({"model": self.address.model, "messages": messages, "stream": True}).encode()
        key = f"authorization: Bearer {self.address.key}\r\n" if self.address.key else ""
        head = (
            f"POST {_PATH} HTTP/1.1\r\nhost: {self.address.host}:{self.address.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Load:
    """Runs one plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._router = _Server(plan.router)
        self._workers = {worker.model: _Server(worker) for worker in plan.workers}
        self._result = LoadResult(routed_models=dict.fromkeys(self._workers, 0))

    async def run(self) -> LoadResult:
        """Load the servers as planned and wait for the last stream."""
        plan = self._plan
        for server in (self._router, *self._workers.values()):
            await server.open(_OPENED_AHEAD * plan.in_flight)
        arrivals = self._arrivals()
        gc.disable()
        started_s, router_s, load_s = time.perf_counter(), cpu_time_s(plan.router_pid), time.process_time()
        await self._run_arrivals(arrivals)
        self._result.router_cpu_s = cpu_time_s(plan.router_pid) - router_s
        self._result.load_cpu_s = time.process_time() - load_s
        self._result.wall_s = time.perf_counter() - started_s
        for server in (self._router, *self._workers.values()):
            server.close()
        return self._result

    def _arrivals(self) -> list[_Arrival]:
        """Twice the rate that keeps `in_flight` streams open, because each side gets half of it."""
        plan, rng = self._plan, self._rng
        rate = 2 * plan.in_flight / plan.stream_s
        arrivals, at_s = [], rng.expovariate(rate)
        while at_s < plan.warm_up_s + plan.seconds:
            side: Side = "routed" if rng.random() < 0.5 else "direct"
            arrivals.append(_Arrival(at_s, side, conversation(rng), is_measured=at_s >= plan.warm_up_s))
            at_s += rng.expovariate(rate)
        return arrivals

    async def _run_arrivals(self, arrivals: list[_Arrival]) -> None:
        loop = asyncio.get_running_loop()
        zero_s = loop.time()
        async with asyncio.TaskGroup() as streams:
            for arrival in arrivals:
                await asyncio.sleep(zero_s + arrival.at_s - loop.time())
                streams.create_task(self._stream(arrival))

    async def _stream(self, arrival: _Arrival) -> None:
        result, side = self._result, arrival.side
        server = self._router if side == "routed" else self._worker()
        try:
            stream = await server.stream(arrival.messages)
        except (OSError, TimeoutError) as error:
            result.fail(f"{side}: {type(error).__name__} {error}")
            return
        if (fault := stream.fault(self._plan.chunks)) is not None:
            result.fail(f"{side}: {fault}")
            return
        if side == "routed":
            result.routed_requests += 1
            if (model := _MODEL.search(stream.answer)) is not None:
                result.routed_models[model[1].decode()] += 1
        if arrival.is_measured and stream.ttft_s is not None:
            result.ttft_s[side].append(stream.ttft_s)
            result.stream_s[side].append(stream.stream_s)
            result.reads[side].append(stream.reads)

    def _worker(self) -> _Server:
        """A worker, drawn in the proportions in which the router has chosen so far: both sides load them alike."""
        shares = self._result.routed_models
        return self._workers[self._rng.choices(list(shares), [count + 1 for count in shares.values()])[0]]


@dataclass(frozen=True)
class _Arrival:
    at_s: float
    side: Side
    messages: list[dict[str, str]]
    is_measured: bool


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """One to three user turns with the answers between them, about 200 to 2000 characters in all."""
    users = rng.randint(1, 3)
    roles = ["user", "assistant"] * (users - 1) + ["user"]
    length = rng.randint(200, 2000) // len(roles)
    return [{"role": role, "content": _text(rng, length)} for role in roles]


def _text(rng: random.Random, length: int) -> str:
    text = rng.choice(_SENTENCES)
    while len(text) < length:
        text += rng.choice((" ", " ", "\n")) + rng.choice(_SENTENCES)
    return text[: max(length, 40)]


def main() -> None:
    """Read a LoadPlan from stdin, write a LoadResult to stdout, both as JSON."""
    plan = LoadPlan.from_json(sys.stdin.read())
    sys.stdout.write(json.dumps(asdict(uvloop.run(Load(plan).run()))))


if __name__ == "__main__":
    main()
