"""What the router adds to the time to first token, and what it costs in CPU time, measured on this machine.

The router runs as `crossfill serve` before a fake worker for each of two models (`crossfill fake-worker`, 20 tokens a
second), and a load generator sends streams as a Poisson process: processes of their own, on the loopback interface.

**Paired.** Each arrival goes through the router or directly to a worker by the toss of a coin, so both sides are
measured in the same seconds, on workers and a load generator that are equally busy, and what these cost cancels in the
difference. The arrival rate is doubled, so that each side has the wanted number of streams in flight; the workers
therefore serve twice as many. The alternative, phases with and without the router, leaves the direct side a machine
with a free core and the routed side one without, and lets anything else that runs in one of the phases into the
difference.

**CPU time** is the router's from before the first arrival to the end of the last stream, less what it uses idle (its
probes), over the requests routed in that time; connections of clients are opened before.

**Floor.** After the router, at each level, a bare pass-through on the same libraries (`bench_pass_through`) gets the
same load. CPU times differ between machines and hours; router over floor differs less.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import date
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crossfill.bench_load import Address, LoadPlan, LoadResult, cpu_time_s
from crossfill.bench_router_report import Level, LevelResult, RouterBench, level_result, report, table
from crossfill.errors import BenchError
from crossfill.keys_file import add_key
from crossfill.ports import Ports

_MODELS = ("small", "large")

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_IDLE_S = 3.0


def bench_router(bench: RouterBench, *, output: Path | None, console: Console) -> list[Level]:
    """Measure each level, print a table, and write everything to `output` as JSON.

    Raises:
        BenchError: something did not start, or a stream failed, which would make every figure worthless.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory(prefix="crossfill-bench-")))
        sides, workers = held.enter_context(_started(bench, folder))
        progress = held.enter_context(Progress(*columns, console=console))
        task = progress.add_task("idle", total=None)
        runs = [_Run(bench, *side, workers, lambda seconds: progress.advance(task, seconds)) for side in sides]
        progress.update(task, total=sum(run.takes_in_all_s for run in runs))
        for run in runs:
            run.warm_up()
        results = []
        for in_flight in bench.levels:
            progress.update(task, description=f"{in_flight} in flight")
            router, floor = (run.measure(in_flight) for run in runs)
            results.append(Level(router, floor))
    console.print(table(bench, results))
    if output:
        output.write_text(json.dumps(report(bench, results), indent=2) + "\n", encoding="utf-8")
    return results


class _Run:
    """Loads a running router; `advance` is told of seconds that have passed."""

    def __init__(
        self,
        bench: RouterBench,
        router: Address,
        router_pid: int,
        workers: tuple[Address, ...],
        advance: Callable[[float], None],
    ) -> None:
        self._bench = bench
        self._router = router
        self._router_pid = router_pid
        self._idle_cpu_per_s = 0.0
        self._workers = workers
        self._advance = advance

    @property
    def _warm_up_s(self) -> float:
        return 1.5 * self._bench.stream_s

    def takes_s(self, measured_s: float) -> float:
        """How long a load of `measured_s` takes in all."""
        return self._warm_up_s + measured_s + self._bench.stream_s

    @property
    def takes_in_all_s(self) -> float:
        """How long warming up and measuring takes."""
        return _IDLE_S + self.takes_s(1.0) + len(self._bench.levels) * self.takes_s(self._bench.seconds)

    def warm_up(self) -> None:
        """Send first requests, which import and connect, and look what the router uses without any."""
        self.load(in_flight=5, seconds=1.0)
        before_s = cpu_time_s(self._router_pid)
        time.sleep(_IDLE_S)
        self._advance(_IDLE_S)
        self._idle_cpu_per_s = (cpu_time_s(self._router_pid) - before_s) / _IDLE_S

    def measure(self, in_flight: int) -> LevelResult:
        """The figures of one level."""
        load = self.load(in_flight=in_flight, seconds=self._bench.seconds)
        return level_result(in_flight, load, self._idle_cpu_per_s, self._bench)

    def load(self, *, in_flight: int, seconds: float) -> LoadResult:
        """Run the load generator; raises BenchError if a single stream failed."""
        plan = LoadPlan(
            router=self._router,
            workers=self._workers,
            router_pid=self._router_pid,
            in_flight=in_flight,
            stream_s=self._bench.stream_s,
            chunks=self._bench.chunks,
            warm_up_s=self._warm_up_s,
            seconds=seconds,
            seed=self._bench.seed + in_flight,
        )
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "crossfill.bench_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as generator:
            output, errors = self._watched(generator, json.dumps(asdict(plan)), self.takes_s(seconds))
        if generator.returncode:
            raise BenchError(f"the load generator failed: {errors.strip()[-500:]}")
        result = LoadResult(**json.loads(output))
        if result.failures:
            raise BenchError(f"{result.failures} streams failed: {'; '.join(result.told_failures)}")
        if not result.ttft_s["direct"] or not result.ttft_s["routed"]:
            raise BenchError(f"no request on one of the sides in {seconds:g} s; measure longer")
        return result

    def _watched(self, generator: subprocess.Popen[str], text: str, seconds: float) -> tuple[str, str]:
        """Output and errors of a process that takes about `seconds`."""
        told_s = 0.0
        unsent: str | None = text
        while True:
            try:
                output, errors = generator.communicate(unsent, timeout=0.25)
            except subprocess.TimeoutExpired:
                unsent = None
                self._advance(min(0.25, seconds - told_s))
                told_s = min(told_s + 0.25, seconds)
            else:
                self._advance(seconds - told_s)
                return output, errors


@contextmanager
def _started(bench: RouterBench, folder: Path) -> Iterator[tuple[tuple[tuple[Address, int], ...], tuple[Address, ...]]]:
    """Address and pid of the router and of the floor, and the workers' addresses."""
    with Ports(31900) as ports, ExitStack() as held:
        workers = []
        for model in _MODELS:
            script, port = folder / f"{model}.yaml", ports.take()
            script.write_text(yaml.safe_dump(_script(bench, model)), encoding="utf-8")
            held.enter_context(_process(folder, model, "fake-worker", str(script), "--port", str(port)))
            workers.append(Address("127.0.0.1", port, model))
        port, file, keys = ports.take(), folder / "router.yaml", folder / "keys"
        key, _ = add_key(keys, "bench", "", date.today())
        file.write_text(yaml.safe_dump(_router_config(bench, workers, port, keys)), encoding="utf-8")
        router = held.enter_context(_process(folder, "router", "serve", str(file)))
        floor_port = ports.take()
        urls = [f"{worker.model}=http://{worker.host}:{worker.port}" for worker in workers]
        floor = held.enter_context(
            _process(folder, "floor", str(floor_port), *urls, module="crossfill.bench_pass_through")
        )
        _wait_until_ready(port, router, folder / "router.log")
        _wait_until_ready(floor_port, floor, folder / "floor.log")
        sides = (
            (Address("127.0.0.1", port, "auto", key), router.pid),
            (Address("127.0.0.1", floor_port, "auto"), floor.pid),
        )
        yield sides, tuple(workers)


def _script(bench: RouterBench, model: str) -> dict[str, Any]:
    chunks = [f" word{number}" for number in range(bench.chunks)]
    reply = {"chunks": chunks, "ttft_s": bench.ttft_s, "inter_token_s": bench.inter_token_s}
    return {"model": model, "responses": [reply]}


def _router_config(bench: RouterBench, workers: Sequence[Address], port: int, keys: Path) -> dict[str, Any]:
    routing: dict[str, Any] = {"ladder": list(_MODELS)}
    if bench.scorer_file is not None:
        routing["scorer"] = {"kind": "learned", "path": str(bench.scorer_file.absolute())}
    models = [{"name": worker.model, "workers": [f"http://{worker.host}:{worker.port}"]} for worker in workers]
    return {"listen": {"port": port}, "auth": {"keys_file": str(keys)}, "models": models, "routing": routing}


@contextmanager
def _process(folder: Path, name: str, *arguments: str, module: str = "crossfill") -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, "-P", "-m", module, *arguments], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BenchError(f"the router did not become ready: {log.read_text(encoding='utf-8').strip()[-500:]}")
        time.sleep(0.05)


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        answer = json.loads(connection.getresponse().read())
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return bool(answer["status"] == "ready")
