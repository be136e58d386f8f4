"""Several router processes on one address: real processes, real sockets, a fake worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.mmap_dict import MmapedDict

from engines.fake_worker import Reply
from router.server.serve import START_FAILED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PROGRAM = "from crossfill.cli import main; main()"
STREAM = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


@dataclass
class Service:
    """A parent with its children, seen from outside. `pids` are those started so far in each slot."""

    process: asyncio.subprocess.Process
    folder: Path
    url: str = ""
    log: str = ""
    pids: dict[int, list[int]] = field(default_factory=dict)

    async def read_log(self, until: Callable[[], bool]) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while not until():
                line = (await self.process.stderr.readline()).decode()
                assert line, f"the router ended:\n{self.log}"
                self._note(line)

    def _note(self, line: str) -> None:
        self.log += line
        if match := re.search(r"process (\d+) started \(pid (\d+)\)", line):
            self.pids.setdefault(int(match[1]), []).append(int(match[2]))
        if match := re.search(r"processes running on (\S+)", line):
            self.url = match[1]

    def healthy(self) -> int:
        return self.log.count("is healthy: its probe succeeded")

    async def end(self) -> int:
        _, errors = await asyncio.wait_for(self.process.communicate(), 60)
        self.log += errors.decode()
        assert self.process.returncode is not None
        return self.process.returncode

    async def kill(self) -> None:
        """End what a test has left running, the children too if it failed because they outlive their parent."""
        if self.process.returncode is None:
            self.process.kill()
        for pid in (pid for started in self.pids.values() for pid in started if self._is_mine(pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.communicate()

    def _is_mine(self, pid: int) -> bool:
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def served(self) -> dict[str, float]:
        """Chat requests that each slot has counted itself, from the files that the processes write."""
        counted = {}
        for path in self.folder.glob("crossfill-metrics-*/counter_*.db"):
            entries = MmapedDict.read_all_values_from_file(str(path))
            counted[path.stem] = sum(value for key, value, *_ in entries if '"crossfill_requests_total"' in key)
        return counted


def router_file(folder: Path, workers: list[str], **listen: Any) -> Path:
    path = folder / "router.yaml"
    config = {
        "listen": {"port": 0} | listen,
        "models": [{"name": "m", "workers": workers}],
        "health": {"interval_s": 0.05},
    }
    path.write_text(json.dumps(config))
    return path


@asynccontextmanager
async def launch(folder: Path, file: Path, *options: str) -> AsyncIterator[Service]:
    """A service that has been started and nothing more, and of which nothing is left at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", PROGRAM, "serve", str(file), *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=folder,
    )
    service = Service(process, folder)
    try:
        yield service
    finally:
        await service.kill()


@asynccontextmanager
async def serving(folder: Path, workers: list[str], processes: int) -> AsyncIterator[Service]:
    """A service of which every process sees every worker."""
    async with launch(folder, router_file(folder, workers, processes=processes)) as service:
        await service.read_log(lambda: bool(service.url) and service.healthy() == processes * len(workers))
        yield service


async def scrape(url: str) -> dict[str, float]:
    """A scrape on a connection of its own."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


def requests_of(scraped: dict[str, float]) -> float:
    return scraped.get('crossfill_requests_total{model="m",outcome="ok"}', 0.0)


async def chat(url: str, count: int) -> None:
    for _ in range(count):
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{url}/v1/chat/completions", json={**STREAM, "stream": False}, timeout=30)
            assert answer.status_code == 200


async def until_counted(url: str, count: float) -> None:
    """A request is counted when its answer has gone out, which its client may see a moment earlier."""
    async with asyncio.timeout(10):
        while requests_of(await scrape(url)) < count:  # noqa: ASYNC110 - another process, not an event
            await asyncio.sleep(0.01)


async def chat_until(service: Service, is_enough: Callable[[dict[str, float]], bool], counted: int = 0) -> int:
    """Send requests until `is_enough` of what each slot has served; how many are counted then, with those before.

    The kernel decides which process gets a connection, and may pass one over for long.
    """
    async with asyncio.timeout(60):
        while not is_enough(service.served()):
            await chat(service.url, 20)
            counted += 20
            await until_counted(service.url, counted)
    return counted


async def test_every_scrape_shows_all_processes(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    async with serving(tmp_path, [worker.url], 4) as service:
        count = await chat_until(service, lambda served: len(served) == 4 and all(served.values()))
        scrapes = [await scrape(service.url) for _ in range(10)]
        assert [requests_of(scraped) for scraped in scrapes] == [count] * 10
        durations = [scraped['crossfill_request_duration_seconds_count{model="m"}'] for scraped in scrapes]
        assert durations == [count] * 10
        assert all(scraped['crossfill_worker_up{model="m",worker="m/0"}'] == 1 for scraped in scrapes)
        # A scrape is a request too: this one rises while it is looked at.
        looks = [scraped.get('crossfill_http_requests_total{route="/metrics",status="200"}', 0) for scraped in scrapes]
        assert looks == sorted(looks)
        assert looks[-1] > looks[0]
        assert not any("pid=" in name for name in scrapes[0])


async def test_in_flight_is_the_sum_over_processes(fake: Any, tmp_path: Path) -> None:
    worker = await fake(Reply(hang=True))
    name = 'crossfill_in_flight_requests{model="m",worker="m/0"}'
    async with serving(tmp_path, [worker.url], 2) as service:
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(hang(service.url)) for _ in range(12)]
            async with asyncio.timeout(20):
                while len(worker.requests) < 12:  # noqa: ASYNC110 - another process, not an event
                    await asyncio.sleep(0.01)
            assert [(await scrape(service.url))[name] for _ in range(4)] == [12] * 4
            for task in waiting:
                task.cancel()
        async with asyncio.timeout(10):
            while (await scrape(service.url))[name]:  # noqa: ASYNC110 - another process, not an event
                await asyncio.sleep(0.01)


async def hang(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/chat/completions", json=STREAM, timeout=None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_of_all_processes_finish(fake: Any, tmp_path: Path, number: signal.Signals) -> None:
    worker = await fake(Reply(text="a b c d e", inter_token_s=0.3))
    async with serving(tmp_path, [worker.url], 2) as service, httpx.AsyncClient(timeout=30) as client:
        streaming = [
            asyncio.create_task(client.post(f"{service.url}/v1/chat/completions", json=STREAM)) for _ in range(12)
        ]
        async with asyncio.timeout(20):
            while len(worker.requests) < 12:  # noqa: ASYNC110 - another process, not an event
                await asyncio.sleep(0.01)
        service.process.send_signal(number)
        answers = [(await stream).content for stream in streaming]
        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
        assert await service.end() == 0, service.log
    assert "starts again" not in service.log
    assert not metrics_folders(tmp_path)


async def test_files_in_the_working_folder_are_no_modules(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    for name in ("secrets.py", "router.py"):
        (tmp_path / name).write_text("raise SystemExit('this is no module of ours')")
    async with serving(tmp_path, [worker.url], 2) as service:
        await chat(service.url, 1)
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0, service.log
    assert "no module of ours" not in service.log


async def test_lost_metrics_are_told_until_every_process_has_been_started_again(fake: Any, tmp_path: Path) -> None:
    worker = await fake(Reply(text="a b c"))
    async with serving(tmp_path, [worker.url], 2) as service, httpx.AsyncClient() as client:
        [folder] = metrics_folders(tmp_path)
        shutil.rmtree(folder)
        streamed = (await client.post(f"{service.url}/v1/chat/completions", json=STREAM)).content
        assert streamed.endswith(b"data: [DONE]\n\n")
        assert (await lost_of(service.url)) == "0, 1"
        await restart(service, 1)
        assert f"{folder} was removed and is made again" in service.log
        assert {await lost_of(service.url) for _ in range(8)} == {"0"}
        await restart(service, 0)
        before = requests_of(await scrape(service.url))
        await chat(service.url, 1)
        await until_counted(service.url, before + 1)
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0, service.log
    assert f"{folder}: the files of process 0, 1 were removed" in service.log
    assert not metrics_folders(tmp_path)


async def lost_of(url: str) -> str:
    """The processes whose metrics a scrape reports as lost."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/metrics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "metrics_lost")
    return answer.json()["error"]["message"].removeprefix("The metrics files of process ").partition(" were ")[0]


async def restart(service: Service, slot: int) -> None:
    healthy = service.healthy()
    os.kill(service.pids[slot][-1], signal.SIGKILL)
    await service.read_log(lambda: service.healthy() > healthy)


async def test_a_killed_process_is_started_again_and_no_counter_falls(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    async with serving(tmp_path, [worker.url], 2) as service:
        # Else the killed one has nothing to lose.
        count = await chat_until(service, lambda served: len(served) == 2 and all(served.values()))
        before = service.served()["counter_1"]
        [victim] = service.pids[1]
        os.kill(victim, signal.SIGKILL)
        await service.read_log(lambda: "starts again" in service.log)
        assert [path.name for path in gauge_files(tmp_path)] == ["gauge_livemin_0.db", "gauge_livesum_0.db"]
        assert requests_of(await scrape(service.url)) == count
        await service.read_log(lambda: len(service.pids[1]) == 2 and service.healthy() == 3)
        assert re.search(rf"process 1 \(pid {victim}\) ended by SIGKILL, starts again in 1 s", service.log)
        scrapes = [await scrape(service.url) for _ in range(5)]
        assert [requests_of(scraped) for scraped in scrapes] == [count] * 5
        assert all(scraped['crossfill_worker_up{model="m",worker="m/0"}'] == 1 for scraped in scrapes)
        # The new process goes on with the old one's count.
        await chat_until(service, lambda served: served["counter_1"] > before, count)
        assert len(service.served()) == 2
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0, service.log


async def test_children_end_when_their_parent_is_killed(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    async with serving(tmp_path, [worker.url], 2) as service:
        pids = [pid for started in service.pids.values() for pid in started]
        assert sorted(map(str, pids)) == sorted(children_of(service.process.pid))
        assert all(map(is_running, pids))
        service.process.kill()
        async with asyncio.timeout(20):
            while any(is_running(pid) for pid in pids):  # noqa: ASYNC110 - another process, not an event
                await asyncio.sleep(0.02)
        # Their ends of the log close with them, so this waits for nobody.
        assert await service.end() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["second signal", "parent killed"])
async def test_a_stop_refuses_connections_and_can_be_hurried(fake: Any, tmp_path: Path, how: str) -> None:
    worker = await fake(Reply(hang=True))
    async with serving(tmp_path, [worker.url], 2) as service:
        waiting = asyncio.create_task(hang(service.url))
        async with asyncio.timeout(10):
            while not worker.requests:  # noqa: ASYNC110 - another process, not an event
                await asyncio.sleep(0.01)
        service.process.send_signal(signal.SIGTERM)
        await service.read_log(lambda: "Finished server process" in service.log)
        [busy] = [pid for [pid] in service.pids.values() if f"Finished server process [{pid}]" not in service.log]
        # The idle one has ended, this one has closed its listening sockets, and nobody else may hold them open.
        await service.read_log(lambda: "Waiting for connections to close" in service.log)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*service.url.removeprefix("http://").split(":"))
        assert is_running(busy)
        service.process.send_signal(signal.SIGINT if how == "second signal" else signal.SIGKILL)
        async with asyncio.timeout(10):  # without hurry it would take 30 s
            while is_running(busy):  # noqa: ASYNC110 - another process, not an event
                await asyncio.sleep(0.02)
        await service.end()
        await asyncio.wait([waiting], timeout=10)
        assert waiting.done(), "the client was told nothing"
        waiting.exception()


async def test_a_process_that_cannot_start_again_says_why_and_tries_on(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"prompt": "x", "scores": {"m": 0.5, "n": 0.5}}\n')
    models = [{"name": name, "workers": [worker.url]} for name in ("m", "n")]
    routing = {"ladder": ["m", "n"], "scorer": {"kind": "recorded", "path": str(scores)}}
    file = router_file(tmp_path, [worker.url], processes=2)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"models": models, "routing": routing}))
    async with launch(tmp_path, file) as service:
        await service.read_log(lambda: service.healthy() == 4)
        kept = scores.rename(tmp_path / "kept.jsonl")
        os.kill(service.pids[1][0], signal.SIGKILL)
        await service.read_log(lambda: service.log.count("starts again") == 2)
        how = f"ended with status {START_FAILED} ({scores}: cannot be read: No such file or directory)"
        assert f"{how}, starts again in 2 s" in service.log
        kept.rename(scores)
        await chat(service.url, 1)
        await service.read_log(lambda: service.healthy() == 6)
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0, service.log


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def gauge_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("crossfill-metrics-*/gauge_live*.db"))


def metrics_folders(folder: Path) -> list[Path]:
    return list(folder.glob("crossfill-metrics-*"))


async def test_the_option_overrides_the_file_and_one_process_has_no_parent(fake: Any, tmp_path: Path) -> None:
    worker = await fake()
    file = router_file(tmp_path, [worker.url], processes=2)
    async with launch(tmp_path, file, "--processes", "1") as service:
        await service.read_log(lambda: "Uvicorn running on http://" in service.log)
        assert "process 0" not in service.log
        assert children_of(service.process.pid) == []
        service.process.send_signal(signal.SIGTERM)
        assert await service.end() == 0


async def test_what_keeps_a_process_from_starting_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "listen: {port: 0, processes: 4}\n"
        "models: [{name: a, workers: ['http://a']}, {name: b, workers: ['http://b']}]\n"
        "routing: {ladder: [a, b], scorer: {kind: recorded, path: none.jsonl}}\n"
    )
    async with launch(tmp_path, path) as service:
        assert await service.end() == 1
        assert (
            service.log.splitlines()[-1]
            == f"crossfill: {tmp_path / 'none.jsonl'}: cannot be read: No such file or directory"
        )
        assert service.log.count("started (pid") == 1, "the others did not try"


async def test_a_taken_port_is_one_line(duo: Any, tmp_path: Path) -> None:
    port = int(duo.url.rsplit(":", 1)[1])
    async with launch(tmp_path, router_file(tmp_path, ["http://127.0.0.1:9"], port=port, processes=2)) as service:
        assert await service.end() == 1
        assert service.log.splitlines() == [f"crossfill: cannot listen on 127.0.0.1:{port}: Address already in use"]
