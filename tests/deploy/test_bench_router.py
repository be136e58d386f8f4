"""The router benchmark measures both sides, and refuses to report when a stream fails. Speeds are not judged here."""

import json
import random

import pytest
from rich.console import Console

from crossfill import bench_router as bench_module
from crossfill.bench_load import conversation, cpu_time_s
from crossfill.bench_router import bench_router
from crossfill.bench_router_report import RouterBench, p99
from crossfill.errors import BenchError


def quiet():
    return Console(quiet=True)


def test_both_sides_are_measured_and_written_down(tmp_path):
    output = tmp_path / "result.json"
    levels = bench_router(RouterBench(levels=(3, 6), seconds=1.5), output=output, console=quiet())
    assert [level.router.in_flight for level in levels] == [3, 6]
    assert all(level.cpu_ratio > 0 for level in levels)
    for side in [side for level in levels for side in (level.router, level.floor)]:
        assert side.requests_direct > 0
        assert side.requests_routed > 0
        assert sum(side.routed_models.values()) >= side.requests_routed
        # Of a stream that takes 0.97 s at the least, the first chunk comes after 20 ms.
        assert 0.02 <= side.direct_median_s < 0.97
        assert 0.02 <= side.routed_median_s < 0.97
        assert side.added_median.value_s == pytest.approx(side.routed_median_s - side.direct_median_s)
        assert side.added_median.low_s <= side.added_median.high_s
        assert side.router_cpu_s > 0
        assert min(side.reads_direct, side.reads_routed) > 1, "chunks came together"
        assert side.added_p99 is None, "too few requests for one"
    report = json.loads(output.read_text())
    written = [level["router"]["requests_routed"] for level in report["levels"]]
    assert written == [level.router.requests_routed for level in levels]
    # The floor knows no keys and no policy: its models take turns.
    floor = report["levels"][1]["floor"]["routed_models"]
    assert abs(floor["small"] - floor["large"]) <= 1
    assert report["machine"]["cores"] >= 1


def test_a_failed_stream_is_no_measurement(monkeypatch):
    # One chunk less than the load generator expects.
    script = bench_module._script
    monkeypatch.setattr(bench_module, "_script", lambda *given: shortened(script(*given)))
    with pytest.raises(BenchError, match=r"streams failed: .*19 of 20 chunks"):
        bench_router(RouterBench(levels=(3,), seconds=1.0), output=None, console=quiet())


def shortened(script):
    del script["responses"][0]["chunks"][-1]
    return script


def test_p99_is_the_nearest_rank():
    assert p99(list(range(1, 101))) == 99
    assert p99([5.0]) == 5.0


def test_conversations_are_seeded_and_of_mixed_length():
    rng = random.Random(1)
    lengths = [sum(len(turn["content"]) for turn in conversation(rng)) for _ in range(300)]
    assert min(lengths) < 400
    assert 1500 < max(lengths) <= 2100
    assert conversation(random.Random(2)) == conversation(random.Random(2))


def test_cpu_time_of_another_process_grows():
    import os

    before = cpu_time_s(os.getpid())
    sum(range(200_000))
    assert cpu_time_s(os.getpid()) > before
