"""From raw times to the figures of `crossfill bench router`, with their intervals and targets."""

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from crossfill.bench_load import LoadResult
from crossfill.machine import describe_machine

MEDIAN_TARGET_S, P99_TARGET_S, P99_TARGET_LEVEL, CPU_TARGET_S = 0.003, 0.015, 50, 0.003

_RESAMPLES = 1000
# Below this number a p99 is little more than the largest value.
_LEAST_FOR_P99 = 100


@dataclass(frozen=True)
class RouterBench:
    """What to run: streams in flight at each level, seconds measured at each, the router's scorer, and the streams."""

    levels: tuple[int, ...] = (1, 10, 50)
    seconds: float = 20.0
    seed: int = 0
    scorer_file: Path | None = None
    chunks: int = 20
    ttft_s: float = 0.02
    inter_token_s: float = 0.05

    @property
    def stream_s(self) -> float:
        """How long a stream takes."""
        return self.ttft_s + (self.chunks - 1) * self.inter_token_s


@dataclass(frozen=True)
class Estimate:
    """A difference in seconds, with the ends of its 95 % bootstrap interval."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class LevelResult:
    """One level of load; times in seconds. A p99 is None where a side has fewer than 100 requests.

    `in_flight_mean` is what was reached on the routed side; `reads` are the median numbers of pieces in which a stream
    arrived, 22 events if none came together; `busy` is CPU time per second of router and load generator.
    """

    in_flight: int
    in_flight_mean: float
    requests_direct: int
    requests_routed: int
    direct_median_s: float
    routed_median_s: float
    added_median: Estimate
    direct_p99_s: float | None
    routed_p99_s: float | None
    added_p99: Estimate | None
    router_cpu_s: float
    router_idle_cpu_per_s: float
    reads_direct: float
    reads_routed: float
    busy_router: float
    busy_load: float
    routed_models: dict[str, int]


@dataclass(frozen=True)
class Level:
    """One level of load, through the router and through the floor."""

    router: LevelResult
    floor: LevelResult

    @property
    def cpu_ratio(self) -> float:
        """CPU time of a request, router over floor."""
        return self.router.router_cpu_s / self.floor.router_cpu_s


def level_result(level: int, load: LoadResult, idle_cpu_per_s: float, bench: RouterBench) -> LevelResult:
    """The figures of one level of `bench`; the router used `idle_cpu_per_s` without load."""
    direct, routed = load.ttft_s["direct"], load.ttft_s["routed"]
    rng = random.Random(bench.seed)
    has_p99 = min(len(direct), len(routed)) >= _LEAST_FOR_P99
    cpu_s = load.router_cpu_s - idle_cpu_per_s * load.wall_s
    return LevelResult(
        in_flight=level,
        in_flight_mean=sum(load.stream_s["routed"]) / bench.seconds,
        requests_direct=len(direct),
        requests_routed=len(routed),
        direct_median_s=statistics.median(direct),
        routed_median_s=statistics.median(routed),
        added_median=_added(direct, routed, statistics.median, rng),
        direct_p99_s=p99(direct) if has_p99 else None,
        routed_p99_s=p99(routed) if has_p99 else None,
        added_p99=_added(direct, routed, p99, rng) if has_p99 else None,
        router_cpu_s=cpu_s / load.routed_requests,
        router_idle_cpu_per_s=idle_cpu_per_s,
        reads_direct=statistics.median(load.reads["direct"]),
        reads_routed=statistics.median(load.reads["routed"]),
        busy_router=load.router_cpu_s / load.wall_s,
        busy_load=load.load_cpu_s / load.wall_s,
        routed_models=load.routed_models,
    )


def p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % of `values` do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _added(
    direct: Sequence[float], routed: Sequence[float], of: Callable[[Sequence[float]], float], rng: random.Random
) -> Estimate:
    """The difference of a statistic between the sides, with its percentile bootstrap interval."""
    differences = sorted(
        of(rng.choices(routed, k=len(routed))) - of(rng.choices(direct, k=len(direct))) for _ in range(_RESAMPLES)
    )
    return Estimate(
        of(routed) - of(direct), differences[round(0.025 * _RESAMPLES)], differences[round(0.975 * _RESAMPLES) - 1]
    )


def report(bench: RouterBench, results: Sequence[Level]) -> dict[str, Any]:
    """Everything as JSON data, with what is needed to repeat it."""
    return {
        "machine": describe_machine(),
        "command": sys.argv,
        "bench": {**asdict(bench), "scorer_file": str(bench.scorer_file) if bench.scorer_file else None},
        "targets": {
            "added_median_s": MEDIAN_TARGET_S,
            "added_p99_s": P99_TARGET_S,
            "router_cpu_s": CPU_TARGET_S,
            "p99_at_in_flight": P99_TARGET_LEVEL,
        },
        "levels": [{**asdict(level), "cpu_ratio": level.cpu_ratio} for level in results],
    }


def table(bench: RouterBench, results: Sequence[Level]) -> Table:
    """The figures for people, with the targets below."""
    shown = Table(
        title=f"Router, streams of {bench.chunks} chunks at {1 / bench.inter_token_s:.0f} a second; "
        "added is routed less direct, with its 95 % interval; "
        f"keys on, scorer {'learned' if bench.scorer_file else 'heuristic'}",
        caption=f"Targets at {P99_TARGET_LEVEL} in flight: added median ≤ {MEDIAN_TARGET_S * 1e3:.0f} ms, "
        f"p99 ≤ {P99_TARGET_S * 1e3:.0f} ms, CPU ≤ {CPU_TARGET_S * 1e3:.0f} ms a request. All times in ms. "
        "The floor is a bare pass-through on the same libraries.",
    )
    for name in ("in flight", "requests", "TTFT direct", "routed", "added", "p99 direct", "routed", "added", "CPU"):
        shown.add_column(name, justify="right")
    for level in results:
        shown.add_row(
            f"{level.router.in_flight} ({level.router.in_flight_mean:.1f})",
            *_cells(level.router),
            f"{_ms(level.router.router_cpu_s)} ({level.cpu_ratio:.2f} × floor)",
        )
        shown.add_row("floor", *_cells(level.floor), _ms(level.floor.router_cpu_s), style="dim", end_section=True)
    return shown


def _cells(result: LevelResult) -> tuple[str, ...]:
    return (
        f"{result.requests_direct} + {result.requests_routed}",
        _ms(result.direct_median_s),
        _ms(result.routed_median_s),
        _interval(result.added_median),
        _ms(result.direct_p99_s),
        _ms(result.routed_p99_s),
        _interval(result.added_p99),
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.2f}"


def _interval(added: Estimate | None) -> str:
    return "–" if added is None else f"{_ms(added.value_s)} [{_ms(added.low_s)}, {_ms(added.high_s)}]"
