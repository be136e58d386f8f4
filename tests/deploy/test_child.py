"""A supervised process: restarted when it ends, stopped with all it spawned. Real processes, no model."""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from crossfill.child import Child, ChildSpec, State
from engines.fake_worker import FakeWorker, Script


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as made:
        yield made


class Recorder:
    def __init__(self):
        self.states = []

    def __call__(self, child):
        self.states.append((child.state, child.detail))


def child_of(code, tmp_path, recorder, url="http://127.0.0.1:1", backoff_max_s=0.05, model=None):
    spec = ChildSpec("it", (sys.executable, "-c", code), dict(os.environ), url, tmp_path / "it.log", model=model)
    return Child(spec, recorder, backoff_max_s=backoff_max_s, clock=time.monotonic)


async def until(condition, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the conditions are of other processes
            await asyncio.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_process_that_ends_starts_again_with_a_reason(tmp_path, session):
    recorder = Recorder()
    child = child_of("print('here'); raise SystemExit(3)", tmp_path, recorder)
    task = asyncio.create_task(child.run(session))
    await until(lambda: child.failures >= 2)
    await child.stop(grace_s=1)
    await task
    ended = [detail for state, detail in recorder.states if state is State.ENDED]
    assert "with status 3" in ended[0]
    assert str(tmp_path / "it.log") in ended[0]
    assert (tmp_path / "it.log").read_text().count("here") >= 2
    assert recorder.states[-1][0] is State.STOPPED


async def test_pauses_between_restarts_grow_to_the_bound(tmp_path, session):
    recorder = Recorder()
    child = child_of("raise SystemExit(1)", tmp_path, recorder, backoff_max_s=3)
    task = asyncio.create_task(child.run(session))
    await until(lambda: child.failures == 2)
    await child.stop(grace_s=1)
    await task
    pauses = [re.search(r"again in (\d+ s)", detail)[1] for state, detail in recorder.states if state is State.ENDED]
    assert pauses == ["2 s", "3 s"]


async def test_ready_is_told_once_and_wipes_the_count_of_failures(tmp_path, session, unused_tcp_port):
    recorder = Recorder()
    code = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", {unused_tcp_port}), Handler).serve_forever()
"""
    child = child_of(code, tmp_path, recorder, url=f"http://127.0.0.1:{unused_tcp_port}")
    child.failures = 2
    task = asyncio.create_task(child.run(session))
    await until(lambda: child.state is State.READY)
    assert child.failures == 0
    assert child.ready_after_s > 0
    assert child.memory_bytes() > 2**20
    # Starting Python and a server takes tens of milliseconds.
    assert 0 < child.cpu_s() < 60
    await child.stop(grace_s=5)
    await task
    assert [state for state, _ in recorder.states] == [State.STARTING, State.READY, State.STOPPED]


async def test_who_answers_on_the_port_must_serve_the_model(tmp_path, session):
    recorder = Recorder()
    async with FakeWorker(Script(model="theirs")) as foreign:
        child = child_of("import time; time.sleep(60)", tmp_path, recorder, url=foreign.url, model="ours")
        task = asyncio.create_task(child.run(session))
        await asyncio.sleep(1.5)
        assert child.state is State.STARTING, "somebody else's worker was taken for this one"
        await child.stop(grace_s=5)
        await task
        # Control: the same answer from a worker that serves the model is readiness.
        child = child_of("import time; time.sleep(60)", tmp_path, recorder, url=foreign.url, model="theirs")
        task = asyncio.create_task(child.run(session))
        await until(lambda: child.state is State.READY)
        await child.stop(grace_s=5)
        await task


async def test_a_program_that_cannot_be_started_is_a_failure_with_a_reason(tmp_path, session):
    recorder = Recorder()
    child = child_of("", tmp_path, recorder)
    (tmp_path / "it.log").mkdir()
    task = asyncio.create_task(child.run(session))
    await until(lambda: child.failures >= 2)
    await child.stop(grace_s=1)
    await task
    assert "could not be started (Is a directory)" in recorder.states[0][1]


async def test_what_a_process_spawned_goes_with_it_and_so_do_its_temporary_files(tmp_path, session):
    code = """
import os, subprocess, sys, tempfile
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(tempfile.gettempdir() + "/left", "w").close()
print(grandchild.pid, tempfile.gettempdir(), flush=True)
"""
    child = child_of(code, tmp_path, Recorder(), backoff_max_s=60)
    task = asyncio.create_task(child.run(session))
    await until(lambda: child.state is State.ENDED)
    grandchild, folder = (tmp_path / "it.log").read_text().split()
    await until(lambda: not alive(int(grandchild)))
    assert "crossfill-" in folder
    await child.stop(grace_s=1)
    await task
    assert not os.path.exists(folder)  # noqa: ASYNC240, PTH110  # nothing else runs in this loop


async def test_a_second_signal_ends_it_at_once(tmp_path, session):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    child = child_of(code, tmp_path, Recorder())
    task = asyncio.create_task(child.run(session))
    log = tmp_path / "it.log"
    await until(lambda: log.exists() and log.read_text().strip())
    now = asyncio.Event()
    stopping = asyncio.create_task(child.stop(grace_s=600, now=now))
    await asyncio.sleep(0.3)
    assert not stopping.done()
    now.set()
    async with asyncio.timeout(20):
        await stopping
        await task


async def test_stop_ends_a_process_that_ignores_sigterm_and_what_it_spawned(tmp_path, session):
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""
    child = child_of(code, tmp_path, Recorder())
    task = asyncio.create_task(child.run(session))
    log = tmp_path / "it.log"
    await until(lambda: log.exists() and log.read_text().strip())
    grandchild = int(log.read_text())
    assert alive(grandchild)
    started = time.monotonic()
    await child.stop(grace_s=0.5)
    await task
    assert time.monotonic() - started >= 0.5
    await until(lambda: not alive(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_a_child_ends_with_its_supervisor(tmp_path):
    code = f"""
import asyncio, os, sys, time, aiohttp
from pathlib import Path
from crossfill.child import Child, ChildSpec
spec = ChildSpec("it", (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"),
                 dict(os.environ), "http://127.0.0.1:1/", Path({str(tmp_path / "it.log")!r}))
async def main():
    async with aiohttp.ClientSession() as session:
        await Child(spec, lambda child: None, backoff_max_s=1, clock=time.monotonic).run(session)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    log = tmp_path / "it.log"
    await until(lambda: log.exists() and log.read_text().strip())
    pid = int(log.read_text())
    assert alive(pid)
    os.kill(supervisor.pid, signal.SIGKILL)
    await supervisor.wait()
    await until(lambda: not alive(pid))
