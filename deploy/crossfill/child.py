"""One process that `crossfill up` keeps running."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import aiohttp

_POLL_S = 0.5
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MAX_LOG_BYTES = 16 * 2**20

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class State(StrEnum):
    """Where a child stands."""

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ChildSpec:
    """What to run and how to know that it serves: `url` + /health answers 200, and its models include `model`.

    Without `log`, the process writes to this one's output.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    url: str
    log: Path | None
    health_path: str = "/health"
    model: str | None = None


class Child:
    """Runs a process, restarts it with growing pauses when it ends, stops it with everything it spawned.

    Args:
        spec: what to run.
        on_change: called after each change of `state`; `detail` then says why.
        backoff_max_s: longest pause before a restart: one second after a process that had served, then twice as long
            after each one that ends without having served.
        clock: seconds, monotonic.
    """

    def __init__(
        self, spec: ChildSpec, on_change: Callable[["Child"], None], *, backoff_max_s: float, clock: Callable[[], float]
    ) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.detail = ""
        self.failures = 0
        """Ends in a row without having been ready."""
        self.ready_after_s: float | None = None
        self._on_change = on_change
        self._backoff_max_s = backoff_max_s
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Keep the process running until `stop`."""
        while not self._stopping.is_set():
            # SGLang leaves sockets and files behind; its own folder goes with it. Short: a socket's path has 107 bytes.
            folder = tempfile.mkdtemp(prefix="crossfill-")
            try:
                ended = await self._run_once(session, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if self._stopping.is_set():
                break
            self.failures = 0 if self.state is State.READY else self.failures + 1
            pause_s = min(2.0 ** min(self.failures, 10), self._backoff_max_s)
            where = f"; see {self.spec.log}" if self.spec.log else ""
            self._change(State.ENDED, f"{ended}, starts again in {pause_s:.0f} s{where}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        self._change(State.STOPPED, "")

    async def stop(self, grace_s: float, now: asyncio.Event | None = None) -> None:
        """Ask the process to end; after `grace_s` seconds, or when `now` is set, end it and all it spawned."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        waiting = asyncio.ensure_future(process.wait())
        hurry = asyncio.ensure_future((now or asyncio.Event()).wait())
        await asyncio.wait({waiting, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._signal_group(signal.SIGKILL)
        await waiting

    def memory_bytes(self) -> int:
        """Proportional set size of the process and all it spawned; 0 where the system does not tell (Linux does)."""
        total = 0
        for folder, _ in self._members():
            with contextlib.suppress(OSError, StopIteration):
                rollup = (folder / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
        return total

    def cpu_s(self) -> float:
        """Processor time that the process and all that it spawned and that lives have used; 0 as for memory."""
        # Fields 14 and 15: in user mode, and in the kernel.
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in self._members())
        return ticks / os.sysconf("SC_CLK_TCK")

    def _members(self) -> Iterator[tuple[Path, list[str]]]:
        """Each process of the group that the child leads: its folder, and its `stat` from the third field on."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # The name in field 2 may hold spaces.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if self._process is not None and int(fields[2]) == self._process.pid:
                yield folder, fields

    async def _run_once(self, session: aiohttp.ClientSession, folder: str) -> str:
        """Run the process to its end; how it ended, in words."""
        started_s = self._clock()
        try:
            process = self._process = await self._spawn(folder)
        except OSError as error:
            return f"could not be started ({error.strerror})"
        self._change(State.STARTING, "")
        watch = asyncio.create_task(self._watch(session, started_s))
        try:
            status = await process.wait()
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        # What the process spawned must not outlive it: a scheduler left behind would hold the model's memory.
        self._signal_group(signal.SIGKILL)
        return _status_text(status)

    async def _spawn(self, folder: str) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as held:
            output = None
            if self.spec.log is not None:
                self.spec.log.parent.mkdir(parents=True, exist_ok=True)
                fresh = not self.spec.log.exists() or self.spec.log.stat().st_size > _MAX_LOG_BYTES
                output = held.enter_context(self.spec.log.open("wb" if fresh else "ab"))
            # A session of its own keeps the terminal's Ctrl-C from reaching it: we stop children in order.
            return await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else asyncio.subprocess.STDOUT,
                env={**self.spec.environment, "TMPDIR": folder},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def _watch(self, session: aiohttp.ClientSession, started_s: float) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if await _serves(session, self.spec):
                self.ready_after_s = self._clock() - started_s
                self.failures = 0
                self._change(State.READY, f"after {self.ready_after_s:.0f} s")
                return

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _change(self, state: State, detail: str) -> None:
        self.state, self.detail = state, detail
        self._on_change(self)


async def _serves(session: aiohttp.ClientSession, spec: ChildSpec) -> bool:
    try:
        async with session.get(spec.url + spec.health_path, timeout=_PROBE_TIMEOUT) as response:
            if response.status != 200:
                return False
        if spec.model is None:
            return True
        # Whoever answers on the port may be somebody else's worker.
        async with session.get(spec.url + "/v1/models", timeout=_PROBE_TIMEOUT) as response:
            listed = await response.json(content_type=None)
            return spec.model in {entry["id"] for entry in listed["data"]}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return False


def _end_with_parent() -> None:
    """On Linux, have the child terminated when this process dies, even of SIGKILL: no worker is left holding memory."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _status_text(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
