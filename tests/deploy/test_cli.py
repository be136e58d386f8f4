"""The program as a shell sees it: quick help, one line an error, no torch where none is needed."""

import subprocess
import sys

import pytest


def test_help_lists_every_command_without_importing_torch(crossfill):
    code = "import sys; from crossfill.cli import app; from typer.main import get_command; get_command(app); " + (
        "print({'torch', 'sglang', 'transformers', 'fastapi', 'sklearn', 'matplotlib'} & set(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "set()"
    text = crossfill("--help").stdout
    assert all(
        command in text
        for command in (
            *("up", "serve", "route", "worker", "fake-worker", "models", "calibrate", "keys", "config", "bench"),
            *("store", "doctor"),
        )
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "/no/such/file.yaml"), "/no/such/file.yaml: cannot be read"),
        (("serve", "/no/such/file.yaml"), "/no/such/file.yaml: cannot be read"),
        (("fake-worker", "/no/such/file.yaml"), "/no/such/file.yaml"),
        (("worker", "--model", "/no/such/folder"), "model folder /no/such/folder does not exist"),
        (("worker", "--model", ".", "--device", "tpu"), "--device: Input should be 'cpu' or 'cuda'"),
        (("worker", "--model", ".", "--", "--port", "1"), "may not set --port"),
    ],
    ids=["up", "serve", "fake-worker", "no-model", "device", "own-option"],
)
def test_a_mistake_is_one_line_on_stderr(crossfill, arguments, message):
    ended = crossfill(*arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("crossfill: ")
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_misspelt_option_of_the_worker_is_not_passed_to_sglang(crossfill):
    ended = crossfill("worker", "--model", ".", "--thread", "2")
    assert ended.returncode == 2
    assert "--threads" in ended.stderr


def test_doctor_finds_every_extension_point(crossfill):
    ended = crossfill("doctor")
    assert ended.returncode == 0, ended.stderr
    assert "ok" in ended.stdout


def test_a_router_that_cannot_bind_ends_with_a_reason(crossfill, tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = tmp_path / "router.yaml"
        file.write_text(
            f"listen: {{port: {taken.getsockname()[1]}}}\nmodels: [{{name: a, workers: ['http://127.0.0.1:1']}}]\n"
        )
        ended = crossfill("serve", str(file))
    assert ended.returncode != 0
    assert "address already in use" in ended.stderr
