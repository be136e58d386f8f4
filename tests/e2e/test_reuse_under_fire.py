"""Thirty conversations that change their model at random, while a worker is killed and the store starts again empty.

With CROSSFILL_SOAK set (`make soak`) the models are SmolLM2's, which takes a quarter of an hour.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.cache_store.redis_server import RedisServer

pytestmark = pytest.mark.real

CONVERSATIONS, TURNS, TENANTS = 30, 6, ("acme", "bolt", "spy")
SOAK = "CROSSFILL_SOAK" in os.environ
LARGE, SMALL = ("smollm2-135m-instruct", "smollm2-113m-healed") if SOAK else ("tiny-llama", "tiny-qwen3")
LAYERS = [layer for layer in range(30) if layer not in {3, 4, 5, 12, 25, 26}] if SOAK else [0, 0, 1, 1, 2, 3]
DOCUMENT = " ".join(f"word{n}" for n in range(400 if SOAK else 100))
PATIENCE_S = 5000 if SOAK else 240


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A key of each tenant, and the file that lists them."""
    file, keys = tmp_path_factory.mktemp("keys") / "keys", {}
    for tenant in TENANTS:
        command = [sys.executable, "-m", "crossfill", "keys", "add", tenant, "--file", str(file)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        keys[tenant] = next(word for word in made.stdout.split() if word.startswith("cf-"))
    return file, keys


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed (apt-get install redis-server)")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fire(start_module_stack, redis, keys):
    pair = {"sender": LARGE, "receiver": SMALL, "layers": LAYERS, "first_layer": 1, "top_p": 0.9}
    return start_module_stack(
        {
            "listen": {"port": 0},
            "first_worker_port": 31400,
            "auth": {"keys_file": str(keys[0])},
            "store": {"url": redis.url(), "deadline_s": 0.5},
            "worker": {"max_total_tokens": 16384, "max_running_requests": 16},
            "models": [
                {"name": LARGE, "source": LARGE},
                {"name": SMALL, "source": SMALL, "replicas": 2},
            ],
            # What these models save is too little to wait for.
            "reuse": {"pairs": [{**pair, "min_tokens": 64, "max_density": 1.0}], "wait_share": 1e6},
            "health": {"interval_s": 0.5},
        }
    )


class Talk:
    """All conversations, and what came of their requests."""

    def __init__(self, stack, keys):
        self.stack, self.keys = stack, keys
        self.changed = asyncio.Condition()
        self.done, self.failed, self.outcomes = 0, [], {tenant: set() for tenant in TENANTS}

    async def converse(self, session, number):
        """One conversation; the spy's only ever asks the small model, of a document that all tenants share."""
        chance, tenant = random.Random(number), TENANTS[number % len(TENANTS)]
        # Documents differ from their first word on: whoever has one in its own cache has no other.
        messages = [{"role": "user", "content": f"{number // len(TENANTS)} {DOCUMENT}"}]
        for turn in range(TURNS):
            model = SMALL if tenant == "spy" else chance.choice([LARGE, SMALL])
            body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
            headers = {"authorization": f"Bearer {self.keys[tenant]}"}
            url = f"{self.stack.url}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                told = await response.json()
                self.outcomes[tenant].add(response.headers.get("x-crossfill-reuse", "").partition(";")[0])
            async with self.changed:
                if response.status != 200:
                    self.failed.append((model, response.status, told))
                else:
                    self.done += 1
                self.changed.notify_all()
            if response.status != 200:
                continue
            answer = told["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {turn}"}]

    async def until(self, done):
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.done + len(self.failed) >= done)


def leader_of(processes, stack, model):
    """The process that leads the first worker of a model."""
    url = stack.workers[model][0]
    port = url.rpartition(":")[2]
    for pid in processes.below(stack.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "engines.worker" in command and port in command and processes.of_group(pid):
            return pid
    raise AssertionError(f"no worker on port {port}")


def resident_bytes(processes, stack):
    pages = 0
    for pid in processes.below(stack.process.pid):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_nobody_but_the_killed_workers_requests_notices(fire, redis, keys, processes):
    talk, total = Talk(fire, keys[1]), CONVERSATIONS * TURNS
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(talk.converse(session, number)) for number in range(CONVERSATIONS)]
        await talk.until(total // 4)
        redis.stop()
        await talk.until(total // 2)
        redis.start()
        killed = leader_of(processes, fire, SMALL)
        os.kill(killed, signal.SIGKILL)
        await asyncio.gather(*tasks)
    # What ran on the killed worker is tried again on the other one, unless its answer had begun.
    assert all(model == SMALL for model, _, _ in talk.failed), talk.failed
    assert len(talk.failed) <= 16, talk.failed
    assert talk.done + len(talk.failed) == total
    # Reuse happened, and never across tenants.
    assert "guided" in talk.outcomes["acme"] | talk.outcomes["bolt"]
    assert talk.outcomes["spy"] <= {"none", "fallback", ""}


async def test_memory_stays_flat(fire, keys, processes):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        sizes = []
        for _ in range(4):
            talk = Talk(fire, keys[1])
            await asyncio.gather(*(talk.converse(session, number) for number in range(12)))
            assert not talk.failed
            sizes.append(resident_bytes(processes, fire))
    # The first round loads what is loaded once.
    assert sizes[-1] - sizes[1] < 150 * 2**20, sizes
