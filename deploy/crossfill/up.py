"""`crossfill up`: models, workers and router on one machine, from one file."""

import asyncio
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
from rich.console import Console

from cache_store.pool.shared_memory import remove_abandoned
from crossfill.board import Board
from crossfill.child import Child, ChildSpec, State
from crossfill.config import StackConfig
from crossfill.config_file import check_files, check_pairs
from crossfill.errors import StartError
from crossfill.plan import Plan, make_plan, write_router_file
from crossfill.ports import Ports
from crossfill.stopping import Stop

# A worker that ends this often without ever serving will not come up by itself.
_HOPELESS_AFTER = 3
_POLL_S = 0.2


def up(
    config: StackConfig,
    *,
    state_dir: Path,
    models_root: Path,
    console: Console,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Prepare models, start everything, serve until SIGINT or SIGTERM, stop everything.

    Args:
        config: the stack.
        state_dir: where logs and the router's file go.
        models_root: where models of the catalogue are made.
        console: where progress is shown.
        clock: seconds, monotonic.

    Returns:
        The exit status: 0 after a requested stop.

    Raises:
        StartError: nothing could be served.
        ConfigError: a file that the configuration names cannot be used.
    """
    # Before anything is built or started: a slip shows at once.
    check_files(config)
    check_pairs(config, models_root)
    with _alone(state_dir), Ports(config.first_worker_port) as ports:
        folders = prepare_sources([m.source for m in config.models if m.source is not None], models_root)
        plan = make_plan(config, folders, state_dir, ports)
        write_router_file(plan)
        try:
            asyncio.run(_serve(config, plan, console, clock))
        finally:
            # What is in it outlives its processes, but not by hours and in the memory of others.
            remove_abandoned(config.reuse.maps.pool)
    return 0


@contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Keep a second `crossfill up` from the same logs and router file; the kernel releases a dead one's lock."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / ".up.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise StartError(f"cannot write to the state folder {state_dir}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"another `crossfill up` runs with {state_dir}; stop it, or set --state-dir") from None
        yield


def prepare_sources(sources: Sequence[str], root: Path) -> dict[str, Path | str]:
    """Make every source that the catalogue knows; the folder (or hub id) of each.

    Raises:
        StartError: a model could not be made; the program that makes it has already said why.
    """
    from engines.models.catalogue import CATALOGUE  # only `up` needs it

    names = sorted({source for source in sources if source in CATALOGUE})
    if names:
        # In a process of its own: building imports torch, and this one stays for as long as the service runs.
        made = subprocess.run(  # noqa: S603  # our own program, names from the catalogue
            [sys.executable, "-P", "-m", "crossfill", "models", "prepare", *names, "--root", str(root)],
            check=False,
            # The folders, which this process knows; progress is on stderr.
            stdout=subprocess.DEVNULL,
        )
        if made.returncode:
            raise StartError("the models could not be made")
    return {source: root / source if source in CATALOGUE else source for source in sources}


async def _serve(config: StackConfig, plan: Plan, console: Console, clock: Callable[[], float]) -> None:
    stop = Stop()
    started = clock()
    with Board(console, clock) as board:
        children = [_child(spec, config, board, clock) for spec in (*plan.workers, plan.router)]
        async with aiohttp.ClientSession() as session:
            running = [asyncio.create_task(child.run(session)) for child in children]
            try:
                if await _until_ready(children, stop.asked, config.supervisor.start_timeout_s):
                    sees_all = await _router_sees_all(session, plan.router.url, config)
                    board.ready(_ready_text(config, plan, children, clock() - started, sees_all=sees_all))
                    await stop.asked.wait()
            finally:
                board.stopping()
                await _stop(children, config.supervisor.stop_grace_s, stop.now)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)


def _child(spec: ChildSpec, config: StackConfig, board: Board, clock: Callable[[], float]) -> Child:
    child = Child(spec, board.show, backoff_max_s=config.supervisor.restart_backoff_max_s, clock=clock)
    board.add(child)
    return child


async def _until_ready(children: Sequence[Child], stop: asyncio.Event, timeout_s: float) -> bool:
    """Wait until everything serves, or what can serve does and the rest has failed; False when asked to stop.

    Raises:
        StartError: the router or every worker failed, or nothing served in time.
    """
    *workers, router = children
    try:
        async with asyncio.timeout(timeout_s):
            while not stop.is_set():
                if router.failures >= _HOPELESS_AFTER:
                    raise StartError(f"the router does not start; see {router.spec.log}")
                if workers and all(worker.failures >= _HOPELESS_AFTER for worker in workers):
                    raise StartError(f"no worker starts; see {workers[0].spec.log}")
                settled = all(w.state is State.READY or w.failures >= _HOPELESS_AFTER for w in workers)
                if router.state is State.READY and settled:
                    return True
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        if router.state is State.READY and any(worker.state is State.READY for worker in workers):
            return True
        raise StartError(f"nothing served within {timeout_s:.0f} s; see {router.spec.log}") from None
    return False


async def _router_sees_all(session: aiohttp.ClientSession, url: str, config: StackConfig) -> bool:
    """Wait until the router's own probes have found every worker; False if they do not within two rounds."""
    wait_s = 2 * (config.health.interval_s + config.health.timeout_s)
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(wait_s):
            while True:
                async with session.get(f"{url}/ready") as response:
                    if (await response.json())["status"] == "ready":
                        return True
                await asyncio.sleep(_POLL_S)
    return False


async def _stop(children: Sequence[Child], grace_s: float, now: asyncio.Event) -> None:
    """The router first, so that no request meets a worker that is going; then all workers at once."""
    *workers, router = children
    await router.stop(grace_s, now)
    await asyncio.gather(*(worker.stop(grace_s, now) for worker in workers))


def _ready_text(config: StackConfig, plan: Plan, children: Sequence[Child], seconds: float, *, sees_all: bool) -> str:
    *workers, router = children
    url = router.spec.url
    serving = sum(worker.state is State.READY for worker in workers)
    started = f"{serving} of {len(workers)} workers started" if workers else "workers served elsewhere"
    names = ", ".join(model.name for model in config.models)
    lines = [f"Crossfill is ready on {url} ({names}; {started}; {seconds:.0f} s)"]
    if not sees_all:
        lines.append(f"Some workers do not answer yet ({url}/ready tells which); they are taken in when they do.")
    body = {
        "model": "auto" if config.routing.ladder else config.models[0].name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 60,
    }
    key = '-H "authorization: Bearer $CROSSFILL_API_KEY" ' if config.auth.keys_file else ""
    lines += [
        "",
        f"curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{json.dumps(body)}'",
        "",
        f"Any OpenAI client works with base_url={url}/v1. Metrics: {url}/metrics. "
        f"Logs: {plan.router_file.parents[1] / 'log'}.",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)
