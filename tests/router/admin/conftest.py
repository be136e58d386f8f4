"""A router with administration over real stores."""

from __future__ import annotations

import shutil
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

import pytest

from router.tenants.key_file import KeyEntry, sha256_of

from ...cache_store.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIENT, OPERATOR = "cf-client-of-acme", "cf-admin-of-ada"
HELPER = Path(__file__).parent / "store_process.py"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write_keys(path: Path, *owned: tuple[str, str]) -> Path:
    """As programs do that replace a file: whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text("".join(KeyEntry(owner, sha256_of(key.encode())).to_line() for owner, key in owned))
    new.chmod(0o600)
    new.replace(path)
    return path


class StoreProcess:
    """Another process that has the store open, as a worker would; see `store_process.py`."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(HELPER), url]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        assert self._line() == "open"

    def publish(self, tenant: str, model: str, revision: str, pages: int) -> None:
        self._say(f"publish {tenant} {model} {revision} {pages}")
        assert self._line() == "done"

    def found(self, tenant: str, model: str, revision: str, pages: int) -> int:
        self._say(f"find {tenant} {model} {revision} {pages}")
        return int(self._line())

    def begin_traffic(self) -> None:
        """Publish and look up until `end_traffic`."""
        self._say("traffic")
        assert self._line() == "running"

    def number(self) -> int:
        """How many prefixes traffic has published."""
        self._say("number")
        return int(self._line())

    def older_found(self, number: int) -> int:
        """How many of the first `number` prefixes of traffic have a page that is found."""
        self._say(f"older {number}")
        return int(self._line())

    def end_traffic(self) -> str:
        self._say("end")
        return self._line()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Administered:
    """A router whose store another process uses too."""

    router: Any
    store: StoreProcess

    async def stats(self) -> Any:
        response = await self.router.client.get("/admin/store", headers=bearer(OPERATOR))
        assert response.status_code == 200, response.text
        return response.json()

    async def flush(self, **what: Any) -> Any:
        response = await self.router.client.post("/admin/store/flush", json=what, headers=bearer(OPERATOR))
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
def auth(tmp_path: Path) -> dict[str, Path]:
    """Of a configuration with a client's and an operator's key."""
    return {
        "keys_file": write_keys(tmp_path / "keys", ("acme", CLIENT)),
        "admin_keys_file": write_keys(tmp_path / "admin-keys", ("ada", OPERATOR)),
    }


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers of the test's own."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs a Redis server (apt-get install redis-server)")
    started: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        started.append(RedisServer(tmp_path / f"redis-{len(started)}", **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=["lmdb", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind that processes can share."""
    if request.param == "lmdb":
        return f"lmdb://{tmp_path / uuid.uuid4().hex}"
    return str(request.getfixturevalue("start_redis")().url())


@pytest.fixture
def open_beside() -> Iterator[Callable[[str], StoreProcess]]:
    """Opens a store in another process."""
    opened: list[StoreProcess] = []

    def start(url: str) -> StoreProcess:
        opened.append(StoreProcess(url))
        return opened[-1]

    yield start
    for process in opened:
        process.stop()


@pytest.fixture
async def administered(store_url: str, auth: Any, fake: Any, start_router: Any, open_beside: Any) -> Administered:
    """A router with administration, and another process with the same store."""
    router = await start_router({"small": [await fake()]}, auth=auth, store={"url": store_url, "deadline_s": 20})
    return Administered(router, open_beside(store_url))
