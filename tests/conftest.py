"""Fixtures that several folders share: prepared models, and one running stack of real workers for the whole session."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from cache_store.pool.shared_memory import FOLDER

# In-process imports of SGLang see the platform that workers see.
os.environ.setdefault("SGLANG_PLATFORM", "crossfill_cpu")

ROOT = Path(__file__).parent.parent
LARGE, SMALL = "smollm2-135m-instruct", "smollm2-113m-healed"
# Of the large model, those that the small one was made of.
KEPT_LAYERS = [layer for layer in range(30) if layer not in {3, 4, 5, 12, 25, 26}]
START_TIMEOUT_S = 500
POOL_BYTES = 256 * 2**20
# The same model under another name, which computes no queries of what the first one has packed.
TWIN_PAIR = {
    "sender": "tiny-llama",
    "receiver": "tiny-twin",
    "first_layer": 0,
    "weights": "identity",
    "mode": "map",
    "map_top_p": 1.0,
    "min_tokens": 64,
    "max_density": 1.0,
}


@pytest.fixture(scope="session")
def models_root() -> Path:
    """Where the session's models are; made on first use (a download of 93 MB), kept in the checkout."""
    return ROOT / "var" / "models"


@dataclass(frozen=True)
class Stack:
    """A running `crossfill up`."""

    process: subprocess.Popen
    url: str
    workers: dict[str, list[str]]
    output: Path
    logs: Path
    pool: str = ""
    large: str = LARGE
    small: str = SMALL

    def get(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read().decode()

    def counter(self, url: str, name: str, **labels: str) -> float:
        """Sum of a counter's samples on a /metrics page that carry these labels."""
        total = 0.0
        for line in self.get(f"{url}/metrics").splitlines():
            match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def stop(self) -> int:
        """Press Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=90)


def _start(folder: Path, config: dict, models_root: Path) -> Stack:
    """Run `crossfill up` on `config` and wait for its ready line."""
    file, output = folder / "stack.yaml", folder / "up.log"
    file.write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "crossfill",
        "up",
        str(file),
        "--state-dir",
        str(folder),
        "--models-root",
        str(models_root),
    ]
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT)
    deadline = time.monotonic() + START_TIMEOUT_S
    while "Crossfill is ready" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            logs = "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((folder / "log").glob("*")))
            pytest.fail(f"crossfill up did not become ready:\n{output.read_text()}\n{logs}")
        time.sleep(0.5)
    router = yaml.safe_load((folder / "run" / "router.yaml").read_text())
    url = f"http://127.0.0.1:{router['listen']['port']}"
    return Stack(process, url, {m["name"]: list(m["workers"]) for m in router["models"]}, output, folder / "log")


@pytest.fixture
def start_stack(tmp_path: Path, models_root: Path) -> Iterator[Callable[[dict], Stack]]:
    """Starts a `crossfill up` for one test; ended with all it started if the test has not stopped it."""
    with _starting(tmp_path, models_root) as start:
        yield start


@pytest.fixture(scope="module")
def start_module_stack(
    tmp_path_factory: pytest.TempPathFactory, models_root: Path
) -> Iterator[Callable[[dict], Stack]]:
    """As `start_stack`, for all tests of a module."""
    with _starting(tmp_path_factory.mktemp("module-stack"), models_root) as start:
        yield start


@contextmanager
def _starting(folder: Path, models_root: Path) -> Iterator[Callable[[dict], Stack]]:
    started: list[Stack] = []

    def start(config: dict) -> Stack:
        started.append(_start(folder, config, models_root))
        return started[-1]

    yield start
    for stack in started:
        if stack.process.poll() is None:
            stack.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, models_root: Path):
    """The demo pair, and three tiny models whose prompts are prefilled in chunks of 64, behind one router.

    The small ones of all pairs take what the large ones leave; the tiny ones look everywhere, so they compute what they
    would compute alone.
    """
    chunked = {"chunked_prefill_size": 64, "max_total_tokens": 8192}
    folder, pool = tmp_path_factory.mktemp("stack"), f"tests-{os.getpid()}"
    tiny = {"sender": "tiny-llama", "receiver": "tiny-qwen3", "layers": [0, 0, 1, 1, 2, 3], "first_layer": 1}
    config = {
        "store": {"url": f"lmdb://{folder}/store"},
        "reuse": {
            "pairs": [
                {
                    "sender": LARGE,
                    "receiver": SMALL,
                    "layers": KEPT_LAYERS,
                    # Short prompts are dense; a test wants to see something left out.
                    "top_p": 0.8,
                    "min_tokens": 256,
                    "max_density": 1.0,
                },
                {**tiny, "top_p": 1.0, "min_tokens": 64, "max_density": 1.0},
                {**TWIN_PAIR, "top_p": 1.0},
            ],
            "maps": {"pool": pool, "pool_bytes": POOL_BYTES, "dtype": "float32"},
            # A busy machine must not decide whether a test sees reuse.
            "wait_s": 5.0,
            "wait_share": 1e6,
        },
        "listen": {"port": 0},
        "first_worker_port": 31100,
        "models": [
            {"name": SMALL, "source": SMALL},
            {"name": LARGE, "source": LARGE},
            {"name": "tiny-llama", "source": "tiny-llama", "worker": chunked},
            {"name": "tiny-qwen3", "source": "tiny-qwen3", "worker": chunked},
            {"name": "tiny-twin", "source": "tiny-llama", "worker": chunked},
        ],
        "routing": {"ladder": [SMALL, LARGE]},
    }
    running = replace(_start(folder, config, models_root), pool=pool)
    yield running
    assert running.stop() == 0, running.output.read_text()
    assert not list(FOLDER.glob(f"*{pool}")), "the block pool outlived its workers"
