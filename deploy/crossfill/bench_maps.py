"""What maps bring beside guiding: time to first token of one receiver, prefilled every way, and quality.

One sender and a receiver for each way run side by side; only one of them computes at a time. What is timed is what is
said: an answer that was prefilled otherwise is an error, and a round in which the store was too slow is made again.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import aiohttp

from cache_store.config import StoreSettings
from cache_store.keys import PAGE
from cache_store.pool.geometry import Geometry
from cache_store.pool.shared_memory import remove_abandoned
from crossfill.bench_reuse import (
    WARM_UP_TOKENS,
    check_lengths,
    load_pair,
    load_tokenizer,
    worker_config,
    write_json,
)
from crossfill.bench_reuse_report import Ratios, ratios
from crossfill.bench_reuse_workers import Answer, Worker, word_of
from crossfill.bench_worker import started
from crossfill.console_table import ruled
from crossfill.errors import BenchError
from crossfill.machine import describe_machine
from crossfill.ports import Ports
from engines.reuse.identity import read_identity
from engines.reuse.settings import MapSettings, PairSettings, ReuseMode, ReuseSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from crossfill.progress import Bars
    from engines.config import WorkerConfig
    from engines.reuse.study.map_quality import MapStudy

_FIRST_PORT = 31950
_TIMEOUT_S = 120.0
_POLL_S = 0.02
_PACKED, _SLOTS = "crossfill_reuse_packed_row_blocks_total", "crossfill_reuse_packed_slots_total"
_STORED = "crossfill_store_published_pages_total"
_NOT_READY = ("fallback; reason=store_", "guided; ", "none; reason=nothing_stored")
_KINDS = {"dense": ReuseMode.GUIDED, **{mode.value: mode for mode in ReuseMode}}
# Coprime to the number of orders of four kinds, so that all come, and neighbours differ from the first on.
_STRIDE = 7


@dataclass(frozen=True)
class MapBench:
    """What to run.

    Attributes:
        pair: the receiver's settings of the sender; what maps keep, too.
        receiver: name of the model that takes.
        tokens: lengths of prompts, whole row blocks.
        rounds: of every time to first token.
        texts, needles: continuations, and facts to recall, at each length.
        seed: of texts and facts.
        maps: of the block pool.
    """

    pair: PairSettings
    receiver: str
    tokens: tuple[int, ...]
    rounds: int
    texts: int
    needles: int
    seed: int
    maps: MapSettings


@dataclass
class MapRounds:
    """One answer of each kind for every round, and of the sender what it packed.

    Attributes:
        answers: by kind: dense, guided, map, hybrid.
        packed_after_s: from the end of the sender's answer until all was packed and stored.
        slots: of the block pool.
        again: what was said in rounds that were made again.
    """

    answers: dict[str, list[Answer]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    packed_after_s: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    again: list[str] = field(default_factory=list)

    def over_dense(self, kind: str) -> Ratios:
        """Time to first token over that of a dense prefill."""
        return ratios(self.answers[kind], self.answers["dense"])


def bench_maps(
    bench: MapBench, folders: Mapping[str, Path], *, output: Path | None, console: Console, progress: Bars
) -> None:
    """Measure a pair, print tables, and write everything to `output` as JSON.

    Raises:
        BenchError: a worker did not start or did something else than what was to be timed.
        StartError: no port is free.
    """
    check_lengths(bench.tokens)
    rounds = asyncio.run(_time_workers(bench, folders, progress))
    studies = _study(bench, folders, progress) if bench.texts else {}
    for table in _tables(bench, rounds, studies):
        console.print(table)
    if output:
        told = {
            "machine": describe_machine(),
            "command": sys.argv,
            "pair": bench.pair.model_dump(mode="json"),
            "rounds": {tokens: asdict(one) for tokens, one in rounds.items()},
            "quality": {tokens: asdict(one) for tokens, one in studies.items()},
        }
        write_json(output, told)


async def _time_workers(bench: MapBench, folders: Mapping[str, Path], progress: Bars) -> dict[int, MapRounds]:
    from engines.reuse.study.passages import passage

    tokenizer = load_tokenizer(folders[bench.pair.sender.name])
    with ExitStack() as held:
        held.callback(remove_abandoned, bench.maps.pool)
        ports = held.enter_context(Ports(_FIRST_PORT))
        store = Path(held.enter_context(TemporaryDirectory(prefix="crossfill-bench-"))) / "store"
        configs = _configs(bench, folders, StoreSettings(url=f"lmdb://{store}"), ports)
        progress("starting workers", 0, None)
        async with aiohttp.ClientSession() as session, started(session, *configs.values()) as children:
            workers = {
                kind: Worker(session, config, child.cpu_s)
                for (kind, config), child in zip(configs.items(), children, strict=True)
            }
            takers = {kind: workers[mode.value] for kind, mode in _KINDS.items()}
            measured: dict[int, MapRounds] = {}
            # The first requests of a process find nothing warm.
            for tokens, count in ((WARM_UP_TOKENS, 1), *((tokens, bench.rounds) for tokens in bench.tokens)):
                stage = f"{tokens} tokens, time to first token"
                measured[tokens] = MapRounds()
                progress(stage, 0, count)
                while (done := len(measured[tokens].slots)) < count:
                    prompt = passage(tokenizer, tokens, bench.seed + done)
                    await _round(workers["sender"], takers, prompt, measured[tokens], len(bench.pair.guided))
                    progress(stage, len(measured[tokens].slots), count)
            return {tokens: measured[tokens] for tokens in bench.tokens}


async def _round(
    sender: Worker, takers: Mapping[str, Worker], prompt: Sequence[int], rounds: MapRounds, layers: int
) -> None:
    """One round, noted if every answer is what was to be timed."""
    number = len(rounds.slots)
    salt = f"{len(prompt)}-{number}-{time.time_ns()}"
    before = await sender.metrics()
    await sender.ask(prompt, word_of("allow", salt))
    ended_s = time.perf_counter()
    slots = await _wait_until_packed(sender, before, len(prompt) // PAGE, layers)
    packed_after_s = time.perf_counter() - ended_s
    taken = {}
    orders = list(itertools.permutations(takers))
    for kind in orders[number * _STRIDE % len(orders)]:
        answer = await takers[kind].ask(prompt, word_of("off" if kind == "dense" else "allow", salt))
        wanted = "none; reason=off" if kind == "dense" else "map; " if kind != "guided" else "guided; "
        # Of a hybrid no layer may be sparse enough, which is an answer too.
        too_dense = kind == "hybrid" and answer.outcome.endswith("map=too_dense")
        if not (answer.outcome.startswith(wanted) or too_dense):
            if not answer.outcome.startswith(_NOT_READY) or len(rounds.again) > max(3, number):
                raise BenchError(f"a request that was to be {kind} was prefilled otherwise: {answer.outcome}")
            rounds.again.append(answer.outcome)
            return
        taken[kind] = answer
    for kind, answer in taken.items():
        rounds.answers[kind].append(answer)
    rounds.packed_after_s.append(packed_after_s)
    rounds.slots.append(slots)


async def _wait_until_packed(sender: Worker, before: Mapping[str, float], pages: int, layers: int) -> int:
    """Wait until masses and maps of a prompt are stored; the slots that its maps take."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        now = await sender.metrics()
        grown = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in (_PACKED, _SLOTS, _STORED)}
        if grown[_PACKED] >= pages * layers and grown[_STORED] >= pages:
            # Handed to the store's queue; its last write is a matter of milliseconds.
            await asyncio.sleep(10 * _POLL_S)
            return round(grown[_SLOTS])
        if time.monotonic() > until_s:
            raise BenchError(
                f"the sender packed {grown[_PACKED]:.0f} of {pages * layers} row blocks in {_TIMEOUT_S:.0f} s; "
                "is the pool too small?"
            )
        await asyncio.sleep(_POLL_S)


def _configs(
    bench: MapBench, folders: Mapping[str, Path], store: StoreSettings, ports: Ports
) -> dict[str, WorkerConfig]:
    pair, own = bench.pair, read_identity(bench.receiver, folders[bench.receiver])
    published = tuple(sorted(set(pair.guided.values())))
    parts = {
        "sender": ReuseSettings(
            model=pair.sender,
            publish=published,
            publish_maps=dict.fromkeys(published, pair.map_top_p),
            store=store,
            maps=bench.maps,
        ),
        **{
            mode.value: ReuseSettings(
                model=own,
                pairs=(pair.model_copy(update={"mode": mode}),),
                store=store,
                maps=bench.maps,
            )
            for mode in ReuseMode
        },
    }
    return {
        kind: worker_config(folders[reuse.model.name], kind, reuse, port=ports.take(), tokens=bench.tokens)
        for kind, reuse in parts.items()
    }


def _study(bench: MapBench, folders: Mapping[str, Path], progress: Bars) -> dict[int, MapStudy]:
    from engines.models.needle import needles
    from engines.reuse.study.map_quality import study_maps
    from engines.reuse.study.runs import NEEDLE_TOKENS

    pair = load_pair(bench.pair, bench.receiver, folders)
    asked = needles(pair.receiver.loaded, count=bench.needles, tokens=NEEDLE_TOKENS, seed=bench.seed)
    return {
        tokens: study_maps(pair, tokens, texts=bench.texts, needles=asked, seed=bench.seed, progress=progress)
        for tokens in bench.tokens
    }


def _tables(bench: MapBench, rounds: Mapping[int, MapRounds], studies: Mapping[int, MapStudy]) -> Iterator[Table]:
    slot_bytes, layers = Geometry(1, bench.maps.dtype).slot_bytes, len(bench.pair.guided)
    yield ruled(
        f"Time to first token over dense, {bench.pair.sender.name} → {bench.receiver}",
        f"Medians of {bench.rounds} paired rounds (95 % interval). packed: s after the sender's answer. pool: bytes a "
        "token a layer.",
        (
            ("tokens", "dense, s", "guided", "map", "hybrid", "packed", "pool"),
            *(_times(tokens, one, slot_bytes / layers) for tokens, one in rounds.items()),
        ),
        words=(),
    )
    if not studies:
        return
    yield ruled(
        "The receiver after a prefix prefilled each way",
        "KL × 1000 from its dense run, the share of tokens where both say the same next, recall of facts in the "
        "prefix. density: kept blocks, of maps positions that some head keeps.",
        (
            ("tokens", "way", "density", "KL", "same", "recall"),
            *(row for tokens, one in studies.items() for row in _quality(tokens, one)),
        ),
        words=("way",),
    )
    yield ruled(
        "Attention of all guided layers of one prefix, ms",
        "map: the order of work that costs least by count; paper: Algorithm 2 of MapFlow, the same result.",
        (
            ("tokens", "dense", "guided", "map", "map, paper"),
            *(
                (str(tokens), *(f"{1000 * seconds:.0f}" for seconds in one.kernel_s.values()))
                for tokens, one in studies.items()
            ),
        ),
        words=(),
    )


def _times(tokens: int, one: MapRounds, bytes_a_slot_a_layer: float) -> Sequence[str]:
    return (
        str(tokens),
        f"{statistics.median(answer.ttft_s for answer in one.answers['dense']):.2f}",
        *(_ratio(one.over_dense(kind)) for kind in ("guided", "map", "hybrid")),
        f"{statistics.median(one.packed_after_s):.2f}",
        f"{statistics.median(one.slots) * bytes_a_slot_a_layer / tokens:.0f}",
    )


def _ratio(found: Ratios) -> str:
    between = f" ({found.interval.low:.2f}–{found.interval.high:.2f})" if found.interval else ""
    return f"{found.median:.2f}{between}"


def _quality(tokens: int, one: MapStudy) -> Iterator[tuple[Any, ...]]:
    for way, of in one.ways.items():
        yield (
            str(tokens) if way.value == "dense" else "",
            way.value,
            f"{statistics.fmean(of.densities):.2f}",
            f"{1000 * statistics.fmean(of.divergence):.1f}",
            f"{statistics.fmean(of.agreement):.1%}",
            f"{of.recall:.2f}",
        )
