"""Runs a router as one process or as several on one address.

Several have a parent that serves nothing: it binds the address, starts the processes, starts one again that ended, and
hands on the signal to stop. Each process is a whole router with an event loop of its own; they share the listening
sockets, so the kernel gives a connection to whichever takes it first, and none is lost when one of them ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from router.errors import ConfigError
from router.server import serve
from router.server.process import ERROR, READY, Assignment
from router.telemetry.shared_metrics import FOLDER_VARIABLE, forget_gauges, reserve_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.config import ListenConfig, RouterConfig

_log = logging.getLogger("crossfill.processes")

_BACKOFF_MAX_S = 60.0


def run(config: RouterConfig) -> None:
    """Serve in `listen.processes` processes until SIGTERM or SIGINT, finish running requests and return.

    Raises ConfigError for a bad configuration or address, and SystemExit other than 0 if a process could not start or
    did not end well.
    """
    if config.listen.processes == 1:
        serve.run(config)
        return
    serve.configure_logging()
    with ExitStack() as held:
        listeners = [held.enter_context(listener) for listener in bind(config.listen)]
        folder = Path(held.enter_context(TemporaryDirectory(prefix="crossfill-metrics-", ignore_cleanup_errors=True)))
        reserve_files(folder, config.listen.processes)
        if status := asyncio.run(_Parent(config, listeners, folder).run()):
            raise SystemExit(status)


def bind(listen: ListenConfig) -> list[socket.socket]:
    """Sockets bound to every address of `listen.host`, on one port. Raises ConfigError."""
    bound: list[socket.socket] = []
    port = listen.port
    try:
        found = socket.getaddrinfo(
            listen.host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            port = listener.getsockname()[1]
    except OSError as error:
        for listener in bound:
            listener.close()
        raise ConfigError(f"cannot listen on {listen.host}:{port}: {error.strerror}") from error
    return bound


class _Child:
    """A started process, and the socket by which it is told its part and tells that it is ready."""

    def __init__(
        self, process: asyncio.subprocess.Process, told: asyncio.StreamReader, control: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.is_ready = False
        self.fault = ""
        self._told = told
        self._control = control

    def assign(self, assignment: Assignment) -> None:
        """Send the child its part."""
        self._control.write(assignment.model_dump_json().encode() + b"\n")

    async def settle(self) -> None:
        """Wait until the child is ready, or has said why it cannot be (`fault`), or has ended."""
        message = b""
        with contextlib.suppress(ConnectionError):
            message = (await self._told.readline()).rstrip(b"\n")
        self.is_ready = message == READY
        if message.startswith(ERROR):
            self.fault = message.removeprefix(ERROR).decode()

    async def end(self) -> str:
        """Wait for the end; how it came, in words."""
        status = await self.process.wait()
        self._control.close()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return f"{how} ({self.fault})" if self.fault else how

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class _Parent:
    """Keeps one process in each slot."""

    def __init__(self, config: RouterConfig, listeners: Sequence[socket.socket], folder: Path) -> None:
        self._config = config
        self._listeners = listeners
        self._folder = folder
        self._children: dict[int, _Child] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; the exit status. Raises ConfigError if the first process says that it cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        host, port = self._listeners[0].getsockname()[:2]
        # One goes ahead: what keeps it from starting, a bad file above all, would keep all of them.
        first = await self._start(0)
        await first.settle()
        if not first.is_ready and not self._stopping.is_set():
            await first.end()
            if first.fault:
                raise ConfigError(first.fault)
            return serve.START_FAILED
        shown = f"[{host}]" if ":" in host else host
        _log.info("%d processes running on http://%s:%d", self._config.listen.processes, shown, port)
        others = (self._keep(slot) for slot in range(1, self._config.listen.processes))
        ends = await asyncio.gather(self._keep(0, first), *others)
        return 0 if all(ends) else 1

    def _signalled(self) -> None:
        # The second one asks for an end without waiting for requests; SIGINT means that to a process that is stopping.
        number = signal.SIGINT if self._stopping.is_set() else signal.SIGTERM
        self._stopping.set()
        # A socket that one process holds open takes connections, which nobody would accept any more.
        for listener in self._listeners:
            listener.close()
        for child in self._children.values():
            child.signal(number)

    async def _keep(self, slot: int, child: _Child | None = None) -> bool:
        """Keep a process in `slot` until told to stop; whether the last one then ended well."""
        failures = 0
        while child is not None or not self._stopping.is_set():
            child = child or await self._start(slot)
            if not child.is_ready:
                await child.settle()
            how = await child.end()
            del self._children[slot]
            forget_gauges(self._folder, slot)
            if self._stopping.is_set():
                # One that was still starting has nothing to finish, and no handler for the signal yet.
                return child.process.returncode == 0 or not child.is_ready
            failures = 0 if child.is_ready else failures + 1
            pause_s = min(2.0 ** min(failures, 10), _BACKOFF_MAX_S)
            _log.error("process %d (pid %d) ended %s, starts again in %g s", slot, child.process.pid, how, pause_s)
            child = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        return True

    async def _start(self, slot: int) -> _Child:
        ours, theirs = socket.socketpair()
        numbers = [listener.fileno() for listener in self._listeners]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                # -P: else a file in the working folder would be taken for a module.
                *(sys.executable, "-P", "-m", "router.server.process", str(theirs.fileno())),
                pass_fds=(theirs.fileno(), *numbers),
                env={**os.environ, FOLDER_VARIABLE: str(self._folder)},
                # A session of its own keeps the terminal's Ctrl-C from it: it is stopped by its parent.
                start_new_session=True,
            )
        child = self._children[slot] = _Child(process, *await asyncio.open_connection(sock=ours))
        _log.info("process %d started (pid %d)", slot, process.pid)
        child.assign(Assignment(config=self._config, slot=slot, listeners=tuple(numbers), metrics_folder=self._folder))
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        return child
