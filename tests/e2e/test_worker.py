"""`crossfill worker`, started by hand in a terminal."""

import signal
import subprocess
import sys

import httpx
import pytest

pytestmark = pytest.mark.real


@pytest.fixture
def start_worker(tmp_path, models_root):
    started = []

    def start(port):
        command = [sys.executable, "-m", "crossfill", "worker", "--model", "tiny-llama", "--port", str(port)]
        output = tmp_path / "worker.log"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [*command, "--models-root", str(models_root)], stdout=sink, stderr=subprocess.STDOUT
            )
        started.append(process)
        return process, output

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_it_says_when_it_is_ready_serves_and_ends_on_ctrl_c(start_worker, unused_tcp_port, processes):
    process, output = start_worker(unused_tcp_port)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert processes.eventually(lambda: f"tiny-llama is ready on {url}" in output.read_text(), 240), output.read_text()
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    family = processes.below(process.pid)
    assert len(family) >= 3, "SGLang runs in several processes"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert processes.eventually(lambda: not processes.running(family), 10)


def test_ctrl_c_while_it_starts_ends_it_too(start_worker, unused_tcp_port, processes):
    process, output = start_worker(unused_tcp_port)

    def listens():
        try:
            httpx.get(f"http://127.0.0.1:{unused_tcp_port}/health", timeout=5)
        except httpx.TransportError:
            return False
        return True

    # SGLang listens before its warm-up has ended: the moment in which its own handling of SIGINT hangs.
    assert processes.eventually(listens, 240), output.read_text()
    family = processes.below(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert processes.eventually(lambda: not processes.running(family), 10)
