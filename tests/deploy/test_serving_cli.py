import asyncio
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

from crossfill.errors import ServingError
from crossfill.keys_file import add_key
from crossfill.serving import ask_router
from engines.fake_worker import FakeWorker
from router.config import RouterConfig, load_yaml
from router.lifecycle import Lifecycle
from router.server.serve import RouterServer, server_config


@contextmanager
def in_a_thread(start):
    """Run the coroutine function `start(ready, stop)` until the context is left; what it told by `ready(value)`."""
    loop, told, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    values = []

    def ready(value):
        values.append(value)
        told.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(start(ready, stop)), daemon=True)
    thread.start()
    try:
        assert told.wait(30)
        yield values[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@contextmanager
def running_router(config_file):
    """A router on a real socket; its URL."""
    from router.app import create_app

    config = load_yaml(config_file, RouterConfig)

    async def serve(ready, stop):
        lifecycle = Lifecycle()
        app = create_app(config, lifecycle=lifecycle)
        server = RouterServer(server_config(app, config), lifecycle)
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        pool = app.state.services.pool
        while not server.started or any(w.state == "starting" and not w.failures for w in pool.workers):  # noqa: ASYNC110 - sockets
            await asyncio.sleep(0.01)
        ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await stop.wait()
        server.should_exit = True
        await task

    with in_a_thread(serve) as url:
        yield url


@contextmanager
def running_worker(**script):
    async def serve(ready, stop):
        async with FakeWorker() as worker:
            worker.health = script.get("health", "ok")
            ready(worker.url)
            await stop.wait()

    with in_a_thread(serve) as url:
        yield url


@contextmanager
def other_program():
    """Something that speaks HTTP and is no router."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def closed_url():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def write(tmp_path):
    def write(**content):
        file = tmp_path / "file.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


def two(small, large, **more):
    models = [{"name": "small", "workers": [small]}, {"name": "large", "workers": [large]}]
    return {"models": models, "routing": {"ladder": ["small", "large"]}, **more}


def test_serving_shows_models_and_workers(crossfill, write, closed_url):
    with running_worker() as worker, running_router(write(**two(worker, closed_url))) as url:
        ended = crossfill("models", "serving", url)
        same = crossfill("models", "serving", f"{url}/v1/")
    assert ended.returncode == 0, ended.stderr
    assert [line.split() for line in ended.stdout.splitlines()] == [
        ["model", "worker", "state", "in", "flight"],
        ["small", "small/0", "healthy", "0"],
        ["large", "large/0", "starting", "0"],
        ["degraded;", "models:", "auto,", "small,", "large"],
    ]
    assert same.stdout == ended.stdout


def test_serving_fails_when_no_worker_can_be_used(crossfill, write, closed_url):
    with running_router(write(models=[{"name": "small", "workers": [closed_url]}])) as url:
        ended = crossfill("models", "serving", url)
    assert ended.returncode == 1
    assert "unavailable; models: small" in ended.stdout


def test_serving_sends_the_key_it_is_given(crossfill, tmp_path, write):
    from datetime import date

    key, _ = add_key(tmp_path / "keys", "acme", "", date(2026, 1, 31))
    with running_worker() as worker:
        file = write(models=[{"name": "small", "workers": [worker]}], auth={"keys_file": "keys"})
        with running_router(file) as url:
            without = crossfill("models", "serving", url)
            by_option = crossfill("models", "serving", url, "--key", key)
            by_environment = crossfill("models", "serving", url, CROSSFILL_API_KEY=key)
            wrong = crossfill("models", "serving", url, "--key", "cf-wrong")
    assert (without.returncode, wrong.returncode) == (1, 1)
    assert "No API key was sent" in without.stderr
    assert "CROSSFILL_API_KEY" in without.stderr
    assert "The API key is not valid" in wrong.stderr
    assert by_option.returncode == by_environment.returncode == 0
    assert key not in by_option.stdout


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "a b", "a\tb", "clé", "\x7f", "a" * 513])
def test_serving_names_the_key_that_cannot_be_sent(key):
    # No router is needed: nothing is asked.
    with pytest.raises(ServingError, match=r"^the key of --key or CROSSFILL_API_KEY cannot be sent: ") as caught:
        ask_router("http://127.0.0.1:1", key)
    assert key not in str(caught.value)
    with pytest.raises(ServingError, match="nothing answers"):
        ask_router("http://127.0.0.1:1", "a" * 512)


def test_serving_where_nobody_or_somebody_else_listens_is_one_line(crossfill, closed_url):
    with other_program() as page:
        for url, message, *key in (
            (closed_url, f"nothing answers at {closed_url}"),
            ("127.0.0.1:8000", "not a URL: '127.0.0.1:8000'"),
            (page, f"what answers at {page} is not a Crossfill router"),
            (page, "the key of --key or CROSSFILL_API_KEY cannot be sent: ", "--key", "a\nb"),
        ):
            ended = crossfill("models", "serving", url, *key)
            assert ended.returncode == 1
            assert ended.stderr.startswith(f"crossfill: {message}")
            assert len(ended.stderr.strip().splitlines()) == 1


def test_doctor_of_a_router_file_looks_at_its_workers(crossfill, write, closed_url):
    with running_worker() as good, running_worker(health="failing") as bad:
        file = write(models=[{"name": "a", "workers": [good, bad, closed_url]}], listen={"port": 0})
        ended = crossfill("doctor", "--config", file)
    assert ended.returncode == 1
    assert [line.split(" of 127.")[0] for line in ended.stdout.splitlines() if "port " not in line] == [
        f"ok: {file} (router)",
        f"ok: worker {good} is healthy",
        f"failed: worker {bad} answers /health with status 503",
        f"failed: worker {closed_url} cannot be reached",
    ]
    assert "SGLang" not in ended.stdout


def test_doctor_knows_a_taken_port_from_a_running_router(crossfill, write):
    with running_worker() as worker:
        models = [{"name": "a", "workers": [worker]}]
        with running_router(write(models=models, listen={"port": 0})) as url:
            ended = crossfill("doctor", "--config", write(models=models, listen={"port": int(url.rsplit(":", 1)[1])}))
        assert ended.returncode == 0, ended.stdout
        assert f"ok: a router runs on {url}" in ended.stdout
        with other_program() as page:
            taken = crossfill("doctor", "--config", write(models=models, listen={"port": int(page.rsplit(":", 1)[1])}))
    assert taken.returncode == 1
    assert "failed: cannot listen on 127.0.0.1" in taken.stdout


def test_doctor_of_a_stack_file_checks_sglang_and_ports(crossfill, write):
    file = write(models=[{"name": "a", "source": "s", "replicas": 2}], listen={"port": 0}, first_worker_port=31800)
    ended = crossfill("doctor", "--config", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["ok:"] * 5
    assert "SGLang" in lines[1]
    assert "CPU kernels" in lines[2]
    assert lines[4].startswith("ok: free ports for the workers: 318")


def test_doctor_tells_a_fault_of_the_configuration(crossfill, write):
    broken = crossfill("doctor", "--config", write(models=[{"name": "a", "workers": ["http://a"]}], routin={}))
    assert broken.returncode == 1
    assert broken.stdout.startswith("failed: ")
    assert "did you mean 'routing'?" in broken.stdout
