"""`crossfill doctor`: checks of this installation, and of what a configuration needs of this machine; a line each."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import aiohttp

from crossfill.config import StackConfig
from crossfill.config_file import check_files, check_pairs, kind_of, load_any
from crossfill.errors import CrossfillError
from crossfill.plan import reachable, settle
from crossfill.ports import Ports
from engines.errors import EngineError
from router.config import ListenConfig, RouterConfig
from router.errors import ConfigError

_LIMIT = aiohttp.ClientTimeout(total=5)
# What a router answers on /live.
_ALIVE = b'{"status":"alive"}'


class _CheckFailedError(CrossfillError):
    """What a check found."""


def examine(file: Path | None, tell: Callable[[str], None]) -> bool:
    """Run every check, telling `ok: …` or `failed: …` for each; whether all went well.

    SGLang is left out where the configuration in `file` starts no worker.
    """
    results: list[bool] = []

    def run(check: Callable[[], str]) -> None:
        try:
            tell(f"ok: {check()}")
        except (CrossfillError, EngineError, ConfigError) as error:
            tell(f"failed: {error}")
            results.append(False)

    config: StackConfig | RouterConfig | None = None
    if file is not None:
        run(lambda: _configuration(file))
        with suppress(ConfigError):
            config = load_any(file)
    if file is None or isinstance(config, StackConfig):
        run(_sglang)
        run(_kernels)
    if config is not None:
        for check in _of_machine(config):
            run(check)
    return not results


def _sglang() -> str:
    if find_spec("torch") is None:
        raise _CheckFailedError("torch is not installed, a worker cannot run here (run `make setup`)")
    import torch

    from engines import compat, platform, torchvision_stub

    # As in a CPU worker; where torch has CUDA, the stub does nothing and SGLang finds its own platform.
    torchvision_stub.install()
    if not torch.cuda.is_available():
        os.environ["SGLANG_PLATFORM"] = platform.NAME
    compat.check()
    return f"SGLang {compat.SGLANG_VERSION} with every extension point that Crossfill uses"


def _kernels() -> str:
    if find_spec("torch") is None:
        raise _CheckFailedError("torch is not installed, the CPU kernels cannot run here (run `make setup`)")
    from crossfill_kernels.native import library

    # Looked at before it is opened, which would log as a worker does.
    reason = library.fault_of(library.BUILD_FOLDER) or library.status().reason
    if reason:
        return f"CPU kernels are missing, torch serves more slowly in their place: {reason} (make setup builds it)"
    return f"CPU kernels, built for {library.status().variant}"


def _configuration(file: Path) -> str:
    config = load_any(file)
    check_files(config)
    check_pairs(config)
    return f"{file} ({kind_of(config)})"


def _of_machine(config: StackConfig | RouterConfig) -> Iterator[Callable[[], str]]:
    yield lambda: _listens(config.listen)
    if isinstance(config, StackConfig):
        if wanted := sum(model.replicas for model in config.models if model.source is not None):
            yield lambda: _worker_ports(config.first_worker_port, wanted)
        urls = [url for model in config.models for url in model.urls]
    else:
        urls = [url for model in config.models for url in model.workers]
    for url in urls:
        yield partial(_worker, url)


def _listens(listen: ListenConfig) -> str:
    try:
        return f"port {settle(listen).port} of {listen.host} is free"
    except CrossfillError:
        url = f"http://{reachable(listen.host)}:{listen.port}"
        if (found := _get(f"{url}/live")) is not None and found[1] == _ALIVE:
            return f"a router runs on {url}"
        raise


def _worker_ports(first: int, wanted: int) -> str:
    with Ports(first) as ports:
        taken = [ports.take() for _ in range(wanted)]
    return f"free ports for the workers: {', '.join(map(str, taken))}"


def _worker(url: str) -> str:
    found = _get(f"{url}/health")
    if found is None:
        raise _CheckFailedError(f"worker {url} cannot be reached")
    if found[0] != 200:
        raise _CheckFailedError(f"worker {url} answers /health with status {found[0]}")
    return f"worker {url} is healthy"


def _get(url: str) -> tuple[int, bytes] | None:
    """Status and body of what answers a GET; None without an answer."""

    async def get() -> tuple[int, bytes]:
        async with aiohttp.ClientSession(timeout=_LIMIT) as session, session.get(url) as response:
            return response.status, await response.read()

    try:
        return asyncio.run(get())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
