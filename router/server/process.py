"""One of several router processes: `python -m router.server.process FD`, where FD is a socket to the parent.

The parent sends an `Assignment`, one JSON line, and gets a line back: `ready`, or `error` and why not. When the socket
closes the parent is gone, and this process ends too.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from pydantic import BaseModel

from router.app import create_app
from router.config import RouterConfig
from router.errors import ConfigError
from router.lifecycle import Lifecycle
from router.server.serve import START_FAILED, RouterServer, configure_logging, server_config
from router.telemetry.shared_metrics import SharedRegistry

READY, ERROR = b"ready", b"error "


class Assignment(BaseModel):
    """What the parent wants: `listeners` are inherited file descriptors, `slot` counts from 0."""

    config: RouterConfig
    slot: int
    listeners: tuple[int, ...]
    metrics_folder: Path


class _ChildServer(RouterServer):
    """Tells the parent when it serves."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, parent: socket.socket) -> None:
        super().__init__(config, lifecycle)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        await super().startup(sockets)
        if self.started:
            self._parent.sendall(READY + b"\n")


def run(parent: socket.socket) -> int:
    """Serve as assigned until SIGTERM or the parent's end; the exit status."""
    with parent.makefile("rb") as lines:
        assignment = Assignment.model_validate_json(lines.readline())
    configure_logging()
    lifecycle = Lifecycle()
    config = assignment.config
    try:
        app = create_app(
            config,
            registry=SharedRegistry(assignment.metrics_folder, assignment.slot, config.listen.processes),
            lifecycle=lifecycle,
        )
    except ConfigError as error:
        parent.sendall(ERROR + str(error).encode() + b"\n")
        return START_FAILED
    server = _ChildServer(server_config(app, config), lifecycle, parent)
    threading.Thread(target=_end_with, args=(parent, lifecycle), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=number) for number in assignment.listeners])
    return 0 if server.started else START_FAILED


def _end_with(parent: socket.socket, lifecycle: Lifecycle) -> None:
    """Wait for the parent's end; then finish requests and end, or end at once if that was going on already."""
    with contextlib.suppress(OSError):
        parent.recv(1)
    if lifecycle.is_draining:
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(socket.socket(fileno=int(sys.argv[1]))))
