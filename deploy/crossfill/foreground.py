"""One worker in the foreground: its own output, a line when it is ready, an orderly end on Ctrl-C."""

import asyncio
import time

import aiohttp
from rich.console import Console

from crossfill.child import Child, ChildSpec, State
from crossfill.stopping import Stop


def run_worker(spec: ChildSpec, *, grace_s: float, console: Console) -> int:
    """Run the worker until it ends or a signal asks for the end; the exit status (0 after a requested stop)."""
    return asyncio.run(_run(spec, grace_s, console))


async def _run(spec: ChildSpec, grace_s: float, console: Console) -> int:
    stop = Stop()
    failed = asyncio.Event()

    def show(child: Child) -> None:
        if child.state is State.READY:
            console.print(f"{spec.name} is ready on {spec.url} {child.detail}", soft_wrap=True, highlight=False)
        elif child.state is State.ENDED:
            # Whoever started it by hand wants to see why it ended, not to see it start again.
            console.print(f"{spec.name} ended {child.detail.split(',')[0]}", soft_wrap=True, highlight=False)
            failed.set()

    child = Child(spec, show, backoff_max_s=1, clock=time.monotonic)
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(child.run(session))
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop.asked, failed)]
        await asyncio.wait({*waiting, running}, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()
        await child.stop(grace_s, stop.now)
        await running
    return 1 if failed.is_set() else 0
