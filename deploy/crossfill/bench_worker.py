"""Start-up, prefill, prefix-cache and decode speed, and memory, of real workers, one after the other."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from crossfill.child import Child, State
from crossfill.errors import BenchError
from crossfill.plan import worker_spec
from crossfill.up import prepare_sources
from engines.config import WorkerConfig

DEMO_PAIR = ("smollm2-135m-instruct", "smollm2-113m-healed")

_DECODED = 32
_ROUNDS = 3
_BATCH = 4
# Ordinary text tokens of the demo's vocabulary: no special token ends a prompt early.
_TOKENS = range(100, 40_000)


@dataclass(frozen=True)
class LengthResult:
    """At one prompt length: seconds (medians of three rounds) and the rates that follow."""

    tokens: int
    dense_ttft_s: float
    extend_ttft_s: float
    cached_tokens: int
    prefill_tokens_per_s: float
    extend_over_dense: float


@dataclass(frozen=True)
class WorkerResult:
    """One worker: seconds to ready, memory of all its processes, decode tokens per second alone and four at a time."""

    model: str
    startup_s: float
    memory_bytes: int
    decode_tokens_per_s: float
    decode_tokens_per_s_batch: float
    lengths: tuple[LengthResult, ...]


def bench_workers(
    models: Sequence[str], *, models_root: Path, lengths: Sequence[int], output: Path | None, console: Console
) -> list[WorkerResult]:
    """Measure each model's worker and print a table; see `WorkerResult` for what is measured.

    Raises:
        BenchError: a worker did not start or did not answer.
        StartError: a model could not be made.
    """
    folders = prepare_sources(models, models_root)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(models) * (1 + _ROUNDS * len(lengths) + 2))
        for model in models:
            progress.update(task, description=model)
            run = _bench(model, str(folders[model]), lengths, lambda: progress.advance(task))
            results.append(asyncio.run(run))
    console.print(*_tables(results))
    if output:
        output.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")
    return results


async def _bench(model: str, folder: str, lengths: Sequence[int], step: Callable[[], None]) -> WorkerResult:
    config = WorkerConfig(model_path=folder, name=model, port=31900, max_total_tokens=4 * max(lengths) + 4096)
    async with aiohttp.ClientSession() as session, started(session, config) as [child]:
        step()
        measured = [await _bench_length(session, config, length, step) for length in lengths]
        alone = await _decode_rate(session, config, 1)
        step()
        together = await _decode_rate(session, config, _BATCH)
        step()
        assert child.ready_after_s is not None
        return WorkerResult(model, child.ready_after_s, child.memory_bytes(), alone, together, tuple(measured))


@asynccontextmanager
async def started(session: aiohttp.ClientSession, *configs: WorkerConfig) -> AsyncIterator[list[Child]]:
    """Workers that serve, ended with the context.

    Raises:
        BenchError: one of them did not start.
    """
    children = [
        Child(
            worker_spec(config, config.name, Path("var/log") / f"bench-{config.name}.log"),
            lambda _: None,
            backoff_max_s=1,
            clock=time.monotonic,
        )
        for config in configs
    ]
    running = [asyncio.create_task(child.run(session)) for child in children]
    try:
        while any(child.state is not State.READY for child in children):
            if ended := [child for child in children if child.state is State.ENDED]:
                raise BenchError(f"the worker {ended[0].spec.name} {ended[0].detail}")
            await asyncio.sleep(0.2)
        yield children
    finally:
        await asyncio.gather(*(child.stop(grace_s=30) for child in children))
        await asyncio.gather(*running)


async def _bench_length(
    session: aiohttp.ClientSession, config: WorkerConfig, length: int, step: Callable[[], None]
) -> LengthResult:
    # The seed keeps a second run comparable; every round has a prompt of its own, so no dense prefill hits the cache.
    rng = random.Random(length)
    dense, extend, cached = [], [], []
    for _ in range(_ROUNDS):
        prompt = rng.sample(_TOKENS, length)
        dense.append((await _generate(session, config, prompt, 1)).ttft_s)
        again = await _generate(session, config, prompt + rng.sample(_TOKENS, 2), 1)
        extend.append(again.ttft_s)
        cached.append(again.cached_tokens)
        step()
    dense_s, extend_s = statistics.median(dense), statistics.median(extend)
    return LengthResult(length, dense_s, extend_s, min(cached), length / dense_s, extend_s / dense_s)


async def _decode_rate(session: aiohttp.ClientSession, config: WorkerConfig, batch: int) -> float:
    """Tokens per second after the first, of `batch` requests with 128-token prompts, together."""
    rng = random.Random(batch)
    prompts = [rng.sample(_TOKENS, 128) for _ in range(batch)]
    runs = await asyncio.gather(*(_generate(session, config, prompt, _DECODED + 1) for prompt in prompts))
    # From the moment when all of them decode to the moment when the first has finished.
    return batch * _DECODED / max(run.total_s - run.ttft_s for run in runs)


@dataclass(frozen=True)
class _Run:
    ttft_s: float
    total_s: float
    cached_tokens: int


async def _generate(session: aiohttp.ClientSession, config: WorkerConfig, prompt: list[int], new_tokens: int) -> _Run:
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    started = time.perf_counter()
    first, last = None, b""
    async with session.post(f"http://{config.host}:{config.port}/generate", json=body) as response:
        if response.status != 200:
            raise BenchError(f"the worker answered {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - started
                last = line
    if first is None:
        raise BenchError("the worker answered nothing")
    return _Run(first, time.perf_counter() - started, json.loads(last[len(b"data: ") :])["meta_info"]["cached_tokens"])


def _tables(results: Sequence[WorkerResult]) -> Iterator[Table]:
    whole = Table(title="SGLang workers, one at a time")
    prompts = Table(title=f"Prompts (medians of {_ROUNDS}); cached: the same prompt and two more tokens")
    for table, columns in (
        (whole, ("model", "start-up", "memory", "decode tok/s", f"decode ×{_BATCH} tok/s")),
        (prompts, ("model", "tokens", "prefill tok/s", "TTFT", "TTFT cached", "cached / dense")),
    ):
        for column in columns:
            table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        whole.add_row(
            result.model,
            f"{result.startup_s:.0f} s",
            f"{result.memory_bytes / 2**30:.2f} GiB",
            f"{result.decode_tokens_per_s:.1f}",
            f"{result.decode_tokens_per_s_batch:.1f}",
        )
        for length in result.lengths:
            prompts.add_row(
                result.model,
                str(length.tokens),
                f"{length.prefill_tokens_per_s:.0f}",
                f"{length.dense_ttft_s:.2f} s",
                f"{length.extend_ttft_s:.2f} s",
                f"{length.extend_over_dense:.1%}",
            )
    yield from (whole, prompts)
