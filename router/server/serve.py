"""Runs a router as a process: uvicorn, logging, and an orderly end on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from router.app import create_app
from router.lifecycle import Lifecycle
from router.server.protocol import protocol_with
from router.telemetry.access_log import access_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from socket import socket
    from types import FrameType

    from fastapi import FastAPI

    from router.config import RouterConfig

START_FAILED = 3
"""The exit status of a process that could not begin to serve."""

# Streams that still run after this are told so and end; what has not ended a little later is cut.
_GRACE_S = 30.0
_LAST_WORDS_S = 5
# Above the idle limits of common clients and proxies, so that they close first.
_KEEP_ALIVE_S = 75


def run(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, finish running requests and return.

    Raises ConfigError for a bad configuration, and SystemExit other than 0 if the server cannot start.
    """
    configure_logging()
    lifecycle = Lifecycle()
    server = RouterServer(server_config(create_app(config, lifecycle=lifecycle), config), lifecycle)
    server.run()
    if not server.started:
        raise SystemExit(START_FAILED)


def server_config(app: FastAPI, config: RouterConfig) -> uvicorn.Config:
    """How uvicorn serves `app`."""
    return uvicorn.Config(
        app,
        host=config.listen.host,
        port=config.listen.port,
        loop="uvloop",
        http=protocol_with(config.limits),
        ws="none",
        lifespan="on",
        # Else uvicorn reads a number from the environment, to which nothing here listens.
        workers=1,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(_GRACE_S) + _LAST_WORDS_S,
    )


class RouterServer(uvicorn.Server):
    """A server that stops being ready as soon as it is told to stop, and for which that is a normal end."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, grace_s: float = _GRACE_S) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._grace_s = grace_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop came."""
        self._lifecycle.is_draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to serve. What lives by now lives to the end, and need not be looked through for garbage again.

        A full collection would take 60 ms and more, on which every stream waits.
        """
        await super().startup(sockets)
        gc.collect()
        gc.freeze()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let requests finish for the grace period, then end them with a word to their clients."""
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._lifecycle.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own raises the signal again at the end, which would make the exit status a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def configure_logging() -> None:
    """Access lines as bare JSON on stdout, everything else readable on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(logging.Formatter("%(message)s"))
    access_logger.handlers = [lines]
    access_logger.propagate = False
