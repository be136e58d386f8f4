"""From the stack's configuration to the processes to run."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from crossfill.child import ChildSpec
from crossfill.config import StackConfig
from crossfill.errors import StartError
from crossfill.ports import Ports
from crossfill.reuse_plan import reuse_settings
from engines import launch
from engines.config import WorkerConfig
from engines.errors import WorkerConfigError
from router.config import ListenConfig, RouterConfig


@dataclass(frozen=True)
class Plan:
    """Processes to run, and the router's configuration, which goes to `router_file` before the router starts."""

    workers: tuple[ChildSpec, ...]
    router: ChildSpec
    router_config: RouterConfig
    router_file: Path


def make_plan(config: StackConfig, folders: Mapping[str, Path | str], state_dir: Path, ports: Ports) -> Plan:
    """Choose ports and write down every command line.

    Args:
        config: the stack.
        folders: where each `source` of the configuration lies (or the hub id it is).
        state_dir: logs go to `state_dir/log`, the router's file to `state_dir/run`.
        ports: where workers' ports come from.

    Raises:
        StartError: the router's port is taken, or a worker's settings cannot work.
    """
    listen = settle(config.listen)
    reuse = reuse_settings(config, folders)
    workers: list[ChildSpec] = []
    started: dict[str, list[str]] = {}
    for model in config.models:
        if model.source is not None:
            specs = [
                _worker(
                    config.worker_config(model, folders[model.source], ports.take(), reuse.get(model.name)),
                    f"{model.name}/{index}",
                    state_dir,
                )
                for index in range(model.replicas)
            ]
            workers += specs
            started[model.name] = [spec.url for spec in specs]
    router_config = config.router_config(started).model_copy(update={"listen": listen})
    router_file = state_dir / "run" / "router.yaml"
    router = ChildSpec(
        name="router",
        command=(sys.executable, "-P", "-m", "crossfill", "serve", str(router_file)),
        environment=dict(os.environ),
        url=f"http://{reachable(listen.host)}:{listen.port}",
        health_path="/live",
        log=state_dir / "log" / "router.log",
    )
    return Plan(tuple(workers), router, router_config, router_file)


def write_router_file(plan: Plan) -> None:
    """Write the router's configuration where its command line says, for its owner only: it may hold a password."""
    plan.router_file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(plan.router_config.model_dump(mode="json"), sort_keys=False)
    with open(plan.router_file, "w", encoding="utf-8", opener=_private) as file:
        # One that is there already keeps its mode.
        os.fchmod(file.fileno(), 0o600)
        file.write(f"# Written by `crossfill up`; edit the stack's file instead.\n{text}")


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def settle(listen: ListenConfig) -> ListenConfig:
    """The router's address with a port that is free now; port 0 becomes one that the system chooses.

    Raises:
        StartError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise StartError(
                f"cannot listen on {listen.host}:{listen.port} ({error.strerror}); set `listen`, or stop what uses it"
            ) from error
        return listen.model_copy(update={"port": probe.getsockname()[1]})


def _worker(worker: WorkerConfig, name: str, state_dir: Path) -> ChildSpec:
    try:
        return worker_spec(worker, name, state_dir / "log" / f"{name.replace('/', '-')}.log")
    except WorkerConfigError as error:
        raise StartError(f"worker {name}: {error}") from error


def worker_spec(worker: WorkerConfig, name: str, log: Path | None) -> ChildSpec:
    """How to run one worker and know that it serves; `name` is what messages call it.

    Raises:
        WorkerConfigError: the settings cannot work.
    """
    return ChildSpec(
        name=name,
        command=tuple(launch.command(worker)),
        environment=launch.environment(worker),
        url=f"http://{reachable(worker.host)}:{worker.port}",
        model=worker.name,
        log=log,
    )


def reachable(host: str) -> str:
    """The host to use in a URL for something that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104  # recognised, not bound
