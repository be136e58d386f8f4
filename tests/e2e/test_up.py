"""`crossfill up` as an operator meets it: a killed worker comes back, Ctrl-C leaves nothing, mistakes are one line."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml


def read_stream(url, received):
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                received.append(line)


def up(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "crossfill", "up", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.real
def test_a_killed_worker_comes_back_and_ctrl_c_leaves_nothing(start_stack, processes):
    config = {
        "listen": {"port": 0},
        "first_worker_port": 31300,
        "models": [{"name": "tiny-llama", "source": "tiny-llama"}],
        "health": {"interval_s": 0.5},
    }
    stack = start_stack(config)
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    ask = lambda: httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).status_code  # noqa: E731
    assert ask() == 200
    leaders = [pid for pid in processes.below(stack.process.pid) if processes.of_group(pid)]
    assert len(leaders) == 2, "one worker and the router lead a group each"
    worker = next(pid for pid in leaders if "engines.worker" in Path(f"/proc/{pid}/cmdline").read_text())
    assert len(processes.of_group(worker)) > 1, "SGLang spawned its processes into the worker's group"

    os.kill(worker, signal.SIGKILL)
    assert processes.eventually(lambda: not processes.of_group(worker), 20), (
        "what the dead worker spawned must go with it"
    )
    assert processes.eventually(lambda: ask() == 503, 20)
    assert processes.eventually(lambda: ask() == 200, 240), stack.output.read_text()
    assert "tiny-llama/0 ended by SIGKILL, starts again" in stack.output.read_text()

    family = processes.below(stack.process.pid)
    stream = threading.Thread(target=read_stream, args=(stack.url, received := []))
    stream.start()
    assert processes.eventually(lambda: received, 30)
    assert stack.stop() == 0
    stream.join()
    assert "[DONE]" in received[-1], "Ctrl-C lets a running stream finish"
    assert len(received) > 100
    assert processes.running(family) == []


def test_a_typo_in_the_file_is_one_line_with_the_right_key(tmp_path):
    file = tmp_path / "stack.yaml"
    file.write_text("models:\n  - name: a\n    urls: ['http://127.0.0.1:1']\nrouting:\n  tua: 0.1\n")
    ended = up(file)
    assert ended.returncode == 1
    assert ended.stderr.strip() == f"crossfill: {file}:5: unknown key 'routing.tua'; did you mean 'routing.tau'?"


def test_a_taken_port_is_one_line(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = tmp_path / "stack.yaml"
        port = taken.getsockname()[1]
        file.write_text(
            yaml.safe_dump({"listen": {"port": port}, "models": [{"name": "a", "urls": ["http://127.0.0.1:1"]}]})
        )
        ended = up(file, "--state-dir", tmp_path)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_second_up_on_the_same_state_folder_is_one_line(tmp_path, start_stack):
    config = {"listen": {"port": 0}, "models": [{"name": "elsewhere", "urls": ["http://127.0.0.1:1"]}]}
    start_stack(config)
    ended = up(tmp_path / "stack.yaml", "--state-dir", tmp_path)
    assert ended.returncode == 1
    assert f"another `crossfill up` runs with {tmp_path}" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_stack_of_workers_served_elsewhere_needs_no_model(start_stack, processes, unused_tcp_port):
    fake = subprocess.Popen([sys.executable, "-m", "crossfill", "fake-worker", "--port", str(unused_tcp_port)])
    try:
        config = {
            "listen": {"port": 0},
            "health": {"interval_s": 0.2},
            "models": [{"name": "elsewhere", "urls": [f"http://127.0.0.1:{unused_tcp_port}"]}],
        }
        stack = start_stack(config)
        body = {"model": "elsewhere", "messages": [{"role": "user", "content": "hi"}]}
        assert processes.eventually(lambda: httpx.get(f"{stack.url}/ready").status_code == 200, 20)
        assert httpx.post(f"{stack.url}/v1/chat/completions", json=body).status_code == 200
        assert stack.stop() == 0
    finally:
        fake.terminate()
        fake.wait()
